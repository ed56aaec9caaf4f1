"""What is computed: no files, no sockets."""
