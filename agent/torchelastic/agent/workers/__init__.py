"""The worker processes of one node: start, watch and stop them."""
