"""What carries tensors between two ranks: a small interface, and what all of them promise."""

from __future__ import annotations

import abc
from typing import Protocol

import torch


class PeerFailed(RuntimeError):
    """An operation with a rank failed: it is gone, or something in between is.

    Attributes:
        peer: the rank, of the transport's group.
    """

    def __init__(self, peer: int, problem: str) -> None:  # the class says it
        super().__init__(problem)
        self.peer = peer


class Pending(Protocol):
    """An operation under way."""

    def wait(self, limit_s: float | None = None) -> None:
        """Return once it is done; on a device, once the current stream will see it done.

        Args:
            limit_s: after so many seconds it fails, and perhaps everything else with it; None is
                never.

        Raises:
            RuntimeError: it failed, as it does when the peer is gone or the transport broken off.
        """


class AbstractTransport(abc.ABC):
    """Sends tensors to other ranks of a group and receives from them, without waiting.

    Ranks are those of the group. Operations between two ranks are matched by their tag. Tensors lie
    in host memory.

    Attributes:
        rank, world_size: of the group.
        ranks: what errors call the group's ranks, mostly their global numbers.
    """

    rank: int
    world_size: int
    ranks: tuple[int, ...]

    @abc.abstractmethod
    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        """Receive into ``buffer``, contiguous and left alone until it is waited for.

        Raises:
            PeerFailed: the peer is known to have failed.
        """

    @abc.abstractmethod
    def send(self, buffer: torch.Tensor, target: int, tag: int) -> Pending:
        """Send ``buffer``, contiguous and left alone until it is waited for.

        Raises:
            PeerFailed: the peer is known to have failed.
        """

    @abc.abstractmethod
    def break_off(self) -> None:
        """Make everything that waits fail now, here and on the ranks at the other ends, for good.

        From any thread. May be called again.
        """
