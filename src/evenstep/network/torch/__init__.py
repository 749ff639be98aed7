"""Gradients and optimizer states shared out by links, in PyTorch over gloo."""

from ._owned._optimizer import ShardedOptimizer as ShardedOptimizer

__all__ = ["ShardedOptimizer"]
