"""Model families: a file or a row of a table each, with one `Family` record."""
