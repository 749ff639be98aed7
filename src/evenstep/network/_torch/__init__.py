"""Gradients summed by shares that fit the links, in PyTorch over gloo."""
