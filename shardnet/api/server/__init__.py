"""The HTTP server without any dialect: requests, keys, streams, errors, metrics."""
