"""Finding nodes by mDNS."""
