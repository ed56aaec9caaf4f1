"""Moving what slots hold to and from stages."""
