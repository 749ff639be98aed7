"""What the system counts of a process, from files laid out as Linux lays them."""

import pytest

from evenstep._host import GarbageClock, HostReader

from .linux_root import LinuxRoot


class Machine:
    """A root with the files that are read; the rest is counted by hand."""

    def __init__(self, root, version):
        self.files = LinuxRoot(root, version, "/pod/box")
        self.now_s = self.cpu_s = 0.0
        self.faults = self.retries = 0
        self.files.quota("/pod/box", 1.0)  # the group is there
        self.files.thread(7, 1.0, 0.0)

    def reader(self):
        return HostReader(
            root=self.files.root,
            thread_id=7,
            now=lambda: self.now_s,
            cpu_s=lambda: self.cpu_s,
            major_faults=lambda: self.faults,
            alloc_retries=lambda: self.retries,
        )


@pytest.mark.parametrize("group", ["/pod/box", "/pod", ""])
@pytest.mark.parametrize("version", [1, 2])
def test_differences_between_two_looks(tmp_path, version, group):
    """Under both versions of cgroups, of the own one or of one around it."""
    machine = Machine(tmp_path, version)
    machine.files.throttled(group, 1.0)
    reader = machine.reader()
    machine.files.throttled(group, 1.25)
    machine.files.thread(7, 2.0, 2.0)
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
