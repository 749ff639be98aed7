"""Where events go: a file, the progress line, a hook of the user's."""

from ._event_file import EventFile as EventFile
from ._event_file import read_events as read_events
from ._event_lines import EventLines as EventLines
from ._event_lines import Line as Line
from ._followed_file import FollowedFile as FollowedFile
from ._jsonl import JsonLines as JsonLines
from ._jsonl import versions_here as versions_here
from ._line import ProgressLine as ProgressLine
from ._news import FaultLog as FaultLog
from ._outlet import Fanout as Fanout
from ._outlet import Outlet as Outlet
from ._outlet import close_all as close_all
from ._outlet import open_outlets as open_outlets
