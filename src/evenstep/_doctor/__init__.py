"""What ``evenstep doctor`` looks at and what it finds: facts in, findings out."""

from ._checkup_facts import Checkup as Checkup
from ._checkup_facts import CpuFacts as CpuFacts
from ._checkup_facts import Device as Device
from ._checkup_facts import LinkSpeed as LinkSpeed
from ._checkup_facts import NetworkFacts as NetworkFacts
from ._checkup_facts import Pace as Pace
from ._checkup_facts import RankFacts as RankFacts
from ._checkup_facts import RoomFacts as RoomFacts
from ._checkup_facts import read_checkup as read_checkup
from ._checkup_facts import to_json as to_json
from ._checkup_text import as_text as as_text
from ._judge import host_mbit as host_mbit
from ._judge import judge as judge
from ._judge import run_times as run_times
from ._machine_facts import TURN_S as TURN_S
from ._machine_facts import LinkServer as LinkServer
from ._machine_facts import gpus_of_driver as gpus_of_driver
from ._machine_facts import measure_link as measure_link
from ._machine_facts import read_cpu as read_cpu
from ._machine_facts import read_network as read_network
from ._machine_facts import read_room as read_room
from ._machine_facts import read_variables as read_variables
from ._machine_facts import schedule as schedule
