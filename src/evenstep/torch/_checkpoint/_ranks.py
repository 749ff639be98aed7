"""The ranks that save and load together: what one raises, all raise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, final

import torch.distributed as dist

from ..._diagnosis import Phase
from ...exceptions import CheckpointError
from .._balancer import Balancer
from .._exchange._crew import Crew

_T = TypeVar("_T")


@final
class Ranks:
    """All ranks of the default group, or a balancer's workers where some of its ranks serve.

    Args:
        balancer: what may have servers; anything else has none.
    """

    def __init__(self, balancer: object) -> None:
        self._balancer = balancer if isinstance(balancer, Balancer) else None

    @property
    def is_server(self) -> bool:
        """Whether this rank has nothing of the training to save."""
        return self._crew is not None and self._crew.is_server

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of these ranks; None is the default one."""
        crew = self._crew
        return crew.workers if crew is not None and crew.num_servers else None

    @property
    def rank(self) -> int:
        """This one's."""
        return dist.get_rank(self.group) if self._are_several() else 0

    @property
    def world_size(self) -> int:
        """Their number."""
        return dist.get_world_size(self.group) if self._are_several() else 1

    def saving(self) -> AbstractContextManager[None]:
        """Return a context whose time is that of a checkpoint, as far as a balancer knows of it."""
        own = self._balancer
        return nullcontext() if own is None else own._parts.steps.timed(Phase.CHECKPOINT)

    def share(self, call: Callable[[], Any], path: Path) -> Any:
        """Return on every rank what ``call`` gives on the first."""
        return self.together(lambda: call() if self.rank == 0 else None, path)[0]

    def on_all(self, call: Callable[[], _T], path: Path) -> _T:
        """Return what ``call`` gives on this rank, once all are known to have done well."""
        held: list[_T] = []
        self.together(lambda: held.append(call()), path)
        return held[0]

    def together(self, call: Callable[[], Any], path: Path) -> list[Any]:
        """Return what ``call`` gives on every rank, or raise on all what it raised on any.

        An error that not all of them had names the first rank that did.
        """
        value, problem = None, None
        try:
            value = call()
        except Exception as error:  # whatever it is, the others wait
            problem = self._portable(error, path)
        answers = [(value, problem)]
        if self.world_size > 1:
            answers = [(None, None)] * self.world_size
            dist.all_gather_object(answers, (value, problem), group=self.group)
        is_everybodys = all(raised is not None for _, raised in answers)
        for rank, (_, raised) in enumerate(answers):
            if type(raised) is ValueError and not is_everybodys:
                raise ValueError(f"on rank {rank}, ValueError: {raised}") from raised
            if raised is not None:
                raise raised
        return [answer for answer, _ in answers]

    def _portable(self, error: Exception, path: Path) -> Exception:
        """Return an error that says the same on another rank, of a kind that is documented."""
        if isinstance(error, OSError):
            return CheckpointError(f"`{path}`: {error}.", path)
        said = type(error) is ValueError and all(type(each) is str for each in error.args)
        if said or type(error) is CheckpointError:
            return error
        where = f"on rank {self.rank}, {type(error).__name__}"
        problem = CheckpointError(f"`{path}`: {where}: {error}", path)
        problem.__cause__ = error  # for this rank's own traceback; pickling leaves it out
        return problem

    @property
    def _crew(self) -> Crew | None:
        """The balancer's ranks, once it has prepared something."""
        return None if self._balancer is None else self._balancer._parts.crew

    def _are_several(self) -> bool:
        return dist.is_available() and dist.is_initialized()
