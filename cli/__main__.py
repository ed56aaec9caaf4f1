"""`python -m shardnet_cli`: the same as the `shardnet` command."""

from .main import main

main()
