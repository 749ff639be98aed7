"""The optimizer kept where a range of the parameters is owned."""
