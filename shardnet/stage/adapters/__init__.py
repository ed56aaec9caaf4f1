"""What LoRA adapters add to the linears of a stage, row by row."""
