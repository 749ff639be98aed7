"""Who follows links that change, who does not, and who knows them, each by itself in turns."""

from __future__ import annotations

import abc
import time
from dataclasses import dataclass
from time import monotonic
from typing import Any, final

import numpy as np

from benchmarks._network_arena import Arena, Taken, shared
from benchmarks._network_classifier import Classifier
from evenstep.network import (
    Aggregation,
    Links,
    OptimalShares,
    ProportionalShares,
    SharePlanner,
    Split,
    optimal_shares,
    plan_shares,
)
from evenstep.network._plans._optimum import equal_shares, lower_bound_s
from evenstep.network._plans._share_policies import AbstractSharePolicy

GOODPUT = 1448 / 1514  # bytes of a stream over those of its frames


class Contestant(abc.ABC):
    """Says on rank 0 how the next exchange goes, and hears how it went."""

    @abc.abstractmethod
    def parts(self, links: Links) -> tuple[int, ...] | None:
        """Return who sums how much; ``links`` are the true ones, not to be looked at by most."""

    @abc.abstractmethod
    def heard(self, taken: Taken) -> None:
        """Learn from it, or do not."""


@final
class Steady(Contestant):
    """The same shares always."""

    def __init__(self, shares: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        self._parts = Split.of(shares).parts

    def parts(self, links: Links) -> tuple[int, ...]:
        return self._parts

    def heard(self, taken: Taken) -> None:
        pass


@final
class Knowing(Contestant):
    """The best for the links as they are at this moment, all-reduce included."""

    def __init__(self, aggregation: Aggregation) -> None:
        self._aggregation = aggregation

    def parts(self, links: Links) -> tuple[int, ...] | None:
        shares = optimal_shares(self._aggregation, links)
        plan = plan_shares(self._aggregation, links, shares=shares, margin=0.0)
        return None if plan.falls_back else Split.of(shares).parts

    def heard(self, taken: Taken) -> None:
        pass


@final
class Following(Contestant):
    """What ``SharePlanner`` makes of its own exchanges."""

    def __init__(self, policy: AbstractSharePolicy[Any], aggregation: Aggregation) -> None:
        self.planner = SharePlanner(policy, aggregation)
        self._step = 0

    def parts(self, links: Links) -> tuple[int, ...] | None:
        return self.planner.plan.parts

    def heard(self, taken: Taken) -> None:
        done = taken.exchange(self.planner.plan.epoch)
        self.planner.observe(self._step, done, next_step=self._step + 1)
        self._step += 1


@dataclass(frozen=True, slots=True)
class Timetable:
    """Whose turn it is: everybody has each draw of the links for as long, one after the other.

    To each of them, links change as often as it has had that long of one draw. Who is first
    changes from draw to draw.

    Attributes:
        names: of the contestants.
        lead_s: before the first turn, for processes to begin.
        turn_s: of each contestant, of each draw.
        num_draws: after which it ends.
    """

    names: tuple[str, ...]
    lead_s: float
    turn_s: float
    num_draws: int

    def at(self, at_s: float) -> tuple[int, str] | None:
        """Return the number of the draw and whose turn it is; None at the end."""
        turn = max(int((at_s - self.lead_s) / self.turn_s), 0)
        draw, place = divmod(turn, len(self.names))
        if draw >= self.num_draws:
            return None
        return draw, self.names[(place + draw) % len(self.names)]


def follow(settings: dict[str, Any]) -> dict[str, Any]:
    """Return every exchange of every contestant that ended within its turn, in order."""
    num_elements, chunks = settings["num_elements"], settings["num_chunks"]
    names, trains = settings["names"], settings["compute_s"] is not None
    arena = Arena(settings["num_workers"], num_elements)
    works = np.arange(arena.world_size) < settings["num_workers"]
    serves = ~works if not works.all() else works
    aggregation = Aggregation(
        arena.world_size, 4 * num_elements, num_chunks=chunks, is_worker=works, is_server=serves
    )
    without_end = Aggregation(
        arena.world_size, 4 * num_elements, num_chunks=None, is_worker=works, is_server=serves
    )
    trace, began_s = settings["trace"], settings["began_s"]
    if arena.rank == 0:  # the solver is loaded before anything is timed
        optimal_shares(aggregation, Links(np.linspace(1e6, 9e6, arena.world_size)))
    contestants: dict[str, Contestant] = {
        "knowing": Knowing(aggregation),
        "optimal": Following(OptimalShares(), aggregation),
        "proportional": Following(ProportionalShares(), aggregation),
        "equal": Steady(equal_shares(aggregation)),
        "static": Steady(optimal_shares(aggregation, _links(trace, 0.0))),
        "hash-to-one": Steady(np.eye(len(serves))[serves.argmax()]),
    }
    works_of = {name: Classifier(arena, settings["compute_s"]) for name in names if trains}
    table = Timetable(names, settings["lead_s"], settings["turn_s"], settings["num_draws"])
    time.sleep(max(began_s + table.lead_s - monotonic(), 0.0))
    exchanges: list[dict[str, Any]] = []
    while (turn := shared(table.at(at_s := monotonic() - began_s))) is not None:
        draw, name = turn
        links = _links(trace, at_s)
        parts = shared(contestants[name].parts(links))
        taken = arena.exchange(parts, chunks, works_of.get(name))
        if taken is None:
            continue
        contestants[name].heard(taken)
        if table.at(monotonic() - began_s) != (draw, name):
            continue  # the next one's turn has come, and perhaps other links
        exchanges.append(
            {
                "name": name,
                "draw": draw,
                "seconds": taken.seconds,
                "step_s": taken.step_s,
                "bound_s": lower_bound_s(without_end, links),
                "parts": parts,
                "exact": taken.exact,
                "apart": taken.apart,
            }
        )
    alike = {name: arena.is_alike(work.digest()) for name, work in works_of.items()}
    arena.close()
    return {"exchanges": exchanges, "alike": alike}


def _links(trace: list[tuple[float, list[float]]], at_s: float) -> Links:
    """Return what links carry at a moment of a trace of Mbit/s."""
    mbit = [rates for begin_s, rates in trace if begin_s <= at_s][-1]
    return Links(np.array(mbit) * 125_000 * GOODPUT)
