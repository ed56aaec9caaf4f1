"""Encoders: texts to vectors and scores, by transformers' own classes."""
