"""Drafters that read the hidden states of the model that they draft for."""
