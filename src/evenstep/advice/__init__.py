"""What workers are worth before training: shares, step times, who to keep, one more."""

from ._advice import advise as advise
from ._advice import read_run as read_run

__all__ = ["advise", "read_run"]
