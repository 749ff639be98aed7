"""Ranks that reduce the gradients of different batches together are found out."""

import sys
import threading
from contextlib import contextmanager

import pytest

from evenstep._exchange._divergence import Reductions
from evenstep._exchange._message_kinds import Reduced


def told(world_size, *reduced):
    """Tell rank 0 what each rank reduced; return what it finds, at the first rank that shows it."""
    books = Reductions(world_size)
    found = [books.take(rank, one) for rank, one in enumerate(reduced)]
    return next((one for one in found if one is not None), None)


def once(*steps):
    return Reduced(0, 0, dict.fromkeys(steps, 1.0))


@pytest.mark.parametrize(
    "reduced",
    [
        [once(3), once(3), once(3)],
        [once(3, 4), once(3, 4), once(4, 3)],
        [Reduced(0, 0, {3: 2.0}), Reduced(0, 0, {3: None}), Reduced(0, 0, {3: 2.0})],
        [Reduced(0, 0, {}, maybe=(3, 4)), once(3), Reduced(0, 0, {}, maybe=(2, 3))],
        [Reduced(0, 0, {3: 0.1 + 0.2 + 0.7}), once(3), once(3)],
    ],
    ids=["one step", "two steps", "unknown share", "unknown step", "rounding"],
)
def test_the_same_batches_are_no_difference(reduced):
    """Also where a rank cannot tell all of it."""
    assert told(3, *reduced) is None


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (once(4), "step 4"),
        (once(3, 4), "step 3 and step 4"),
        (Reduced(0, 0, {3: 2.0}), "2 times step 3"),
        (Reduced(0, 0, {3: 0.5}), "0.5 times step 3"),
        (Reduced(0, 0, {}, maybe=(4, 5)), "one of the steps 4, 5"),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_rank_that_differs_is_named(odd, words, at):
    """With what it reduced, what the others did, and what to do."""
    reduced = [once(3), once(3), once(3)]
    reduced[at] = odd

    found = told(3, *reduced)

    assert f" gradients of {words} " in found.text or f"those of {words} " in found.text
    assert "step 3" in found.text
    assert "skip it on all" in found.text
    assert found.rank == at or at == 0  # of two that are known, either may be the odd one


def test_unlike_assignments_of_one_step_are_found():
    """By their checksums; a rank whose steps are not known has none."""
    one, other = Reduced(0, 0, {3: 1.0}, (), 9), Reduced(0, 0, {3: 1.0}, (), 8)

    assert told(3, one, one, Reduced(0, 0, {}, (3,))) is None
    assert "an assignment of samples with checksum 0x00000008" in told(3, one, one, other).text


def test_models_and_reductions_are_told_apart():
    """A rank may be further than another."""
    books = Reductions(2)

    alike = Reduced(0, 0, {3: 1.0}), Reduced(1, 0, {4: 1.0})
    for told in (*alike, Reduced(0, 1, {5: 1.0})):
        assert books.take(0, told) is None
    for told in alike:
        assert books.take(1, told) is None
    assert books.take(1, Reduced(0, 1, {6: 1.0})).rank in (0, 1)


@contextmanager
def hasty_threads():
    """Python changes between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_ranks_may_tell_of_a_reduction_at_the_same_moment():
    """Rank 0 from its training thread, the others by the channel's: nobody trips over that."""
    world, books, failed = 4, Reductions(4), []
    together = threading.Barrier(world)

    def tell(rank):
        try:
            for number in range(2000):
                together.wait(30)
                failed.extend(filter(None, [books.take(rank, Reduced(0, number, {1: 1.0}))]))
        except Exception as error:
            failed.append(error)
            together.abort()

    with hasty_threads():
        threads = [threading.Thread(target=tell, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert failed == []
