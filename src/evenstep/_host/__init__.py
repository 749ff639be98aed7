"""What the system says of a process and its machine: control groups, counters, garbage, links."""

from ._connections import Connection as Connection
from ._connections import LinkReader as LinkReader
from ._connections import TcpCounts as TcpCounts
from ._connections import connections as connections
from ._host_reader import Cgroups as Cgroups
from ._host_reader import GarbageClock as GarbageClock
from ._host_reader import HostReader as HostReader
from ._host_reader import available_bytes as available_bytes
from ._host_reader import contents as contents
from ._host_reader import number_of as number_of
from ._host_reader import thread_times_s as thread_times_s
from ._host_reader import throttled_s as throttled_s
