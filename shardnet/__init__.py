"""shardnet: one language model over the machines of a home lab."""

__version__ = "0.1.0"
