"""Devices that compute the kernel text: how each is driven, and what compiles the text for it."""
