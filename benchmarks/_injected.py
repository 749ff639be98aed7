"""Times of ranks that are disturbed in a known way, drawn by a seed; nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from evenstep._diagnosis import Cause, Phase

NO_RANK = (Cause.NETWORK, Cause.LENGTHS, Cause.ROTATING)
NUM_OWN = int(Phase.REDUCTION)
FORWARD, BACKWARD = int(Phase.FORWARD), int(Phase.BACKWARD)


@dataclass(frozen=True, slots=True)
class Injection:
    """One cause.

    Attributes:
        cause: what it is.
        rank: whose; None where it is no rank's in particular.
        severity: what it adds to a step in the mean, from its onset on, as a part of the step.
        onset: when it begins, as a part of the run.
    """

    cause: Cause
    rank: int | None
    severity: float
    onset: float


@dataclass(slots=True)
class Drawn:
    """A run under way of being drawn; times in microseconds, ``(num_steps, world_size, ...)``.

    Attributes:
        step_us: a step without any disturbance.
        own: by phase of own time.
        exchange: of the reduction once all have come to it, ``(num_steps,)``.
        collected: in the garbage collector; it is in ``own`` too.
        compiled: likewise, compiling.
        size: of the inputs.
        quota: part of the time for which a quota holds the rank back.
        delay: part of the time for which it waits for a core.
        faults: pages read from a disk, a second.
        meets: where else ranks meet: nowhere, before the forward, or before the input.
        injections: what was done to it.
    """

    step_us: float
    own: np.ndarray
    exchange: np.ndarray
    collected: np.ndarray
    compiled: np.ndarray
    size: np.ndarray
    quota: np.ndarray
    delay: np.ndarray
    faults: np.ndarray
    meets: str
    injections: list[Injection] = field(default_factory=list)


def undisturbed(rng: np.random.Generator) -> Drawn:
    """Draw a run whose ranks differ by chance: 2 to 5 % from step to step, 1 % throughout.

    Part of it lasts for some steps, and seldom a step is a third longer.
    """
    world_size, num_steps = int(rng.integers(2, 5)), int(rng.integers(100, 301))
    shape = num_steps, world_size
    step_us = 1e3 * float(np.exp(rng.uniform(np.log(50), np.log(400))))
    parts = np.zeros(NUM_OWN)
    parts[[Phase.INPUT, Phase.OPTIMIZER, Phase.REST]] = rng.uniform(0.01, [0.04, 0.08, 0.04])
    parts[FORWARD] = rng.uniform(0.25, 0.4) * (1 - parts.sum())
    parts[BACKWARD] = 1 - parts.sum()
    jitter = rng.uniform(0.02, 0.05)
    drift = np.zeros(shape)
    for step in range(1, num_steps):
        drift[step] = 0.9 * drift[step - 1] + rng.normal(0, 0.2 * jitter, world_size)
    noise = rng.normal(0, jitter, shape) + drift + rng.normal(0, 0.005, world_size)
    noise += (rng.random(shape) < 0.003) / 3
    of_phase = rng.normal(0, 0.05, (*shape, NUM_OWN))
    own = step_us * parts * np.maximum(0.3, 1 + noise[:, :, None] + of_phase)
    own[0, :, FORWARD] += step_us * rng.uniform(0.5, 2.0, world_size)  # warming up
    collected = np.where(rng.random(shape) < 0.05, 0.01 * step_us, 0.0)
    own[:, :, FORWARD] += collected
    return Drawn(
        step_us=step_us,
        own=own,
        exchange=step_us * rng.uniform(0.005, 0.05) * rng.lognormal(0, 0.2, num_steps),
        collected=collected,
        compiled=np.zeros(shape),
        size=np.full(shape, 4096.0),
        quota=np.zeros(shape),
        delay=np.full(shape, rng.uniform(0, 0.02)),
        faults=rng.poisson(0.2, shape).astype(float),
        meets=str(rng.choice(["nowhere", "nowhere", "forward", "input"])),
    )


def draw_injection(rng: np.random.Generator, cause: Cause, world_size: int) -> Injection:
    """Draw how bad a cause is, from when on, and on which rank."""
    return Injection(
        cause,
        None if cause in NO_RANK else int(rng.integers(world_size)),
        float(np.exp(rng.uniform(np.log(0.1), np.log(2.0)))),
        float(rng.uniform(0, 0.5)),
    )


def inject(rng: np.random.Generator, run: Drawn, injection: Injection) -> None:
    """Have it happen in the run."""
    begin = int(injection.onset * len(run.own))
    _INJECT[injection.cause](rng, run, injection, slice(begin, None))
    run.injections.append(injection)


def _scale(run: Drawn, rank: int, when: slice, factor: np.ndarray | float) -> None:
    """Have all own computing of a rank take that many times as long."""
    phases = [Phase.INPUT, FORWARD, BACKWARD, Phase.OPTIMIZER, Phase.REST]
    found = run.own[when, rank]
    found[:, phases] *= np.broadcast_to(factor, len(found))[:, None]


def _slow_worker(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    _scale(run, one.rank or 0, when, 1 + one.severity)
    if rng.random() < 0.5:
        run.quota[when, one.rank] = one.severity / (1 + one.severity)
        run.delay[when, one.rank] += run.quota[when, one.rank]


def _throttling(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    number = len(run.own[when])
    course = np.minimum(1.0, np.arange(number) / (number * rng.uniform(0.6, 1.0)))
    _scale(run, one.rank or 0, when, 1 + one.severity * course / course.mean())


def _contention(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    number, busy = len(run.own[when]), []
    while sum(busy) < number:
        busy += [int(rng.integers(6, 26)), int(rng.integers(6, 26))]
    is_busy = np.repeat(np.arange(len(busy)) % 2 == 0, busy)[:number]
    factor = 1 + one.severity * is_busy / is_busy.mean()
    _scale(run, one.rank or 0, when, factor)
    if rng.random() < 0.5:
        run.delay[when, one.rank] += 1 - 1 / factor


def _slow_backward(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    run.own[when, one.rank, BACKWARD] += one.severity * run.step_us


def _input(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    number = len(run.own[when])
    varies = rng.gamma(2.0, 0.5, number)
    every = int(rng.choice([1, 1, 4]))  # workers that fetch ahead run dry in every so many steps
    varies = np.where(np.arange(number) % every == 0, every * varies, 0.0)
    run.own[when, one.rank, Phase.INPUT] += one.severity * run.step_us * varies


def _network(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    found = run.exchange[when]
    found += one.severity * run.step_us * rng.lognormal(0, 0.2, len(found))


def _every(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> np.ndarray:
    """Return how long something lasts that happens in every so many steps."""
    number = len(run.own[when])
    every = int(rng.choice([5, 10, 20]))
    first = int(rng.integers(every))
    happens = np.arange(number) % every == first
    found: np.ndarray = happens * every * one.severity * run.step_us
    return found


def _collection(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    lasts = _every(rng, run, one, when)
    in_forward = rng.random(len(lasts)) < 0.5
    run.own[when, one.rank, FORWARD] += lasts * in_forward
    run.own[when, one.rank, BACKWARD] += lasts * ~in_forward
    run.collected[when, one.rank] += lasts


def _checkpoint(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    run.own[when, one.rank, Phase.CHECKPOINT] += _every(rng, run, one, when)


def _logging(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    lasts = _every(rng, run, one, when)
    if rng.random() < 0.5:  # in all steps
        lasts[:] = one.severity * run.step_us
    run.own[when, one.rank, Phase.REST] += lasts


def _lengths(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    """Draw lengths whose longest one takes longer than the middle one by the severity."""
    number, world_size = run.own[when].shape[:2]
    drawn = rng.lognormal(0, 0.8, (number, world_size))
    gap = (drawn.max(axis=1) - np.median(drawn, axis=1)).mean()
    factor = 1 + one.severity * (drawn - np.median(drawn)) / gap
    factor = np.maximum(factor, 0.2)
    found = run.own[when]
    found[:, :, FORWARD] *= factor
    found[:, :, BACKWARD] *= factor
    run.size[when] = np.round(4096 * factor)


def _rotating(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    found = run.own[when]
    number, world_size = found.shape[:2]
    whose = rng.integers(world_size, size=number)
    part = rng.random(number)
    added = one.severity * run.step_us
    found[np.arange(number), whose, FORWARD] += added * part
    found[np.arange(number), whose, BACKWARD] += added * (1 - part)


def _compilation(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    lasts = _every(rng, run, one, when)
    run.own[when, one.rank, FORWARD] += lasts
    run.compiled[when, one.rank] += lasts


def _memory(rng: np.random.Generator, run: Drawn, one: Injection, when: slice) -> None:
    number = len(run.own[when])
    varies = rng.gamma(2.0, 0.5, number)
    _scale(run, one.rank or 0, when, 1 + one.severity * varies)
    run.faults[when, one.rank] += 200 * varies


_INJECT: dict[Cause, Callable[[np.random.Generator, Drawn, Injection, slice], None]] = {
    Cause.SLOW_WORKER: _slow_worker,
    Cause.THROTTLING: _throttling,
    Cause.CONTENTION: _contention,
    Cause.SLOW_BACKWARD: _slow_backward,
    Cause.INPUT: _input,
    Cause.NETWORK: _network,
    Cause.GARBAGE_COLLECTION: _collection,
    Cause.CHECKPOINT: _checkpoint,
    Cause.LOGGING: _logging,
    Cause.LENGTHS: _lengths,
    Cause.ROTATING: _rotating,
    Cause.COMPILATION: _compilation,
    Cause.MEMORY: _memory,
}
