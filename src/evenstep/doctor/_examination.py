"""One rank's part of a checkup: facts, links in turn, timed steps. Rank 0 leads."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TextIO, final

import torch

from .._doctor import (
    TURN_S,
    CgroupLimits,
    Checkup,
    LinkServer,
    LinkSpeed,
    Pace,
    RankFacts,
    from_record,
    measure_link,
    read_cgroups,
    schedule,
)
from ._desk import Desk
from ._reference_step import REFERENCE, Reference, Step, load_step
from ._timed_step import BUDGET_S, sizes_for, time_steps
from ._torch_facts import device_for, facts_of

SAMPLES_PER_RANK = {"cpu": 32, "cuda": 512}
GO, SKIP = "go", "skip"
_QUIET_S = 2.0  # nothing is said of what is over by then
FAREWELL_S = 5.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait for each other, in seconds.

    Attributes:
        arrive_s: until all have told their facts.
        links_s: what measuring links may take in all.
        turn_s: one turn of it, with a connection that does not come about.
        timing_s: for which steps are timed.
        steps_s: until all have timed their steps, beyond that.
    """

    arrive_s: float = 60.0
    links_s: float = 20.0
    turn_s: float = TURN_S + 5.0
    timing_s: float = BUDGET_S
    steps_s: float = 60.0

    @property
    def all_s(self) -> float:
        """What a rank waits for rank 0 to get through everything."""
        return self.arrive_s + 2 * self.links_s + self.turn_s + self.timing_s + self.steps_s


@dataclass(frozen=True, slots=True)
class DoctorOrders:
    """What rank 0 tells all before links are measured.

    Attributes:
        ranks: those that take part.
        addresses: host and port of each of them.
        turns: pairs of receiver and sender, several in a turn.
        sizes: samples of the steps that are timed.
    """

    ranks: tuple[int, ...]
    addresses: dict[str, tuple[str, ...]]
    turns: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: tuple[int, ...]

    def address(self, rank: int) -> tuple[str, int]:
        """Return where a rank listens."""
        host, port = self.addresses[str(rank)]
        return host, int(port)


class NotExamined(RuntimeError):
    """Rank 0 was not heard, or began without this rank; the message says which."""


