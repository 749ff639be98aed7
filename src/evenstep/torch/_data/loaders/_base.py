"""What all loaders of training steps do alike: loops, steps handed out, and where to continue."""

from __future__ import annotations

import abc
import json
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from torch.utils.data import DataLoader

from ...._diagnosis import Phase
from ...._planner import Cost, Plan, SampleCosts, in_words
from ...._types import IntArray
from ....exceptions import invalid
from .._protocols import ANEW, LoaderRanks, LoaderSession, MicroBatch, StepStart
from .._step import Attempts, MicroBatches, Step, StepCount, check_probed

_T = TypeVar("_T")
_FIXED = (
    "batch_sampler",
    "batch_size",
    "collate_fn",
    "dataset",
    "drop_last",
    "generator",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "sampler",
    "timeout",
    "worker_init_fn",
)


class AbstractLoader(abc.ABC):
    """A loader in the place of another one, which answers for all that is not its own."""

    _loader: Any

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self._loader.dataset

    def __getattr__(self, name: str) -> Any:
        """Return what the user's loader has under ``name``, such as ``collate_fn``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that is none of the user's loader, as that is read no more.

        Raises:
            ValueError: it is one of them.
        """
        if name in _FIXED:
            raise _fixed(name, getattr(self, name), value)
        object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class StepContext:
    """Whose steps a loader hands out.

    Attributes:
        ranks: that train on it.
        session: gives plans, and is notified of how a step goes.
        global_batch_size: samples of a step over all ranks.
        no_sync: entered around all but the last micro-batch of a step.
        count: steps of the run so far, shared by loaders which are used in turn.
        counter: counts the units in a batch that is handed out; None where they are samples.
        cost: of samples, by which they are assigned; None where they are counted.
        equal_forwards: returns whether all ranks make as many forwards.
        sample_seed: of what samples draw by their places; None where ranks draw their own.
        number: of the loader, in the order of ``prepare``.
        check_sizes: raises where steps of such sizes, in one forward on each rank or not, are more
            than the run can do. Called where a batch sampler gives the sizes.
    """

    ranks: LoaderRanks
    session: LoaderSession
    global_batch_size: int
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    count: StepCount = field(default_factory=StepCount)
    counter: Callable[[Any], float] | None = None
    cost: Cost | None = None
    equal_forwards: Callable[[], bool] = bool
    sample_seed: int | None = None
    number: int = 0
    check_sizes: Callable[[IntArray, bool], None] = lambda sizes, whole: None


