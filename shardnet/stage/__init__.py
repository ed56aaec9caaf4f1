"""A range of layers, loaded and computing. torch, no asyncio."""
