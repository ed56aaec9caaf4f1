"""Bytes on a link, without IO: frames, control messages, handshake, link state machine."""
