"""What the system says of a process and its machine: control groups, counters, garbage, links."""

from ._cgroups import Cgroups as Cgroups
from ._cgroups import available_bytes as available_bytes
from ._cgroups import contents as contents
from ._cgroups import number_of as number_of
from ._cgroups import thread_times_s as thread_times_s
from ._cgroups import throttled_s as throttled_s
from ._connections import Connection as Connection
from ._connections import LinkReader as LinkReader
from ._connections import TcpCounts as TcpCounts
from ._connections import connections as connections
from ._host_reader import GarbageClock as GarbageClock
from ._host_reader import HostReader as HostReader
