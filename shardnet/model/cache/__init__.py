"""What a stage keeps of sequences: keys and values, quantised or not, and states."""
