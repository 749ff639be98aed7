"""What each test took, kept as a file by each run and printed by folder."""

from __future__ import annotations

import multiprocessing.forkserver
import resource
from collections import defaultdict
from pathlib import Path

import pytest

FILE = "durations.tsv"  # in the root of the tree; each run replaces it
_CPU_S = pytest.StashKey[float]()  # what this process had used before a phase of a test


class Durations:
    """A plugin of pytest that notes seconds and processor seconds of each test.

    Processes that a test starts count when they end. Those of a cluster are the fork server's.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._spent = folder / FILE, defaultdict(lambda: [0.0, 0.0])

    def pytest_sessionstart(self, session):
        """Begin the file, in the process that reports; those that run tests for it write none."""
        self._writes = not hasattr(session.config, "workerinput")
        if self._writes:
            self._path.write_text("seconds\tcore_seconds\ttest\n", "utf-8")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        """Begin to count."""
        item.stash[_CPU_S] = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        """Give a phase's processor time to its report, which goes to the process that writes."""
        report = yield
        now_s = cpu_s()
        report.user_properties = [("cpu_s", now_s - item.stash.get(_CPU_S, now_s))]
        item.stash[_CPU_S] = now_s
        return report

    def pytest_runtest_logreport(self, report):
        """Add up set-up, call and teardown; a line when the test is through."""
        spent = self._spent[report.nodeid]
        spent[0] += report.duration
        spent[1] += dict(report.user_properties).get("cpu_s", 0.0)

    def pytest_runtest_logfinish(self, nodeid):
        """Write the test's line at once, so that a run that is broken off leaves its own."""
        if not self._writes:
            return
        s, core_s = self._spent[nodeid]
        with self._path.open("a", encoding="utf-8") as file:
            print(f"{s:.3f}\t{core_s:.3f}\t{nodeid}", file=file)

    def pytest_terminal_summary(self, terminalreporter):
        """Print the folders, the longest first."""
        folders = defaultdict(list)
        for test, spent in self._spent.items():
            folders["/".join(test.partition("::")[0].split("/")[:2])].append(spent)
        terminalreporter.section(f"by folder; each test in {FILE}")
        for folder, tests in sorted(folders.items(), key=lambda pair: -sum(s for s, _ in pair[1])):
            s, core_s = (sum(column) for column in zip(*tests, strict=True))
            line = f"{s:7.1f} s {core_s:7.1f} core-s {len(tests):5} tests  {folder}"
            terminalreporter.write_line(line)


def cpu_s() -> float:
    """Processor seconds of this process, of its children that ended, and of its fork server's."""
    total_s = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total_s += used.ru_utime + used.ru_stime
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # no public name says it
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no fork server yet, or no Linux
        return total_s
    return total_s + sum(map(int, fields[11:15])) / 100  # utime, stime and those of its children
