"""Which rows travel next. Pure."""
