"""What mixes the positions of a sequence: attention of other kinds than the usual, recurrences."""
