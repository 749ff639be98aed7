"""A live run in the terminal: figures from its events, and how they are shown."""

from ._live_run import LiveRun as LiveRun
from ._run_sources import FileSource as FileSource
from ._run_sources import Source as Source
from ._run_sources import StreamSource as StreamSource
from ._run_sources import watch as watch
from ._top_view import TopView as TopView
