"""What a stage keeps of sequences: keys and values, quantised or not, states; rows of pictures."""
