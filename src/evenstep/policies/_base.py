"""The interface every policy implements."""

from __future__ import annotations

import abc
import inspect
from typing import Any, ClassVar, Generic

from .._types import Cluster, Decision, State, StepTimings
from ..exceptions import invalid

READING_S = 0.05
"""Seconds of computing that policies take short steps together for.

Learning from a reading takes rank 0 about a millisecond, and every rank a message.
"""


class AbstractPolicy(abc.ABC, Generic[State]):
    """Decides how many samples each worker gets on the next step.

    A policy is an immutable value: hyperparameters live on ``self``, everything that changes
    lives in ``State``, which is plain enough for any checkpoint (see ``Decision``). It does no
    I/O, reads no clock and knows no framework, so the trainer and the simulator run the very
    same object.

    Three things may happen that are not in the policy's hands, and it has to live with them. A
    measurement may arrive a step late, taken under the plan before. A wrapper or a driver may
    keep another split in force than the one decided. And the bounds of ``cluster`` may move from
    one update to the next, as a driver learns what fits in memory; the number of workers may
    not, for which there is ``init``.

    Attributes:
        name: what configurations, the CLI and reports call it, such as ``"lb-bsp-2020"``.
    """

    __slots__ = ()

    name: ClassVar[str] = ""

    @property
    def reading_s(self) -> float:
        """Seconds of computing for which short steps are taken together before an ``update``.

        0 shows each step, however short. More suits a policy that is not worth its own time on
        steps of a few milliseconds; it is shown every worker's median (``StepTimings.num_steps``).
        """
        return 0.0

    @abc.abstractmethod
    def init(self, cluster: Cluster) -> Decision[State]:
        """Return the first decision, before anything is measured."""

    @abc.abstractmethod
    def update(self, cluster: Cluster, timings: StepTimings, state: State) -> Decision[State]:
        """Return the next decision, leaving all arguments as they are."""


def check_policy(argument: str, value: Any, *, rule: str = "be a policy") -> None:
    """Raise unless ``value`` is a policy.

    Args:
        argument: the class and its argument, for the message.
        value: what was given for it.
        rule: what would do.

    Raises:
        ValueError: it is a class, no policy, or does not inherit from ``AbstractPolicy``.
    """
    if isinstance(value, AbstractPolicy):
        return
    remedy = "Give an instance, such as `Auto()`."
    given = value if inspect.isclass(value) else type(value)
    if issubclass(given, AbstractPolicy):
        remedy = f"Give an instance, `{given.__name__}(...)`, not the class."
    elif hasattr(given, "update"):
        remedy = f"Have `{given.__name__}` inherit from `evenstep.policies.AbstractPolicy`."
    raise invalid(argument, rule, repr(value), remedy)
