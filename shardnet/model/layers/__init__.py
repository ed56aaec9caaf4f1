"""Norms, rotary positions, attention, KV cache, MLP, experts, decoder layer."""
