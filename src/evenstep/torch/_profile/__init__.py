"""What a batch costs every worker, measured before the first step."""
