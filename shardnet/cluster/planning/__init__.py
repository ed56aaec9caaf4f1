"""From a request to the plan of a ring."""
