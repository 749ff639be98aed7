"""What is found in facts: each mistake by its name, and nothing where all is well."""

import re
from dataclasses import replace

import pytest
from hypothesis import given

from evenstep._doctor import Device, LinkSpeed, Pace, as_text, judge
from tests._snippets import ROOT

from .facts import changed, checkup, healthy, healthy_checkups, links, pace, rank

MIB = 2**20


def with_ranks(*ranks):
    """A healthy checkup, with these ranks in the place of some."""
    base = healthy()
    by_number = {facts.rank: facts for facts in (*base.ranks, *ranks)}
    return replace(base, world_size=len(by_number), ranks=tuple(by_number.values()))


def cpu(number=1, **changes):
    return with_ranks(changed(rank(number, "abc"[number]), "cpu", **changes))


def room(**changes):
    return with_ranks(changed(rank(1, "b"), "room", **changes))


def network(number=1, **changes):
    return with_ranks(changed(rank(number, "abc"[number]), "network", **changes))


def card(number, host, uuid, **more):
    return rank(number, host, device=Device("cuda", "card", uuid), **more)


def on_one_host(*facts, **more):
    return checkup(*facts, paces=tuple(pace(each.rank) for each in facts), **more)


LIMITED = {"quota_cores": 2.0, "quota_file": "/sys/fs/cgroup/cpu.max"}
CASES = {
    "rank-missing": (replace(healthy(), world_size=4), (3,), "rank 3"),
    "versions-differ": (
        with_ranks(rank(2, "c", versions={"torch": "2.12.1", "Python": "3.11.9"})),
        (2,),
        "torch differ: 2.13.0 on ranks 0 and 1; 2.12.1 on rank 2",
    ),
    "threads-oversubscribed": (
        on_one_host(
            *(changed(rank(n, variables={}), "cpu", num_threads=8) for n in range(2)),
        ),
        (0, 1),
        "16 threads of ranks 0 and 1 share 8 cores of a, as `OMP_NUM_THREADS` is not set",
    ),
    "quota-below-threads": (
        cpu(**LIMITED),
        (1,),
        "4 threads of rank 1 under a quota of 2 cores (/sys/fs/cgroup/cpu.max)",
    ),
    "quota-throttles": (
        replace(healthy(), paces=(pace(0), replace(pace(1), throttled_share=0.4), pace(2))),
        (1,),
        "back for 40 %",
    ),
    "cores-idle": (cpu(num_threads=1), (1,), "1 thread of rank 1 on 8 cores of b"),
    "others-busy": (cpu(pressure=0.6), (1,), "in 60 % of the last minute"),
    "governor-slow": (
        cpu(governor="powersave", governor_driver="acpi-cpufreq"),
        (1,),
        "`powersave` (acpi-cpufreq)",
    ),
    "gpu-shared": (
        on_one_host(card(0, "a", "GPU-1"), card(1, "a", "GPU-1")),
        (0, 1),
        "Ranks 0 and 1 compute on one card of a (GPU-1)",
    ),
    "gpu-unused": (with_ranks(rank(1, "b", unused_gpus=2)), (1,), "beside 2 GPUs"),
    "memory-low": (room(available_bytes=100 * MIB), (1,), "0.098 GiB"),
    "shared-memory-low": (room(shared_bytes=64 * MIB), (1,), "has 64 MiB"),
    "open-files-low": (room(open_files=256), (1,), "open 256 files"),
    "debug-variable": (
        with_ranks(rank(1, "b", variables={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})),
        (1,),
        "`TORCH_DISTRIBUTED_DEBUG=DETAIL` on rank 1",
    ),
    "hostname-loopback": (network(resolved="127.0.1.1"), (1,), "resolves to 127.0.1.1"),
    "interface-missing": (network(interface="eth7"), (1,), "GLOO_SOCKET_IFNAME=eth7"),
    "interface-slow": (
        network(interface="eth1", interfaces={"eth0": 10_000, "eth1": 1000}),
        (1,),
        "1000 Mbit/s, eth0 10000",
    ),
    "link-unreachable": (
        replace(healthy(), links=(*links(3)[1:], LinkSpeed(0, 1, 0.0, 0.0, "no answer"))),
        (0, 1),
        "rank 0 (a) does not reach rank 1 (b) at 10.0.0.1: no answer",
    ),
    "link-slow": (
        replace(healthy(), links=links(3, r2=1000.0)),
        (2,),
        "The link of c carries 1000 Mbit/s, those of the others 9000 in the median",
    ),
    "latency-high": (
        replace(healthy(), links=(*links(3)[1:], replace(links(3)[0], round_trip_s=0.04))),
        (0, 1),
        "back takes 40 ms",
    ),
    "step-failed": (
        replace(healthy(), paces=(pace(0), Pace(1, (), (), error="KeyError: 'x'"), pace(2))),
        (1,),
        "could not time it: KeyError: 'x'",
    ),
    "speed-noisy": (
        replace(healthy(), paces=(pace(0), pace(1, noise=0.4), pace(2))),
        (1,),
        "take 40 % more or less",
    ),
    "rank-slow": (
        replace(healthy(), paces=(pace(0), pace(1, speed=500), pace(2))),
        (1,),
        "does 500 samples/s, 1000 is the median of 3 ranks",
    ),
    "not-worth-keeping": (
        replace(
            with_ranks(card(0, "a", "GPU-0"), card(1, "b", "GPU-1")),
            paces=(pace(0), pace(1), pace(2, speed=10)),
        ),
        (2,),
        "needs longer for one sample than the others for all 96",
    ),
}


