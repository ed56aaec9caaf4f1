"""Constrained output: which tokens a grammar allows next."""
