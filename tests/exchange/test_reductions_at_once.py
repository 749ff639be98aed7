"""Rank 0 hears of reductions from several threads at once."""

import sys
import threading
from contextlib import contextmanager

from evenstep._exchange._reductions import Reduced, Reductions


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
                failed.extend(
                    filter(None, [books.take(rank, [Reduced(0, number, {1: 1.0}).row()])])
                )
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
