"""What commands write, and where."""
