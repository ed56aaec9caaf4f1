"""Stages cut over shards: each computes some outputs of every linear, and all are gathered."""
