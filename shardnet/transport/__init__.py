"""Bytes in motion: links over TCP and in memory."""
