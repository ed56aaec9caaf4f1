"""Raw payloads: activations, token ids, rows of logits and hidden states."""
