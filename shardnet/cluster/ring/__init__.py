"""Building a ring and taking part in one."""
