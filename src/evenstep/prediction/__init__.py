"""What a worker's steps so far say about its next one."""

from ._affine_filter import AffineFilter as AffineFilter

__all__ = ["AffineFilter"]
