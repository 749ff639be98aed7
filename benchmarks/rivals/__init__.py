"""Rivals of today in environments of their own: `python -m benchmarks.rivals`."""
