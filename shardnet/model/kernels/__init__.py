"""Linear kernels and the compiled library."""
