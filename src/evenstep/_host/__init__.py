"""What the system says of a process and its machine: control groups, counters, garbage."""

from ._cgroups import Cgroups as Cgroups
from ._cgroups import available_bytes as available_bytes
from ._cgroups import contents as contents
from ._cgroups import number_of as number_of
from ._cgroups import thread_times_s as thread_times_s
from ._cgroups import throttled_s as throttled_s
from ._host_reader import GarbageClock as GarbageClock
from ._host_reader import HostReader as HostReader
