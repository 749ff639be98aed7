"""What outlives a run: model, optimizer, loader and balancer, saved together."""
