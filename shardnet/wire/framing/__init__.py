"""Frames and the types of their fields."""
