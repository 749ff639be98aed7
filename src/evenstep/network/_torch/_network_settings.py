"""How gradients are summed: what a user says about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from ..._types import check_fields
from ...exceptions import invalid
from .._plans._share_policies import (
    AbstractSharePolicy,
    EqualShares,
    OptimalShares,
    ProportionalShares,
)

ShareRule = Literal["optimal", "proportional", "equal"]
_RULES: Final[dict[str, type[AbstractSharePolicy[Any]]]] = {
    rule.name: rule for rule in (OptimalShares, ProportionalShares, EqualShares)
}
_FEWEST_CHUNKS = 16
_SMALLEST, _LARGEST = 1 << 16, 1 << 22


@dataclass(frozen=True, slots=True)
class Network:
    """Sums gradients by shares that fit the links, where that is faster than plain all-reduce.

    The first steps measure all-reduce and the links. Then each rank sums the part of the gradients
    that suits its link, and the parts follow the links. If that gains nothing, all-reduce
    continues. The result is all-reduce's up to rounding, and the same bits for any shares.

    Right for three or more workers in DDP over gloo, whose links differ or change. On equal links,
    three steps measure at the start. Later ones are so rare that they take at most 2 % of the time
    of exchanges. Wrong for a model whose exchange takes a few milliseconds. NCCL is not supported.

    Args:
        shares: which rank sums how much: ``"optimal"``, ``"proportional"`` (the reconstructed rule
            of the 2023 paper), ``"equal"``, or a share policy.
        wire: 16 bits in which gradients travel, ``torch.bfloat16`` or ``torch.float16``, rounded
            twice; None sends them as they are.
        margin: the measured gain over all-reduce that shares need, at least 0; a third of it if
            servers have no data.
        chunk_bytes: bytes of a chunk, at least 65536; the pull of one chunk overlaps the push of
            the next. None takes a sixteenth of the gradients, between 64 KiB and 4 MiB.
        servers: ranks of the balancer's process group that hold no data and only sum gradients,
            each once and never 0, the same on all ranks; at least two ranks have to train. None
            uses the environment: processes with ``EVENSTEP_ROLE=server`` serve. ``()`` is none,
            regardless of the environment.
        only_servers: whether only servers sum; refused in `prepare` where there are none. False
            lets workers sum too, if that saves time.

    Raises:
        ValueError: an argument is out of range.
    """

    shares: ShareRule | AbstractSharePolicy[Any] = "optimal"
    wire: torch.dtype | None = None
    margin: float = 0.15
    chunk_bytes: int | None = None
    servers: tuple[int, ...] | None = None
    only_servers: bool = False

    def __post_init__(self) -> None:
        by_name = isinstance(self.shares, str) and self.shares in _RULES
        if not (by_name or isinstance(self.shares, AbstractSharePolicy)):
            raise invalid(
                "Network(shares=...)",
                f"be a share policy or one of {', '.join(map(repr, _RULES))}",
                repr(self.shares),
                "Leave it out for the optimal ones.",
            )
        if self.wire not in (None, torch.bfloat16, torch.float16):
            raise invalid(
                "Network(wire=...)",
                "be torch.bfloat16, torch.float16 or None",
                self.wire,
                "None sends gradients as they are.",
            )
        check_fields(self, margin=("finite and at least 0", "0.15 is 15 %."))
        if self.chunk_bytes is not None:
            rule = f"an integer of at least {_SMALLEST}"
            check_fields(self, chunk_bytes=(rule, "None takes a size that suits."))
            object.__setattr__(self, "chunk_bytes", int(self.chunk_bytes))  # NumPy's too
        if self.servers is not None:
            object.__setattr__(self, "servers", _checked_servers(self.servers))

    @property
    def policy(self) -> AbstractSharePolicy[Any]:
        """The share policy."""
        return _RULES[self.shares]() if isinstance(self.shares, str) else self.shares

    def chunk_bytes_of(self, num_bytes: int) -> int:
        """Return the bytes of a chunk of gradients of ``num_bytes``."""
        if self.chunk_bytes is not None:
            return self.chunk_bytes
        return min(max(num_bytes // _FEWEST_CHUNKS, _SMALLEST), _LARGEST)


def _checked_servers(servers: Any) -> tuple[int, ...]:
    """Return who serves, ascending; whether there are so many ranks, `prepare` knows."""
    known = isinstance(servers, Iterable) and not isinstance(servers, str)
    ranks = tuple(servers) if known else None
    if ranks is None or not all(type(rank) is int and rank >= 0 for rank in ranks):
        rule, remedy = "be ranks, integers from 1 on, or None", "Give `servers=(4, 5)`."
        raise invalid("Network(servers=...)", rule, repr(servers), remedy)
    if len(set(ranks)) < len(ranks):
        rule, remedy = "name each rank once", "Leave the second one out."
        raise invalid("Network(servers=...)", rule, ranks, remedy)
    if 0 in ranks:
        raise invalid(
            "Network(servers=...)",
            "leave rank 0 to train",
            ranks,
            "Scripts save and log on rank 0, and a server's copy of the model is never trained.",
        )
    return tuple(sorted(ranks))
