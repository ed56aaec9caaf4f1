"""What a head does when its ring is lost, or a better one can be had."""
