"""Sums in rank order, the same bits on whichever rank, and the formats in which they travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)


def travels_in(dtype: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    r"""Return in what numbers gradients of ``dtype`` travel, if ``wire`` is asked for.

    With ``None`` they travel as they are; 16 bits are never made of 16 others. In 16 bits, each
    worker rounds what it pushes, also where it sums itself, servers sum in float32, and what they
    hand back is rounded once more and the same on all ranks bit for bit. With $u$ the unit
    roundoff, $2^{-8}$ for bfloat16 and $2^{-11}$ for float16, and $N$ workers, each element of the
    result is within

    $$(2 u + u^2 + N 2^{-23}) \frac{1}{N} \sum_i |g_i|$$

    of the mean, plus, for float16, $2^{-24}$ where numbers are subnormal. Above 65504 a float16 is
    infinite: scale the loss, as for any float16 gradient. Right where links are the limit and
    gradients are noisy anyway; wrong where a step has to be reproduced.

    Raises:
        TypeError: these are no gradients that can be summed.
    """
    if dtype not in FLOATS:
        raise TypeError(
            f"Gradients of {dtype} cannot be summed by shares: they have to be of float32, "
            f"float64, bfloat16 or float16. Use plain all-reduce for this model."
        )
    return dtype if wire is None or dtype in _HALVES else wire


def accumulator(wire: torch.dtype) -> torch.dtype:
    """Return in what numbers of ``wire`` are summed: float32 for 16 bits, else as they are."""
    return torch.float32 if wire in _HALVES else wire


def mean_in_order(
    terms: Sequence[torch.Tensor], *, scratch: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the mean of ``terms`` to ``out``: summed one after the other, then divided.

    Element by element, so that a part of the mean is the mean of the parts, bit for bit. The
    payload of a NaN alone may differ.

    Args:
        terms: at least one, of one shape.
        scratch: of the accumulator's type and that shape; it may be any of the terms.
        out: of the terms' type; it may be any of the terms, or the scratch.
    """
    if len(terms) == 1:
        out.copy_(terms[0])
        return
    if scratch.dtype == terms[0].dtype:
        # The scratch may be the memory of a term: it is read before, or in the moment, it is lost.
        where = next((i for i, term in enumerate(terms) if term is scratch), None)
        _add_in_place(terms, scratch, where)
    else:
        scratch.copy_(terms[0])
        for term in terms[1:]:
            scratch.add_(term)
    if out.dtype == scratch.dtype:
        torch.div(scratch, len(terms), out=out)
    else:
        out.copy_(scratch.div_(len(terms)))


def _add_in_place(terms: Sequence[torch.Tensor], scratch: torch.Tensor, where: int | None) -> None:
    if where is not None and where > 1:
        raise AssertionError("the scratch has to be one of the first two terms, or none")
    torch.add(terms[0], terms[1], out=scratch)
    for term in terms[2:]:
        scratch.add_(term)
