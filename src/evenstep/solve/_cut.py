"""How a local batch is cut into the forwards of a step."""

from __future__ import annotations


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
