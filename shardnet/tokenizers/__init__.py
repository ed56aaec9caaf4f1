"""From files to text and back."""