def test_there_is_a_case_for_each_ailment():
    """The page has a line for each, and none else."""
    page = (ROOT / "docs" / "doctor.md").read_text("utf-8")

    assert sorted(CASES) == sorted(re.findall(r"^\| `([a-z]+-[a-z-]+)` \|", page, re.M))


@pytest.mark.parametrize("ailment", CASES, ids=str)
def test_each_mistake_alone_is_found_and_named(ailment):
    """By its name, with its ranks and what was read; and nothing else is said."""
    case, ranks, words = CASES[ailment]
    (finding,) = judge(case)

    assert (finding.ailment, finding.ranks) == (ailment, ranks)
    assert words in finding.evidence
    assert finding.remedy.endswith(".")


@given(healthy_checkups())
def test_a_healthy_cluster_has_no_finding(case):
    """Whatever its size, cores, quotas and noise are."""
    assert judge(case) == ()
    assert "Nothing is misconfigured" in as_text(case, ())


def test_a_rank_alone_is_judged_too():
    """Without links, and without others to compare it with."""
    case = checkup(rank(0), paces=(pace(0),))

    assert judge(case) == ()
    assert "1 rank on 1 host" in as_text(case, ())


def test_nothing_of_any_rank_is_said_to_be_so():
    """A checkup that nobody answered is shown all the same."""
    case = checkup(world_size=2)
    (finding,) = judge(case)

    assert finding.ranks == (0, 1)
    assert "rank-missing" in as_text(case, (finding,))


def test_the_same_on_many_hosts_is_one_finding():
    """With the evidence of the first, and all ranks."""
    hosts = [changed(rank(n, f"h{n}"), "room", open_files=100) for n in range(9)]
    (finding,) = judge(checkup(*hosts))

    assert finding.ranks == tuple(range(9))
    assert finding.evidence.endswith("Likewise ranks 1, 2, 3, 4, 5, 6 and 2 more.")
    assert len(judge(checkup(*hosts[:3]))) == 3


def test_a_quota_of_as_many_cores_as_threads_is_right():
    """A core each."""
    assert judge(cpu(quota_cores=4.0, quota_file="/q")) == ()


def test_a_link_is_slow_if_it_is_in_one_direction():
    """As by a half-duplex port: what host c sends is a tenth of what it receives."""
    one_way = tuple(
        replace(link, bytes_per_s=link.bytes_per_s / 10) if link.sender == 2 else link
        for link in links(3)
    )
    (finding,) = judge(replace(healthy(), links=one_way))

    assert (finding.ailment, finding.ranks) == ("link-slow", (2,))


def test_a_quota_is_named_once():
    """That it holds the rank back as well is no news."""
    case = cpu(**LIMITED)
    paces = (pace(0), replace(pace(1), throttled_share=0.9), pace(2))

    assert [each.ailment for each in judge(replace(case, paces=paces))] == ["quota-below-threads"]


