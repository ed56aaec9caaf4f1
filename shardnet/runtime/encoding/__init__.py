"""Encoders: texts to vectors and scores, beside the ring."""
