"""Functions with the same bits everywhere: of rows by the compiled library, and of float64."""
