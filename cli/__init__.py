"""The command line: typer commands over shardnet.api."""
