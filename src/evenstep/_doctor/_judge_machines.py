"""Whether ranks get what their machine has: versions, cores, cards, memory, files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .._render import counted, percent
from ._checkup_facts import Checkup, FoundAilment, RankFacts

GIB = 2**30
LEAST_SHARED_BYTES = GIB // 2
"""Docker gives 64 MiB unless set otherwise."""
LEAST_MEMORY_BYTES = GIB
LEAST_OPEN_FILES = 1024
BUSY = 0.25
"""Part of a minute for which something waited, or load per core past this of what ranks use."""
OWN_GOVERNORS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose ``powersave`` follows the load all the same."""

SLOWING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "NCCL_DEBUG": ("INFO TRACE", "NCCL writes a log"),
    "NCCL_IB_DISABLE": ("1", "NCCL leaves InfiniBand and RoCE unused"),
    "NCCL_P2P_DISABLE": ("1", "cards of a host do not talk directly"),
    "NCCL_SHM_DISABLE": ("1", "processes of a host talk over the network"),
    "PYTHONMALLOC": ("debug malloc_debug pymalloc_debug", "Python checks every allocation"),
    "TORCH_DISTRIBUTED_DEBUG": ("INFO DETAIL", "torch checks and logs collectives"),
}
"""Variables that cost time, the values that do, and what they bring about."""


def judge_machines(checkup: Checkup) -> Iterator[FoundAilment]:
    """Yield what is wrong with ranks and their machines."""
    yield from _missing(checkup)
    yield from _versions(checkup)
    for ranks in checkup.machines.values():
        yield from _cores(ranks)
        yield from _machine(ranks)
    yield from _cards(checkup)
    yield from _variables(checkup)


def numbers(facts: Sequence[RankFacts]) -> tuple[int, ...]:
    """Return their ranks."""
    return tuple(each.rank for each in facts)


def in_words(ranks: Sequence[int]) -> str:
    """Return ranks for people: ``rank 3``, ``ranks 0, 1 and 7 more``."""
    shown = [str(rank) for rank in ranks[:6]]
    if len(ranks) > len(shown):
        shown.append(f"{len(ranks) - len(shown)} more")
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _missing(checkup: Checkup) -> Iterator[FoundAilment]:
    if missing := checkup.missing:
        yield FoundAilment(
            "rank-missing",
            missing,
            f"No answer from {in_words(missing)} of {checkup.world_size}.",
            "See what their processes printed, and whether their hosts reach `MASTER_ADDR` at "
            "`MASTER_PORT`.",
        )


def _versions(checkup: Checkup) -> Iterator[FoundAilment]:
    names = sorted({name for facts in checkup.ranks for name in facts.versions})
    for name in names:
        known = [facts for facts in checkup.ranks if name in facts.versions]
        found: dict[str, list[int]] = {}
        for facts in known:
            found.setdefault(_compared(name, facts.versions[name]), []).append(facts.rank)
        if len(found) < 2:
            continue  # where only some have a package, their devices differ too
        said = "; ".join(f"{version} on {in_words(ranks)}" for version, ranks in found.items())
        fewest = min(found.values(), key=len)
        yield FoundAilment(
            "versions-differ",
            tuple(fewest),
            f"Versions of {name} differ: {said}.",
            f"Install the same {name} everywhere, from one lock file or image.",
        )


def _compared(name: str, version: str) -> str:
    """Return what has to be alike of a version: Python's patch and torch's build may differ."""
    return ".".join(version.split(".")[:2]) if name == "Python" else version.partition("+")[0]


def _cores(ranks: Sequence[RankFacts]) -> Iterator[FoundAilment]:
    """Yield whether the threads of one machine's ranks have a core each."""
    crowded = _crowded(ranks)
    if crowded:
        yield crowded
    by_group: dict[str, list[RankFacts]] = {}
    for facts in ranks:
        if facts.cpu.quota_cores is not None:
            by_group.setdefault(facts.cpu.quota_file, []).append(facts)
    for file, members in by_group.items():
        quota = members[0].cpu.quota_cores
        threads = sum(facts.cpu.num_threads for facts in members)
        if quota is None or threads <= quota:
            continue
        each = max(1, math.floor(quota / len(members)))
        remedy = f"Raise the quota to {counted(threads, 'core')}"
        if each * len(members) < threads:
            remedy += f", or set `OMP_NUM_THREADS={each}`"
        yield FoundAilment(
            "quota-below-threads",
            numbers(members),
            f"{counted(threads, 'thread')} of {in_words(numbers(members))} under a quota of "
            f"{quota:g} cores ({file}).",
            f"{remedy}.",
        )
    if not crowded and not by_group and all(facts.device.kind == "cpu" for facts in ranks):
        yield from _idle(ranks)