def test_pinned_ranks_are_counted_by_their_cores():
    """Threads that fit into the machine may not fit into the cores that they are pinned to."""
    pinned = changed(rank(0), "cpu", affinity=(0, 1))
    free = changed(rank(1), "cpu", affinity=(2, 3, 4, 5, 6, 7))
    (finding,) = judge(checkup(pinned, free))

    assert (finding.ailment, finding.ranks) == ("threads-oversubscribed", (0,))
    assert "share 2 cores" in finding.evidence


def test_names_do_not_matter_on_one_host():
    """There gloo may talk over the loopback."""
    alone = changed(rank(0), "network", resolved="127.0.1.1")

    assert judge(checkup(alone)) == ()


def test_the_loopback_is_no_interface_between_hosts():
    """Others would connect to themselves; on one host it is right."""
    (finding,) = judge(network(interface="lo"))
    alone = changed(rank(0), "network", interface="lo")

    assert (finding.ailment, finding.ranks) == ("hostname-loopback", (1,))
    assert finding.evidence.startswith("`GLOO_SOCKET_IFNAME=lo` on rank 1 (b)")
    assert finding.remedy == "Set it to eth0, or unset it."
    assert judge(checkup(alone)) == ()


def test_an_interface_of_unknown_rate_is_not_suggested():
    """Such as Docker's bridge: other hosts are not reached by it."""
    bridge = {"docker0": 0, "eth0": 1000}
    cases = [
        network(resolved="127.0.1.1", interfaces=known) for known in (bridge, {**bridge, "eth0": 0})
    ]
    known, unknown = [finding for case in cases for finding in judge(case)]

    assert known.remedy.endswith("set `GLOO_SOCKET_IFNAME` to eth0.")
    assert unknown.remedy.endswith("set `GLOO_SOCKET_IFNAME`.")
    assert judge(network(interface="eth0", interfaces=bridge)) == ()
    assert judge(network(interface="docker0", interfaces=bridge)) == ()


def test_a_set_interface_makes_the_name_irrelevant():
    """gloo does not look the name up then."""
    case = network(resolved="127.0.1.1", interface="eth0")

    assert judge(case) == ()


def test_waste_and_speeds_are_in_the_text():
    """Equal shares against balanced ones, as `advise` has them."""
    case = replace(healthy(2), paces=(pace(0, speed=1000), pace(1, speed=500)))
    text = as_text(case, judge(case))

    assert "64 ms with equal shares, 43 ms balanced" in text
    assert "wastes 33 % of its time" in text


def test_noise_is_not_taken_for_waste():
    """Nor is a difference that is too small for the number of measurements."""
    equal = replace(healthy(2), paces=(pace(0), pace(1, speed=990)))
    times = (pace(0, noise=0.2), pace(1, speed=930, noise=0.2))
    few = tuple(replace(p, sizes=p.sizes[:4], seconds=p.seconds[:4]) for p in times)
    noisy = replace(equal, paces=few)

    assert "gains nothing to speak of" in as_text(equal, ())
    assert "% only, so both may be equal" in as_text(noisy, ())


def test_many_links_are_shown_by_the_slowest():
    """A matrix of a hundred rows helps nobody."""
    hosts = [rank(n, f"h{n}") for n in range(12)]
    case = checkup(*hosts, links=links(12, r7=2000.0), skipped_pairs=3)
    text = as_text(case, (), width=80)

    assert "132 links measured, 9000 Mbit/s in the median; no time for 3 pairs" in text
    assert "7 to 0" in text
    assert max(map(len, text.splitlines())) <= 80


def test_nothing_is_printed_that_a_terminal_would_obey():
    """Names and errors come from other machines."""
    evil = "\x1b]0;title\x07"
    odd = rank(1, evil, device=Device("cpu", evil), versions={"torch": evil})
    found = checkup(rank(0, versions={"torch": evil}), odd, workload=evil, paces=(pace(0), pace(1)))
    text = as_text(found, judge(found))

    assert text.count("]0;title") == 4  # versions, host, device, workload
    assert text.replace("\n", "").isprintable()
