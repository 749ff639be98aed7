"""What workers are worth before training: shares, step times, who to keep, one more."""

from ._advice import Advice as Advice
from ._advice import Split as Split
from ._advice import advise as advise
from ._run import RunTimes as RunTimes
from ._run import read_run as read_run

__all__ = ["Advice", "RunTimes", "Split", "advise", "read_run"]
