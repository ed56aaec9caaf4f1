"""Tensors as they are stored, and the model tensors made of them."""
