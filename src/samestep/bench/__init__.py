"""The exercises of the chapter on devices as measurements: what products, copies and waiting cost on this machine."""
