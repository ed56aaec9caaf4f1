"""What runs at boot, and how it comes to another version."""
