"""Balanced training under Lightning's ``Trainer``; needs the extra ``lightning``."""

from ._callback import BalanceCallback

__all__ = ["BalanceCallback"]
