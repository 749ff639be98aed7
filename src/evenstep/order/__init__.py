"""Which global positions belong to which step and rank."""

from ._deal import Deal as Deal

__all__ = ["Deal"]
