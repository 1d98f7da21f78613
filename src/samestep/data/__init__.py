"""Examples: where they come from, and how they get to the devices."""