class AbstractStepLoader(AbstractLoader):
    """A loader whose every iteration is a global step, of which every rank gets its part.

    It stands at one place, that of its newest loop. A loop before that one may take it over again,
    as after ``next(iter(loader))`` for a look at a batch.

    Attributes:
        attempts: what ``Step.backward`` runs by; set once the models are known.
        costs: of its samples; None where they are counted.
        num_steps_ahead: for how many steps it fetches ahead.
    """

    attempts: Attempts | None = None
    costs: SampleCosts | None = None
    num_steps_ahead: int = 0
    _loader: DataLoader[Any]
    _at: Any  # how far the newest loop is
    _whole = True  # whether that one takes each step in one forward
    _resume: dict[str, Any] | None = None  # where the next loop continues
    _next_step: int  # of the run, by number, once a loop has begun

    def __init__(self, loader: DataLoader[Any], context: StepContext, at: Any) -> None:
        self._loader, self._context, self._at = loader, context, at
        self._begun = self._current = self._cut_off = 0  # loops by number, each from 1
        self._open: set[int] = set()  # those that are not over

    @property
    def is_fixed(self) -> bool:
        """Whether all steps but a short last one have as many samples."""
        return True

    @property
    def tail_batch_size(self) -> int | None:
        """Samples of the short last step over all ranks; None if there is none, or not known."""
        return None

    @property
    def num_handed_out(self) -> int:
        """Steps of the newest epoch that were handed out, used or not."""
        return int(self._at.steps_taken)

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the global steps of an epoch.

        Raises:
            TypeError: they are not known.
        """

    def __iter__(self) -> Iterator[Any]:
        return _Loop(self._items(whole=True))

    def steps(self) -> Iterator[Step]:
        """Return an iterator over the epoch's steps, each to be iterated for its micro-batches."""
        return _Loop(self._items(whole=False))

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: what was handed out, less what the loop fetched ahead.

        A loop that fetches batches before it uses those at hand begins with the unused ones again.
        The same on every rank, and of plain values. At any time: from inside a loop, after it, and
        before the first, where it is what was loaded, if anything. Free of the number of ranks, but
        for streams in shards, of which it holds how far each is.
        """
        return self._state() if self._resume is None else {**self._resume}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration continue from ``state``, on every rank.

        A loop under way is left as it is; the one after it begins where ``state`` says. A stream is
        read past what was trained on: it has to give the same samples again.

        Raises:
            ValueError: ``state`` is damaged, foreign, or of another global batch, data set or, for
                streams, of other readers.
        """
        good = self._checked(state)
        self._context.count.continue_from(good["steps_of_run"])
        self._resume = good

    def close(self) -> None:
        """Stop workers and threads, and end an iteration under way; iterating starts them anew."""
        self._cut_off = self._begun  # none of these can continue
        self._open.clear()
        self._close_source()

    @abc.abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return where the newest loop stands."""

    @abc.abstractmethod
    def _checked(self, state: object) -> dict[str, Any]:
        """Return ``state`` if this loader can continue from it, or raise ValueError."""

    @abc.abstractmethod
    def _begin_epoch(self) -> Any:
        """Return the begin of the next epoch, or where to resume, once that can be read from."""

    @abc.abstractmethod
    def _read_on(self) -> None:
        """Have the steps from here on fetched."""

    @abc.abstractmethod
    def _next(self) -> Step | MicroBatch | None:
        """Return the next step, or all of it for one forward; None at the end of the epoch."""

    @abc.abstractmethod
    def _return_to(self, at: Any) -> None:
        """Continue where a loop was left for another one, or raise RuntimeError."""

    @abc.abstractmethod
    def _end_reading(self) -> None:
        """Let go of what the newest loop reads from."""

    @abc.abstractmethod
    def _close_source(self) -> None:
        """Stop all that reads."""

    def _items(self, *, whole: bool) -> Generator[Any, None, None]:
        """Yield the batch of each step if ``whole``, else the steps, which yield theirs."""
        self._check_fixed()
        outer = self._at if self._open else None
        with self._loop(cuts=not whole) as loop:
            try:
                self._whole = whole
                with self._context.session.steps.timed(Phase.INPUT):
                    self._at = at = self._begin_epoch()
                    self._continue()
                if whole:
                    check_probed(self.attempts)
                while (given := self._next()) is not None:
                    if isinstance(given, MicroBatch):
                        yield given.batch
                    else:
                        yield given
                        self._look_whether_left(given)
                    del given  # its batch is the loop's alone
                    if loop <= self._cut_off:
                        raise RuntimeError("the loader was closed, so this iteration cannot go on")
                    if self._current != loop:
                        self._return_to(at)
                        self._current, self._whole = loop, whole
                        self._continue()
            finally:
                if outer is not None and self._current == loop:
                    self._at = outer

    @contextmanager
    def _loop(self, *, cuts: bool) -> Iterator[int]:
        """Begin a loop and give its number; at its end, let go of what it reads from."""
        session = self._context.session
        session.begin_epoch(cuts=cuts)
        self._end_reading()  # of a loop that was left and is still referred to
        self._begun += 1
        self._current = number = self._begun
        self._open.add(number)
        try:
            yield number
            session.steps.came_to_end()
        finally:
            self._open.discard(number)
            if self._current == number:  # not if another loop has begun meanwhile
                self._end_reading()
                if not self._open:
                    session.steps.end_epoch()

    def _look_whether_left(self, step: Step) -> None:
        if step.is_left and self._context.ranks.world_size > 1:
            used = self._context.session.steps.next_unused == self._next_step
            self._context.count.left(used=used)

    def _check_fixed(self) -> None:
        """Raise if the user's loader was changed where nothing guards it.

        Raises:
            ValueError: it was.
        """
        own, batches = self._loader, self._loader.batch_sampler
        for name in () if own.batch_size is None else ("batch_size", "drop_last"):
            before = getattr(own, name)
            if (now := getattr(batches, name, before)) != before:
                raise _fixed(f"batch_sampler.{name}", before, now)

    def _continue(self) -> None:
        self._next_step = self._context.count.value
        self._read_on()

    def _plan(self) -> Plan:
        """Return the plan of the next step: its plan point is here.

        Raises:
            RuntimeError: another loader has taken that step.
        """
        count, step = self._context.count, self._next_step
        if step != count.value:
            raise RuntimeError(
                "Another loader of this balancer was iterated meanwhile. Every iteration is a step "
                "of the whole cluster, so loaders take turns: end one loop before the next, or "
                "make one loader of both data sets."
            )
        count.begun = True
        return self._context.session.steps.at(step)

    def _equal_forwards(self) -> bool:
        """Return whether all ranks make as many forwards in a loop by cost that begins.

        Raises:
            ValueError: one forward may be too small for what a rank gets, and is all it has.
        """
        cost = self._context.cost
        if self._whole and cost is not None and cost.is_capped:
            raise invalid(
                "Cost(max_size=..., max_samples=...)",
                "be used in a loop over `loader.steps()`, which may make several forwards",
                "`for batch in loader`",
                "Loop over the steps and their micro-batches: `for step in loader.steps(): for "
                "batch in step: ...`.",
            )
        return not self._whole and self._context.equal_forwards()

    def _hand_out(self, given: MicroBatches | MicroBatch, start: StepStart) -> Step | MicroBatch:
        """Return the next step of the run, counted and announced; or all of it, for one forward."""
        context, number = self._context, start.step
        steps = context.session.steps
        context.count.value = number + 1
        self.__dict__["_next_step"] = number + 1  # past `__setattr__`: a call in each step
        steps.begin_step(start)
        if isinstance(given, MicroBatch):
            steps.begin_forward(number, given, is_last=True)
            return given
        return Step(
            given,
            start.global_num_samples,
            listener=steps,
            no_sync=context.no_sync,
            number=number,
            attempts=self.attempts,
            equal_forwards=start.equal_forwards,
        )


def _fixed(name: str, before: object, now: object) -> ValueError:
    return invalid(
        f"DataLoader.{name}",
        f"stay as it was prepared, {before!r}, for plans were made with it",
        repr(now),
        ANEW,
    )


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields``, of plain values, with the checksum that ``checked`` asks for."""
    return {**fields, "checksum": _checksum(fields)}


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True, default=repr).encode())


