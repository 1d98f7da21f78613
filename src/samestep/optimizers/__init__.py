"""How weights follow from gradients: the rules, what applies them to a replica, and averages over the path."""
