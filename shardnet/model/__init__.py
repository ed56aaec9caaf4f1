"""Tensors, without network: checkpoints, layers, families, KV cache, sampler, tokenizer."""
