"""Where events go: a file, the progress line, a hook of the user's."""

from ._event_lines import EventFile as EventFile
from ._event_lines import EventLines as EventLines
from ._event_lines import FollowedFile as FollowedFile
from ._event_lines import Line as Line
from ._line import FaultLog as FaultLog
from ._line import ProgressLine as ProgressLine
from ._outlet import JsonLines as JsonLines
from ._outlet import Outlet as Outlet
from ._outlet import close_all as close_all
from ._outlet import open_outlets as open_outlets
from ._outlet import versions_here as versions_here
