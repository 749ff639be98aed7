"""The checkup of a cluster of one machine: what a lab does to its hosts is found. Needs root."""

import os

import pytest

from evenstep._doctor import judge, read_checkup
from evenstep.lab import Host, Lab, LabUnavailable

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.cluster]

PAYLOAD = 1448 / 1514
"""Of a full frame, headers aside: what a stream gets of a shaped link."""


def examined(hosts, out, *, threads=None):
    """What doctor finds on the hosts of a lab; skipped, with the reason, where none can be made."""
    script = out.with_suffix(".py")
    script.write_text(
        "import os, sys, torch\n"
        f"threads = {threads or {}}\n"
        "torch.set_num_threads(threads.get(int(os.environ['RANK']), 1))\n"
        "from evenstep.doctor._command_line import main\n"
        f"sys.exit(main(['--out', {str(out)!r}]))\n"
    )
    lines = []
    try:
        with Lab(hosts) as lab:
            code = lab.torchrun([str(script)], write=lines.append)
    except LabUnavailable as error:
        pytest.skip(f"no lab can be made here: {error}")
    assert code == 0, "\n".join(lines)
    return read_checkup(out)


def test_shaped_links_are_measured_within_a_tenth(tmp_path):
    """Three hosts with 100, 50 and 25 Mbit/s; each pair is as slow as its slower link.

    A busy machine takes and never gives: of three tries the best counts.
    """
    rates = [100.0, 50.0, 25.0]
    best = {}
    for attempt in range(3):
        found = examined([Host(mbit=rate) for rate in rates], tmp_path / f"{attempt}.json")
        for link in found.links:
            pair = (link.receiver, link.sender)
            best[pair] = max(best.get(pair, 0.0), link.mbit)
        if all(rate >= 0.9 * min(rates[a], rates[b]) for (a, b), rate in best.items()):
            break
    slow = [each.ranks for each in judge(found) if each.ailment == "link-slow"]

    assert len(best) == 6
    for (a, b), mbit in best.items():
        assert mbit == pytest.approx(PAYLOAD * min(rates[a], rates[b]), rel=0.1), (a, b)
    assert slow[0] == (2,)  # the slowest first; the best peer of the first has half its rate
    assert set(slow) == {(0,), (1,), (2,)}


def test_a_quota_and_too_many_threads_are_found(tmp_path):
    """On the host that has it, and nowhere else; the other one with more threads than cores."""
    cores = len(os.sched_getaffinity(0))
    hosts = [Host(cpus=0.5), Host(), Host()]
    found = examined(hosts, tmp_path / "found.json", threads={1: 4 * cores})
    by_name = {each.ailment: each for each in judge(found)}

    assert by_name["quota-below-threads"].ranks == (0,)
    assert "under a quota of 0.5 cores" in by_name["quota-below-threads"].evidence
    assert by_name["threads-oversubscribed"].ranks == (1,)
    assert found.ranks[0].cpu.quota_cores == 0.5
    assert [facts.cpu.quota_cores for facts in found.ranks[1:]] == [None, None]
    assert {facts.rank: facts.host for facts in found.ranks} == {
        0: "lab-h0",
        1: "lab-h1",
        2: "lab-h2",
    }
