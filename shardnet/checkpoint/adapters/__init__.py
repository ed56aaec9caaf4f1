"""LoRA adapters: from files to what they add to linears."""
