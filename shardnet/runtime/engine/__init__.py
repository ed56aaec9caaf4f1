"""Requests in, text out: the head's engine."""
