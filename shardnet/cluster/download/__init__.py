"""Models from the Hub."""
