"""Towers that turn pictures into rows of the language model, and their processors."""
