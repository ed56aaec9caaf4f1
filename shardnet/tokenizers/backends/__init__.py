"""Tokenizer backends built from vocabularies and merges."""
