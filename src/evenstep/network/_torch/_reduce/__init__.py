"""Sharded gradient aggregation: push to servers, sum in rank order, pull, chunk by chunk."""
