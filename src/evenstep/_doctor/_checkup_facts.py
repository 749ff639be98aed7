"""What ranks say of themselves and what is found: facts and findings, as values and as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, MsgspecError, convert, to_builtins
from msgspec.json import decode

from ..events import Amount, Positive
from ..exceptions import invalid


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank computes on.

    Attributes:
        kind: ``cpu``, ``cuda`` and so on, as torch has it.
        name: the model, as far as it is known.
        uuid: distinguishes one card from another, on all hosts; empty for a CPU.
    """

    kind: str
    name: str
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The cores that a rank may use, and its threads.

    Attributes:
        num_cores: logical cores of the machine.
        affinity: numbers of those that the process may run on.
        num_threads: threads of torch's arithmetic (OpenMP, MKL).
        quota_cores: cores that control groups allow; None is no limit.
        quota_file: which file says so.
        governor: of the clock, ``performance`` say; empty where it cannot be read.
        governor_driver: whose governor it is.
        pressure: part of the last minute in which something waited for a core, in [0, 1]; None
            where the kernel does not report it.
        load: mean number of processes that ran or waited in the last minute.
    """

    num_cores: int
    affinity: tuple[int, ...]
    num_threads: int
    quota_cores: float | None = None
    quota_file: str = ""
    governor: str = ""
    governor_driver: str = ""
    pressure: float | None = None
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class RoomFacts:
    """Memory and files. None where something cannot be read.

    Attributes:
        available_bytes: memory that can still be had, under the limit of control groups as well.
        memory_pressure: part of the last minute in which something waited for memory, in [0, 1].
        shared_bytes: size of ``/dev/shm``, through which loader workers hand over batches.
        open_files: most files that the process may have open.
        open_files_ceiling: what that may be raised to without root.
    """

    available_bytes: int | None = None
    memory_pressure: float | None = None
    shared_bytes: int | None = None
    open_files: int | None = None
    open_files_ceiling: int | None = None


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """How others reach a rank.

    Attributes:
        resolved: the address of the host's own name, which gloo takes by itself; empty where the
            name has none.
        interface: the value of ``GLOO_SOCKET_IFNAME``, empty where it is not set.
        interfaces: Mbit/s of each interface that is up and has an address, but for the loopback;
            0 where its driver does not report it, and of bridges and tunnels.
        address: by which this rank is reached, as far as is known.
        port: where it listens while links are measured; 0 where it does not.
    """

    resolved: str = ""
    interface: str = ""
    interfaces: dict[str, int] | None = None
    address: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class RankFacts:
    """All that one rank says of itself.

    Attributes:
        rank: its number.
        host: the name of its machine, for people.
        machine: a name that ranks share which share cores and loopback.
        versions: of Python, torch, evenstep, and of CUDA, NCCL and so on where there are any.
        device: what it computes on.
        cpu, room, network: what its machine has.
        variables: those of the environment that may change its speed.
        unused_gpus: NVIDIA cards in a machine whose torch sees none.
    """

    rank: int
    host: str
    machine: str
    versions: dict[str, str]
    device: Device
    cpu: CpuFacts
    room: RoomFacts
    network: NetworkFacts
    variables: dict[str, str]
    unused_gpus: int = 0

    @property
    def name(self) -> str:
        """Rank and host, for people."""
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What came over a link, from one rank to another.

    Attributes:
        receiver, sender: ranks.
        bytes_per_s: payload of one TCP connection; 0 where there was none.
        round_trip_s: median of small messages there and back.
        error: why there was no connection, else empty.
    """

    receiver: int
    sender: int
    bytes_per_s: Amount
    round_trip_s: Amount
    error: str = ""

    @property
    def mbit(self) -> float:
        """Megabit per second."""
        return self.bytes_per_s * 8e-6


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps that one rank timed, while all others did as well.

    Attributes:
        rank: its number.
        sizes: samples of each step.
        seconds: what each took, as many.
        throttled_share: part of that time for which a CPU quota held it back, in [0, 1].
        error: why it could not finish, else empty.
    """

    rank: int
    sizes: tuple[Positive, ...]
    seconds: tuple[Annotated[float, Meta(gt=0)], ...]
    throttled_share: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Checkup:
    """What all ranks said, and what was measured between them.

    Attributes:
        world_size: ranks that were started.
        global_batch_size: samples per step of the training that is looked at.
        workload: what was timed, in words.
        ranks: facts of those that answered, by rank.
        links: as they were measured; a pair that is missing was not.
        paces: of those that timed steps, by rank.
        skipped_pairs: pairs of hosts that there was no time for.
    """

    world_size: Positive
    global_batch_size: Positive
    workload: str
    ranks: tuple[RankFacts, ...]
    links: tuple[LinkSpeed, ...] = ()
    paces: tuple[Pace, ...] = ()
    skipped_pairs: int = 0

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that did not answer."""
        answered = {facts.rank for facts in self.ranks}
        return tuple(rank for rank in range(self.world_size) if rank not in answered)

    @property
    def machines(self) -> dict[str, tuple[RankFacts, ...]]:
        """Ranks that share cores, by machine, in the order of their first ranks."""
        found: dict[str, tuple[RankFacts, ...]] = {}
        for facts in self.ranks:
            found[facts.machine] = (*found.get(facts.machine, ()), facts)
        return found

    def of(self, rank: int) -> RankFacts:
        """Return the facts of a rank that answered."""
        return next(facts for facts in self.ranks if facts.rank == rank)


