"""This machine: device, memory, addresses, keys, folders."""
