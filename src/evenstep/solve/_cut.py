"""How a local batch is cut into the forwards of a step."""

from __future__ import annotations

from collections.abc import Sequence


def cut(num_samples: int, max_forward: int | None, granularity: int = 1) -> tuple[int, ...]:
    """Return the sizes of as few micro-batches as ``max_forward`` allows, equal within a granule.

    All are whole granules, except that the last carries what is left of one. With both numbers
    the same, every micro-batch has that one size.

    Args:
        num_samples: samples of a rank in a step, at least 0.
        max_forward: most samples in one forward, positive; None is no limit.
        granularity: samples that come and go together, positive. One that does not fit into a
            forward is given up.
    """
    if max_forward is None or num_samples <= max_forward:
        return (num_samples,)
    granule = granularity if granularity <= max_forward else 1
    num_granules = -(-num_samples // granule)
    num_parts = -(-num_granules // (max_forward // granule))
    small, larger = divmod(num_granules, num_parts)
    sizes = [granule * (small + 1)] * larger + [granule * small] * (num_parts - larger)
    sizes[-1] -= num_granules * granule - num_samples
    return tuple(sizes)


def cut_by_size(sizes: Sequence[int], max_size: int, least: int = 1) -> tuple[int, ...]:
    """Return how many of the samples each micro-batch gets, one after the other.

    None is larger than ``max_size``, but for one of ``least`` samples. The last may have fewer.

    Args:
        sizes: of the samples, such as their tokens.
        max_size: most of it in one forward.
        least: samples that one forward needs, positive.
    """
    counts, held = [0], 0
    for size in sizes:
        if held + size > max_size and counts[-1] >= least:
            counts.append(0)
            held = 0
        counts[-1] += 1
        held += size
    return tuple(counts)
