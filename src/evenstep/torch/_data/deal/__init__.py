"""Who computes which samples: integers from integers, of no framework."""
