"""People and programs: the client of a head."""
