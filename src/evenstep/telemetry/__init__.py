"""Where events go: a file, a line for people, anybody's own hook."""

from ._fanout import Fanout as Fanout
from ._jsonl import JsonLines as JsonLines
from ._jsonl import read_events as read_events
from ._line import ProgressLine as ProgressLine

__all__ = ["Fanout", "JsonLines", "ProgressLine", "read_events"]
