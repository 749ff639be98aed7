"""What fits: peaks that are read, limits found by trial, forwards run again in parts."""
