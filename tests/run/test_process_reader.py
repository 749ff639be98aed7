"""What a process and its machine have to spare, and for which policies it is read."""

import os
import subprocess
import sys

import numpy as np
import pytest

from evenstep._host import Cgroups
from evenstep._run import ProcessReader
from evenstep._run._machine_reader import (
    PsutilReader,
    machine_reader_of,
    read_by,
)
from evenstep.policies import Auto, LbBsp2018

from ..host.linux_root import LinuxRoot

LIVE = """
import os
from evenstep._run import ProcessReader
reader = ProcessReader()
print("ready", flush=True)  # to import under such a quota would take half a minute
while input():
    print(reader.read()[0] * len(os.sched_getaffinity(0)), flush=True)
"""


class Worker(LinuxRoot):
    """A process on four CPUs, whose thread 7 has run for a second and never waited."""

    def __init__(self, root, version):
        super().__init__(root, version, "/pod/box")
        self.num_cpus, self.thread_id, self.now_s = 4, 7, 1.0
        self.quota("/pod/box", "max 100000" if version == 2 else "-1")
        self.memory("/pod/box", "max" if version == 2 else str(2**63 - 4096), 1, 1)
        self.thread(7, 1.0, 0.0)
        self.write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   6 kB\n")

    def reader(self):
        return ProcessReader(
            root=self.root,
            num_cpus=lambda: self.num_cpus,
            thread_id=lambda: self.thread_id,
            now=lambda: self.now_s,
        )


@pytest.fixture(params=[1, 2])
def worker(request, tmp_path):
    return Worker(tmp_path, request.param)


def test_a_changed_quota_is_known_at_the_very_next_read(worker):
    """It is the level in force, and no mean over the time since the read before."""
    reader = worker.reader()
    assert reader.read()[0] == 1.0

    for cores, share in ((1.0, 0.25), (0.5, 0.125), (9.0, 1.0), (2.0, 0.5)):
        worker.quota("/pod/box", cores)
        assert reader.read()[0] == share


def test_changed_cpus_are_known_at_the_very_next_read(worker):
    """As a share of those there were at first, and never of more than all."""
    reader = worker.reader()
    shares = []
    for worker.num_cpus in (4, 1, 2, 8):
        shares.append(reader.read()[0])

    assert shares == [1.0, 0.25, 0.5, 1.0]


def test_waits_for_a_core_are_the_neighbours(worker):
    """A thread that runs for three quarters of the time it could has that share since then."""
    reader = worker.reader()
    reader.read()
    worker.thread(7, 1.3, 0.1)
    assert reader.read()[0] == pytest.approx(0.75)

    worker.thread(7, 1.8, 0.1)
    assert reader.read()[0] == 1.0


def test_what_a_quota_held_back_is_no_neighbour(worker):
    """Its level says it already: counted twice, a quota of a core would pass for less."""
    reader = worker.reader()
    worker.quota("/pod/box", 1.0)
    reader.read()
    worker.thread(7, 1.1, 0.9)
    worker.throttled("/pod/box", 0.6)
    worker.throttled("/pod", 0.3)

    assert reader.read()[0] == 0.25


def test_another_thread_has_times_of_its_own(worker):
    """They are not compared with those of the one before."""
    reader = worker.reader()
    reader.read()
    worker.thread(8, 0.2, 0.2)
    worker.thread_id = 8

    assert reader.read()[0] == pytest.approx(0.5)


def test_without_a_threads_waits_the_groups_pressure_counts(tmp_path):
    """By files of the second version, where a kernel counts no times of threads."""
    worker = Worker(tmp_path, 2)
    worker.thread(7, 0.0, 0.0)
    worker.pressure("/pod/box", 0.5)
    reader = worker.reader()
    reader.read()
    worker.now_s = 3.0
    worker.pressure("/pod/box", 1.0)
    assert reader.read()[0] == pytest.approx(0.75)

    worker.now_s = 5.0
    assert reader.read()[0] == 1.0


def test_memory_is_what_machine_and_group_leave(worker):
    """The smaller of both, as it is now."""
    reader = worker.reader()
    assert reader.read()[1] == 6144

    worker.memory("/pod/box", "9000", 4000, 500)
    assert reader.read()[1] == 5500


def test_a_process_that_is_moved_is_followed(worker):
    """To another group, with another quota."""
    worker.quota("/other", 2.0)
    reader = worker.reader()
    assert reader.read()[0] == 1.0

    worker.join("/other")
    assert reader.read()[0] == 0.5


def test_a_system_that_tells_nothing_has_all_cpus_free(tmp_path):
    """And no memory that is known."""
    assert ProcessReader(root=tmp_path, num_cpus=lambda: 4).read() == (1.0, 0)


@pytest.fixture
def group():
    """A real control group of version 1, gone afterwards."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("needs Linux and root, to make a control group")
    mounts = Cgroups.find().first_cpu[-1:]
    if not mounts:
        pytest.skip("needs control groups of version 1 with the CPU, which are not mounted here")
    folder = mounts[0] / f"evenstep-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    folder.rmdir()


def test_a_live_process_sees_its_quota_change(group):
    """A real group of version 1: what is written to it, the process reads next."""
    (group / "cpu.cfs_period_us").write_text("100000")
    with subprocess.Popen(
        [sys.executable, "-c", LIVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            (group / "cgroup.procs").write_text(str(child.pid))
            assert child.stdout.readline() == "ready\n"
            told = []
            for quota_us in (2000, 5000, 1000):
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
                child.stdin.write("read\n")
                child.stdin.flush()
                told.append(float(child.stdout.readline()))
            (group / "cpu.cfs_quota_us").write_text("-1")
            child.stdin.write("\n")
            child.stdin.flush()
        finally:
            (group / "cpu.cfs_quota_us").write_text("-1")
            child.stdin.close()
            child.wait(60)

    assert told == pytest.approx([0.02, 0.05, 0.01])


def test_what_this_system_has_gives_a_share_and_bytes():
    """From the first call on: this process's files, or psutil where there are none."""
    for reader in (machine_reader_of(LbBsp2018()), PsutilReader()):
        share, size = reader.read()

        assert 0 <= share <= 1
        assert size > 2**20


def test_numbers_of_numpy_are_read_as_pythons_own():
    """Messages between ranks carry no others."""

    class Mine:
        def read(self):
            return np.float32(0.5), np.int64(7)

    assert list(map(type, read_by(Mine()))) == [float, int]


def test_without_the_files_of_linux_psutil_reads_the_host(tmp_path):
    """As on macOS and Windows."""
    assert isinstance(machine_reader_of(LbBsp2018(), root=tmp_path), PsutilReader)


def test_a_reader_that_is_given_is_taken():
    """The user's own, wherever the policy asks."""
    mine = PsutilReader()

    assert machine_reader_of(LbBsp2018(), mine) is mine


def test_nothing_is_read_for_a_policy_that_does_not_ask():
    """Unless one asks, a reader costs nothing."""
    assert machine_reader_of(Auto(), PsutilReader()) is None
