"""Facts of healthy ranks, drawn or plain, and what was measured between them."""

from dataclasses import replace

from hypothesis import strategies as st

from evenstep._doctor import (
    Checkup,
    CpuFacts,
    Device,
    LinkSpeed,
    NetworkFacts,
    Pace,
    RankFacts,
    RoomFacts,
)

GIB = 2**30
VERSIONS = {"evenstep": "0.1.0", "torch": "2.13.0+cpu", "Python": "3.11.7"}


def rank(number, host="a", **changes):
    """A healthy rank on a host of 8 cores, with some of its facts changed."""
    facts = RankFacts(
        rank=number,
        host=host,
        machine=f"boot-{host}",
        versions=VERSIONS,
        device=Device("cpu", "some CPU"),
        cpu=CpuFacts(8, tuple(range(8)), 4),
        room=RoomFacts(16 * GIB, 0.0, 8 * GIB, 65536, 65536),
        network=NetworkFacts(f"10.0.0.{number}", "", {"eth0": 10_000}, f"10.0.0.{number}", 7000),
        variables={"OMP_NUM_THREADS": "4"},
    )
    return replace(facts, **changes)


def changed(facts, part, **changes):
    """The facts, with some of one part's changed."""
    return replace(facts, **{part: replace(getattr(facts, part), **changes)})


def checkup(*ranks, **more):
    """A checkup of these ranks, of as many as there are unless it is said otherwise."""
    settings = {"world_size": len(ranks), "global_batch_size": 32 * len(ranks), "workload": "it"}
    return Checkup(**{**settings, "ranks": ranks, **more})


def healthy(num_hosts=3):
    """A rank on each host, equally fast, with links of 9 Gbit/s."""
    ranks = [rank(number, host=chr(97 + number)) for number in range(num_hosts)]
    return checkup(*ranks, links=links(num_hosts), paces=tuple(map(pace, range(num_hosts))))


def pace(number, speed=1000.0, noise=0.0, error=""):
    """Ten measurements of two sizes, by turns above and below what the speed says."""
    sizes = (8, 32) * 10
    signs = (1, 1, -1, -1) * 5
    seconds = tuple(n / speed * (1 + noise * sign) for n, sign in zip(sizes, signs, strict=True))
    return Pace(number, sizes, seconds, error=error)


def links(num_ranks, mbit=9000.0, **other):
    """What comes from each to each; ``other`` has Mbit/s by rank, as ``r2=100``."""
    rate = {number: other.get(f"r{number}", mbit) for number in range(num_ranks)}
    return tuple(
        LinkSpeed(a, b, min(rate[a], rate[b]) * 125_000, 1e-4)
        for a in range(num_ranks)
        for b in range(num_ranks)
        if a != b
    )


@st.composite
def healthy_checkups(draw):
    """Clusters in which nothing is wrong: hosts, ranks, cores, quotas, cards and noise drawn."""
    ranks, uuids = [], 0
    on_cards = draw(st.booleans())
    for at in range(draw(st.integers(1, 5))):
        num_ranks = draw(st.integers(1, 4))
        threads = draw(st.integers(1, 4))
        cores = num_ranks * threads + draw(st.integers(0, threads * num_ranks))
        quota = draw(st.none() | st.floats(num_ranks * threads, 2 * cores))
        pressure = draw(st.none() | st.floats(0, 0.2))
        governor = draw(
            st.sampled_from([("", ""), ("performance", "x"), ("powersave", "intel_pstate")])
        )
        cpu = CpuFacts(cores, tuple(range(cores)), threads, quota, "/q", *governor, pressure)
        gib = draw(st.floats(2, 2000))
        room = RoomFacts(int(gib * GIB), draw(st.none() | st.floats(0, 0.2)), int(gib * GIB), 4096)
        for _ in range(num_ranks):
            uuids += on_cards
            device = Device("cuda", "card", f"GPU-{uuids}") if on_cards else Device("cpu", "some")
            number, host = len(ranks), f"host{at}"
            ranks.append(rank(number, host, cpu=cpu, room=room, device=device))
    size = len(ranks)
    speed, spread = draw(st.floats(1, 1e5)), draw(st.floats(0, 0.1))
    speeds = [speed * draw(st.floats(0.9, 1.1)) for _ in ranks]
    paces = tuple(pace(at, speeds[at], spread) for at in range(size))
    rates = {f"r{at}": draw(st.floats(1000, 1900)) for at in range(size)}
    return checkup(*ranks, links=links(size, **rates), paces=paces)
