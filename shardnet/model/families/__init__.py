"""One file per model family, with one `Family` record."""
