"""The file formats of tokenizers."""
