"""The ring as its head sees it, and its data links."""
