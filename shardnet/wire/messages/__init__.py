"""The msgpack messages that frames carry."""
