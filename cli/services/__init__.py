"""What runs at boot."""