def examine(
    desk: Desk,
    line: StageLine,
    *,
    step: str | None = None,
    global_batch_size: int | None = None,
    patience: Patience = Patience(),  # frozen
) -> Checkup | None:
    """Return what was found on rank 0, None on the others. All ranks call it.

    Args:
        desk: through which they talk.
        line: where rank 0 says how far it is.
        step: the user's own step, as ``load_step`` takes it; None is the reference.
        global_batch_size: samples per step; None is 32 for each rank, 512 if all have cards.
        patience: how long to wait for others.

    Raises:
        NotExamined: rank 0 did not answer, or gave this rank up.
    """
    device = device_for(int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # steps are waited for on the current one
    limits = read_cgroups()
    load: Callable[[], Step] = partial(Reference, device) if step is None else partial(_own, step)
    if desk.rank == 0:
        desk.leave("token", secrets.token_hex(16))
    token = desk.wait("token", patience.arrive_s)
    if token is None:
        raise NotExamined(f"Rank 0 was not heard within {patience.arrive_s:g} s.")
    with LinkServer(token) as server:
        facts = facts_of(desk.rank, device, limits, environ=os.environ, port=server.port)
        desk.leave("facts", json.dumps(asdict(facts)))
        member = _Member(desk, limits, token, load, patience)
        if desk.rank:
            member.follow()
            return None
        name = REFERENCE if step is None else step
        return _Leader(member, line).checkup(global_batch_size, name)


def _own(step: str) -> Step:
    return load_step(step)


def _pairs_in(turns: Iterable[Iterable[tuple[int, ...]]]) -> set[frozenset[int]]:
    """Return the pairs of some turns, whichever way."""
    return {frozenset(pair) for turn in turns for pair in turn}


def _read(told: str) -> RankFacts | None:
    """Return what a rank said of itself; None if its evenstep is too far from this one."""
    try:
        return from_record(RankFacts, json.loads(told), lenient=True)
    except ValueError:
        return None


def _ends(link: LinkSpeed) -> frozenset[int]:
    return frozenset((link.receiver, link.sender))


@dataclass(frozen=True, slots=True)
class _Member:
    """A rank's own measurements."""

    desk: Desk
    limits: CgroupLimits
    token: str
    load: Callable[[], Step]
    patience: Patience

    def follow(self) -> None:
        """Take part until rank 0 says that it is over."""
        told = self.desk.wait("orders", self.patience.all_s)
        if told is None:
            raise NotExamined("Rank 0 told no plan: it may have ended.")
        orders = from_record(DoctorOrders, json.loads(told))
        if self.desk.rank not in orders.ranks:
            raise NotExamined(
                f"Rank {self.desk.rank} came too late: the others began after "
                f"{self.patience.arrive_s:g} s."
            )
        for at, turn in enumerate(orders.turns):
            mine = [pair for pair in turn if pair[0] == self.desk.rank]
            if mine and self._heard(f"turn-{at}") == GO:
                self.measure(at, mine, orders)
        self._heard("steps")
        self.time(orders)
        self._heard("end")
        self.desk.leave("bye", "")

    def measure(self, at: int, pairs: Iterable[tuple[int, ...]], orders: DoctorOrders) -> None:
        """Measure what comes from others in one turn."""
        for receiver, sender in pairs:
            link = measure_link(receiver, sender, orders.address(sender), self.token)
            self.desk.leave(f"link-{at}", json.dumps(asdict(link)))

    def time(self, orders: DoctorOrders) -> None:
        """Time steps."""
        budget_s = self.patience.timing_s
        pace = time_steps(self.desk.rank, self.load, orders.sizes, self.limits, budget_s=budget_s)
        self.desk.leave("pace", json.dumps(asdict(pace)))

    def _heard(self, topic: str) -> str:
        told = self.desk.wait(topic, self.patience.all_s)
        if told is None:
            raise NotExamined(f"Rank 0 did not go on to `{topic}`: it may have ended.")
        return told


@dataclass(frozen=True, slots=True)
class _Leader:
    """Rank 0: gives the word for each part, and gathers what comes."""

    member: _Member
    line: StageLine

    def checkup(self, given: int | None, workload: str) -> Checkup:
        """Return what all ranks said and measured; the rest goes on without those that do not."""
        desk, patience = self.member.desk, self.member.patience
        told = desk.fetch(
            *("facts", range(desk.world_size), patience.arrive_s),
            meanwhile=partial(self.line.say, "waiting for all ranks"),
        )
        ranks = tuple(facts for rank in sorted(told) if (facts := _read(told[rank])) is not None)
        kinds = {facts.device.kind for facts in ranks}
        each = SAMPLES_PER_RANK["cuda" if kinds == {"cuda"} else "cpu"]
        global_batch_size = given or each * desk.world_size
        checkup = Checkup(desk.world_size, global_batch_size, workload, ranks)
        hosts = [[facts.rank for facts in group] for group in checkup.machines.values()]
        plan = schedule(hosts, turn_s=TURN_S, budget_s=patience.links_s)
        orders = DoctorOrders(
            ranks=tuple(facts.rank for facts in ranks),
            addresses={str(f.rank): (f.network.address, str(f.network.port)) for f in ranks},
            turns=plan.turns,
            sizes=sizes_for(global_batch_size, desk.world_size),
        )
        desk.leave("orders", json.dumps(asdict(orders)))
        links = self._links(orders)
        paces = self._paces(orders)
        desk.leave("end", "")
        others = [pace.rank for pace in paces if pace.rank and pace.seconds]
        desk.fetch("bye", others, FAREWELL_S)  # this process may hold the store
        planned, measured = _pairs_in(orders.turns), {_ends(link) for link in links}
        return replace(
            checkup,
            links=links,
            paces=paces,
            skipped_pairs=plan.skipped + len(planned - measured),
        )

    def _links(self, orders: DoctorOrders) -> tuple[LinkSpeed, ...]:
        desk, found = self.member.desk, list[LinkSpeed]()
        silent: set[int] = set()
        until_s = time.monotonic() + 1.5 * self.member.patience.links_s  # dead links take longer
        for at, turn in enumerate(orders.turns):
            self.line.say("measuring links")
            if time.monotonic() > until_s:
                desk.leave(f"turn-{at}", SKIP)
                continue
            awaited = {pair[0]: pair[1] for pair in turn if pair[0] not in silent}
            desk.leave(f"turn-{at}", GO)
            self.member.measure(at, [pair for pair in turn if pair[0] == 0], orders)
            told = desk.fetch(f"link-{at}", awaited, self.member.patience.turn_s)
            for receiver, sender in awaited.items():
                if receiver in told:
                    found.append(from_record(LinkSpeed, json.loads(told[receiver])))
                else:
                    silent.add(receiver)
                    found.append(LinkSpeed(receiver, sender, 0.0, 0.0, "it stopped answering"))
        return tuple(found)

    def _paces(self, orders: DoctorOrders) -> tuple[Pace, ...]:
        desk = self.member.desk
        self.line.say(f"timing steps, {self.member.patience.timing_s:g} s")
        desk.leave("steps", "")
        self.member.time(orders)
        within_s = self.member.patience.steps_s
        told = desk.fetch("pace", orders.ranks, within_s)
        late = f"no times {within_s:g} s after rank 0 had its own"
        return tuple(
            from_record(Pace, json.loads(told[rank]))
            if rank in told
            else Pace(rank, (), (), 0.0, late)
            for rank in orders.ranks
        )


@final
class StageLine:
    """Says what is being done, from two seconds on.

    Args:
        shows: whether anything is said at all: one rank speaks for all.
        stream: where to; None is stderr.
        clock: in seconds.
    """

    def __init__(
        self,
        shows: bool,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shows, self._stage = shows, ""
        self._stream, self._clock = stream or sys.stderr, clock
        self._from_s = clock() + _QUIET_S

    def say(self, stage: str) -> None:
        """Name the stage, once."""
        if self._shows and stage != self._stage and self._clock() >= self._from_s:
            self._stage = stage
            print(f"evenstep doctor: {stage}", file=self._stream, flush=True)
