"""Several rings behind one head: opened, kept, chosen among, taken over from."""
