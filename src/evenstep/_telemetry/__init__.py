"""Where events go: a file, the progress line, a hook of the user's."""

from ._jsonl import JsonLines as JsonLines
from ._jsonl import read_events as read_events
from ._line import ProgressLine as ProgressLine
from ._news import FaultLog as FaultLog
from ._open import open_outlets as open_outlets
from ._outlet import Fanout as Fanout
from ._outlet import Outlet as Outlet
from ._outlet import close_all as close_all

__all__ = [
    "Fanout",
    "FaultLog",
    "JsonLines",
    "Outlet",
    "ProgressLine",
    "close_all",
    "open_outlets",
    "read_events",
]
