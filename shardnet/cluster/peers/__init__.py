"""The peers of a node and the control links to them."""