def _crowded(ranks: Sequence[RankFacts]) -> FoundAilment | None:
    """Return the worst set of cores that has more threads than cores."""
    worst, excess = None, 1.0
    sets = {frozenset(facts.cpu.affinity) for facts in ranks}
    sets.add(frozenset().union(*sets))
    for cores in sorted(sets, key=sorted):
        members = [facts for facts in ranks if cores.issuperset(facts.cpu.affinity)]
        threads = sum(facts.cpu.num_threads for facts in members)
        if threads > excess * len(cores):
            worst, excess = (cores, members, threads), threads / len(cores)
    if worst is None:
        return None
    cores, members, threads = worst
    unset = all("OMP_NUM_THREADS" not in facts.variables for facts in members)
    why = ", as `OMP_NUM_THREADS` is not set" if unset and len(members) > 1 else ""
    each = max(1, len(cores) // len(members))
    pinned = len(cores) < members[0].cpu.num_cores
    remedy = f"Set `OMP_NUM_THREADS={each}`"
    if each * len(members) > len(cores):
        remedy = "Start fewer ranks there"
    remedy += ", or let the ranks run on more cores" if pinned else ""
    return FoundAilment(
        "threads-oversubscribed",
        numbers(members),
        f"{counted(threads, 'thread')} of {in_words(numbers(members))} share "
        f"{counted(len(cores), 'core')} of {members[0].host}{why}.",
        f"{remedy}.",
    )


def _idle(ranks: Sequence[RankFacts]) -> Iterator[FoundAilment]:
    """Yield that more than half of the cores have no thread, as torchrun sets one a rank."""
    cores = len(frozenset().union(*(facts.cpu.affinity for facts in ranks)))
    threads = sum(facts.cpu.num_threads for facts in ranks)
    each = cores // len(ranks)
    if each > 1 and 2 * threads < cores:
        yield FoundAilment(
            "cores-idle",
            numbers(ranks),
            f"{counted(threads, 'thread')} of {in_words(numbers(ranks))} on {cores} cores of "
            f"{ranks[0].host}: torchrun sets `OMP_NUM_THREADS=1` where it is not set.",
            f"Set `OMP_NUM_THREADS={each}`, less what loader workers need.",
        )


def _machine(ranks: Sequence[RankFacts]) -> Iterator[FoundAilment]:
    """Yield what a machine lacks; its first rank speaks for all."""
    first, everyone = ranks[0], numbers(ranks)
    cpu = first.cpu
    if (busy := _busy(ranks)) is not None:
        yield FoundAilment(
            "others-busy",
            everyone,
            f"{first.host} is busy with something else: {busy}.",
            "Look at `top` there, and end it or leave the host to it.",
        )
    if cpu.governor in ("powersave", "conservative") and cpu.governor_driver not in OWN_GOVERNORS:
        yield FoundAilment(
            "governor-slow",
            everyone,
            f"The CPU governor of {first.host} is `{cpu.governor}` ({cpu.governor_driver}).",
            "Run `cpupower frequency-set -g performance` there.",
        )
    yield from _room(first, everyone)


def _busy(ranks: Sequence[RankFacts]) -> str | None:
    """Return what says that others use the cores, None if they hardly do."""
    cpu = ranks[0].cpu
    if cpu.pressure is not None:
        if cpu.pressure > BUSY:
            return f"in {100 * cpu.pressure:.0f} % of the last minute something waited for a core"
        return None
    if cpu.load > cpu.num_cores * (1 + BUSY):
        return f"a load of {cpu.load:.3g} on {counted(cpu.num_cores, 'core')} in the last minute"
    return None


def _room(first: RankFacts, everyone: tuple[int, ...]) -> Iterator[FoundAilment]:
    room, host = first.room, first.host
    low = ""
    if room.available_bytes is not None and room.available_bytes < LEAST_MEMORY_BYTES:
        low = f"{room.available_bytes / GIB:.2g} GiB of memory are left on {host}."
    elif room.memory_pressure is not None and room.memory_pressure > BUSY:
        share = percent(room.memory_pressure)
        low = f"In {share} % of the last minute something on {host} waited for memory."
    if low:
        yield FoundAilment("memory-low", everyone, low, "Free some, or start fewer ranks there.")
    if room.shared_bytes is not None and room.shared_bytes < LEAST_SHARED_BYTES:
        yield FoundAilment(
            "shared-memory-low",
            everyone,
            f"/dev/shm of {host} has {room.shared_bytes / 2**20:.0f} MiB; loader workers hand "
            "over batches there.",
            "Give the container more: `docker run --shm-size=8g`, or `--ipc=host`.",
        )
    if room.open_files is not None and room.open_files < LEAST_OPEN_FILES:
        ceiling = room.open_files_ceiling or LEAST_OPEN_FILES
        yield FoundAilment(
            "open-files-low",
            everyone,
            f"A process on {host} may open {room.open_files} files.",
            f"Run `ulimit -n {min(max(ceiling, LEAST_OPEN_FILES), 65536)}` before torchrun.",
        )


def _cards(checkup: Checkup) -> Iterator[FoundAilment]:
    by_uuid: dict[str, list[RankFacts]] = {}
    for facts in checkup.ranks:
        if facts.device.uuid:
            by_uuid.setdefault(facts.device.uuid, []).append(facts)
        if facts.unused_gpus and facts.device.kind == "cpu":
            yield FoundAilment(
                "gpu-unused",
                (facts.rank,),
                f"{facts.name} computes on the CPU, beside {counted(facts.unused_gpus, 'GPU')} "
                "that torch does not see.",
                "Install a torch with CUDA, or look at `CUDA_VISIBLE_DEVICES` and the container's "
                "`--gpus`.",
            )
    for uuid, sharing in by_uuid.items():
        if len(sharing) > 1:
            yield FoundAilment(
                "gpu-shared",
                numbers(sharing),
                f"{in_words(numbers(sharing)).capitalize()} compute on one {sharing[0].device.name}"
                f" of {sharing[0].host} ({uuid}).",
                "Start as many ranks as the host has GPUs (`--nproc-per-node`), and look at "
                "`CUDA_VISIBLE_DEVICES`.",
            )


def _variables(checkup: Checkup) -> Iterator[FoundAilment]:
    for name, (values, effect) in SLOWING.items():
        found = [
            facts
            for facts in checkup.ranks
            if facts.variables.get(name, "").split(",")[0].upper() in values.upper().split()
        ]
        if found:
            setting = f"{name}={found[0].variables[name]}"
            yield FoundAilment(
                "debug-variable",
                numbers(found),
                f"`{setting}` on {in_words(numbers(found))}: {effect}.",
                f"`unset {name}`, once what it was set for is found.",
            )
