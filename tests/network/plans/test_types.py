"""What an aggregation and links refuse, and what they make of what they take."""

import numpy as np
import pytest

from evenstep.network import Aggregation, Links

TRUE, FALSE = np.array([True, True]), np.array([False, False])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world_size": 0}, r"`Aggregation\(world_size=...\)` must be an integer >= 1, got 0"),
        ({"world_size": 2.0}, "must be an integer >= 1, got 2.0. Count all ranks"),
        ({"num_bytes": 0}, r"`Aggregation\(num_bytes=...\)` must be an integer >= 1"),
        ({"num_chunks": 0}, r"`Aggregation\(num_chunks=...\)` must .* None the limit of many"),
        ({"num_chunks": True}, r"`Aggregation\(num_chunks=...\)` must be an integer >= 1"),
        ({"is_worker": TRUE[:1]}, r"`Aggregation\(is_worker=...\)` must be 2 booleans"),
        ({"is_server": np.array([1, 0])}, r"`Aggregation\(is_server=...\)` must be 2 booleans"),
        ({"is_server": FALSE}, "must be 2 booleans, one at least true"),
        (
            {"is_worker": np.array([True, False]), "is_server": np.array([True, False])},
            "must give every rank something to do, got nothing for rank 1. Leave such a rank out",
        ),
    ],
)
def test_an_aggregation_that_cannot_be_is_refused(given, message):
    """By argument, rule, value and remedy."""
    arguments = {"world_size": 2, "num_bytes": 8} | given
    with pytest.raises(ValueError, match=message):
        Aggregation(**arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"up_bytes_per_s": np.ones((2, 1))}, r"`Links\(up_bytes_per_s=...\)` must have shape"),
        ({"up_bytes_per_s": np.ones(0)}, r"must have shape \(world_size,\), got \(0,\)"),
        ({"up_bytes_per_s": np.array([1, 0])}, "positive and finite on .* got 0.0 on rank 1"),
        ({"up_bytes_per_s": np.array([np.nan, 1])}, "got nan on rank 0. Measure it, or leave"),
        ({"down_bytes_per_s": np.ones(3)}, r"`Links\(down_bytes_per_s=...\)` must have shape \(2,"),
        ({"down_bytes_per_s": np.array([1, np.inf])}, "positive and finite on every rank, got inf"),
        ({"pair_bytes_per_s": np.ones(2)}, r"must have shape \(2, 2\), got \(2,\)"),
        ({"pair_bytes_per_s": np.eye(2)}, "between any two ranks, got 0.0 from rank 0 to 1"),
        ({"latency_s": -1.0}, r"`Links\(latency_s=...\)` must be finite and at least 0"),
        ({"latency_s": np.nan}, r"`Links\(latency_s=...\)` must be finite and at least 0"),
    ],
)
def test_links_that_cannot_be_are_refused(given, message):
    """By argument, rule, value and remedy."""
    arguments = {"up_bytes_per_s": np.ones(2)} | given
    with pytest.raises(ValueError, match=message):
        Links(**arguments)


def test_what_was_given_may_change_later():
    """Arrays are copied, and the copies cannot be written to."""
    up, works = np.array([1.0, 2.0]), TRUE.copy()
    links, aggregation = Links(up), Aggregation(2, 8, is_worker=works)
    up[0] = 9
    works[0] = False

    assert links.up_bytes_per_s.tolist() == [1, 2]
    assert aggregation.num_workers == 2
    with pytest.raises(ValueError, match="read-only"):
        links.up_bytes_per_s[0] = 3


def test_half_duplex_shares_a_link_between_both_ways():
    """The harmonic sum: half of it where both are as fast."""
    links = Links(np.array([10.0, 6.0]), np.array([10.0, 3.0]), half_duplex=True)

    assert links.bandwidth_bytes_per_s == pytest.approx([5, 2])
