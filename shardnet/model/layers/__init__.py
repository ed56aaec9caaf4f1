"""Norms, rotary positions, attention, MLP, experts, decoder layers."""
