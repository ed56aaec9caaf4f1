"""One form of a chat request for every dialect, and how it is run."""