@dataclass(frozen=True, slots=True)
class FoundAilment:
    """Something that is wrong, or costs time.

    Attributes:
        ailment: what it is, by the name that it has in `docs/doctor.md`.
        ranks: whose; empty where it is no rank's in particular.
        evidence: what was read or measured that says so, one sentence.
        remedy: what to do, one sentence.
    """

    ailment: str
    ranks: tuple[int, ...]
    evidence: str
    remedy: str


SCHEMA = "evenstep.doctor"
VERSION = 1


def to_json(checkup: Checkup, findings: Sequence[FoundAilment]) -> str:
    """Return it as indented text; times in seconds, rates in bytes per second."""
    record = {"schema": SCHEMA, "version": VERSION, "checkup": checkup, "findings": findings}
    return json.dumps(to_builtins(record), indent=1, allow_nan=False) + "\n"


def read_checkup(path: str | Path) -> Checkup:
    """Return what ``evenstep doctor`` wrote.

    Raises:
        ValueError: the file is damaged, of something else, or of a newer version.
        OSError: it cannot be read.
    """
    name, remedy = f"read_checkup({str(path)!r})", "Give what `evenstep doctor --out` wrote."
    text = Path(path).read_bytes()
    try:
        record = decode(text, type=dict[str, Any])
        schema, version = record["schema"], convert(record["version"], int)
    except (MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        rule = "be JSON with a schema and a version"
        raise invalid(name, rule, error, remedy) from error
    if schema != SCHEMA:
        raise invalid(name, f'be of `"schema": "{SCHEMA}"`', repr(schema)[:60], remedy)
    if not 1 <= version <= VERSION:
        newer = "Upgrade evenstep, or write it again by `evenstep doctor --out`."
        raise invalid(name, f"be of a version from 1 to {VERSION}", version, newer)
    try:
        checkup = convert(record.get("checkup"), Checkup)  # unknown fields are passed over
        _check(checkup)
    except (MsgspecError, ValueError) as error:
        raise invalid(name, "hold a checkup", error, remedy) from error
    return checkup


def _check(checkup: Checkup) -> None:
    """Refuse what no checkup has.

    Raises:
        ValueError: ranks or times cannot be.
    """
    known = [facts.rank for facts in checkup.ranks]
    if len(set(known)) < len(known) or not set(known) <= set(range(checkup.world_size)):
        raise ValueError(f"ranks are {known} of {checkup.world_size}")
    named = {rank for link in checkup.links for rank in (link.receiver, link.sender)}
    named |= {pace.rank for pace in checkup.paces}
    if not named <= set(known):
        raise ValueError(f"nothing is known of ranks {sorted(named - set(known))}")
    for pace in checkup.paces:
        if len(pace.sizes) != len(pace.seconds):
            raise ValueError(f"the times of rank {pace.rank} are not one for each size")
