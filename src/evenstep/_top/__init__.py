"""A run in the terminal, as it goes on: figures from its events, and how they are shown."""

from ._live_run import LiveRun as LiveRun
from ._live_run import RankFigures as RankFigures
from ._sources import FileSource as FileSource
from ._sources import Source as Source
from ._sources import StreamSource as StreamSource
from ._top_view import TopView as TopView
from ._watching import watch as watch

__all__ = ["FileSource", "LiveRun", "RankFigures", "Source", "StreamSource", "TopView", "watch"]