def checked(state: object, where: str, like: dict[str, Any]) -> dict[str, Any]:
    """Return what ``sealed`` gave for fields of the same kind and keys, or raise ValueError."""
    problem = _problem(state, like)
    if problem is not None:
        raise invalid(
            where,
            "come from `state_dict()` of such a loader, complete and unchanged",
            problem,
            "Load the part of the checkpoint that holds the loader's state; if it is that part, "
            "the file is damaged: take the checkpoint before it.",
        )
    assert isinstance(state, dict)
    return {key: state[key] for key in (*like, "checksum")}


def _problem(state: object, like: dict[str, Any]) -> str | None:
    if type(state) is not dict:
        return f"a {type(state).__name__}"
    if (kind := state.get("kind", like["kind"])) != like["kind"]:
        return f"one of the kind {repr(kind)[:40]}, not {like['kind']!r}"
    if missing := sorted({*like, "checksum"} - state.keys()):
        return f"one without {missing}"
    fields = {key: state[key] for key in like}  # adapters may add keys of their own
    if type(state["checksum"]) is int and state["checksum"] == _checksum(fields):
        return None
    return "one whose checksum does not fit"


@final
class _Loop(Iterator[_T]):
    """What a loop reads from: an epoch that broke off with an error is not taken for a whole one.

    A generator that raised has no more items, as at its end, and scripts that catch errors of
    ``next`` would leave out the rest of the epoch, on this rank alone.
    """

    def __init__(self, items: Generator[_T, None, None]) -> None:
        self._items = items
        self._problem = ""

    def __next__(self) -> _T:
        if self._problem:
            problem, self._problem = self._problem, ""  # reported once, as some catch that too
            raise RuntimeError(
                f"This iteration ended with {problem}, so it cannot go on: the step is missing for "
                f"all ranks. Have the data set return another sample in the place of one that "
                f"cannot be read."
            )
        try:
            return next(self._items)
        except StopIteration:
            raise
        except Exception as error:
            self._problem = in_words(error)
            raise

    def close(self) -> None:
        """Leave the loop."""
        self._items.close()
