"""What the system counts of a process, from files laid out as Linux lays them."""

import pytest

from evenstep._run._garbage_clock import GarbageClock
from evenstep._run._host_reader import HostReader


class Machine:
    """A root with the files that are read; the rest is counted by hand."""

    def __init__(self, root, cgroup, quota_file):
        self.root, self.quota_file = root, root / quota_file
        self.now_s = self.cpu_s = 0.0
        self.faults = self.retries = 0
        (root / "proc/self/task/7").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(cgroup)
        self.quota_file.parent.mkdir(parents=True)
        self.schedule(0)

    def schedule(self, delay_ns):
        (self.root / "proc/self/task/7/schedstat").write_text(f"123 {delay_ns} 45\n")

    def reader(self):
        return HostReader(
            root=self.root,
            thread_id=7,
            now=lambda: self.now_s,
            cpu_s=lambda: self.cpu_s,
            major_faults=lambda: self.faults,
            alloc_retries=lambda: self.retries,
        )


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/pod/box\n", "sys/fs/cgroup/pod/box/cpu.stat", "usage_usec 9\nthrottled_usec {us}\n"),
        ("0::/pod/box\n", "sys/fs/cgroup/pod/cpu.stat", "throttled_usec {us}\n"),
        ("0::/../x\n", "sys/fs/cgroup/cpu.stat", "throttled_usec {us}\n"),
        (
            "5:memory:/a\n3:cpu,cpuacct:/a\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.stat",
            "nr_throttled 3\nthrottled_time {us}000\n",
        ),
        ("3:cpu,cpuacct:/of/host\n", "sys/fs/cgroup/cpu/cpu.stat", "throttled_time {us}000\n"),
    ],
)
def test_differences_between_two_looks(tmp_path, cgroup, file, text):
    """Version 1 and 2 of cgroups, a quota around the own group, and a path of the host's."""
    machine = Machine(tmp_path, cgroup, file)
    machine.quota_file.write_text(text.format(us=1_000_000))
    reader = machine.reader()
    machine.quota_file.write_text(text.format(us=1_250_000))
    machine.schedule(2_000_000_000)
    machine.now_s, machine.cpu_s, machine.faults, machine.retries = 2.0, 1.5, 3, 4

    clues = reader.read(11)

    assert (clues.step, clues.lasted_s, clues.cpu_s) == (11, 2.0, 1.5)
    assert clues.throttled_s == pytest.approx(0.25)
    assert clues.run_delay_s == pytest.approx(2.0)
    assert (clues.major_faults, clues.alloc_retries) == (3, 4)
    assert reader.read(12).throttled_s == 0.0


def test_a_system_without_any_of_it_says_nothing(tmp_path):
    """What is not offered is 0, and no error."""
    clues = HostReader(root=tmp_path, major_faults=lambda: 0).read(0)

    assert (clues.throttled_s, clues.run_delay_s, clues.major_faults) == (0.0, 0.0, 0)
    assert clues.lasted_s >= 0


def test_garbage_is_counted_from_begin_to_end():
    """And no more once it is closed."""
    now_s, callbacks = [0.0], []
    clock = GarbageClock(now=lambda: now_s[0], callbacks=callbacks)
    clock.open()
    for begin_s, end_s in ((1.0, 1.5), (4.0, 4.25)):
        for phase, now_s[0] in (("start", begin_s), ("stop", end_s)):
            callbacks[0](phase, {"generation": 0})
    clock.close()

    assert clock.total_s == 0.75
    assert callbacks == []
