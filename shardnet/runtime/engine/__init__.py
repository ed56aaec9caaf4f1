"""Requests in, text out."""
