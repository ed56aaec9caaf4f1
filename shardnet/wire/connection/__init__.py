"""The connection state machine: bytes in, events out."""
