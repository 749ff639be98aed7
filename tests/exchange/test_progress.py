"""Who keeps the others waiting is named in time, and nobody who only takes a break with all."""

from dataclasses import replace

import pytest

from evenstep._exchange._place import Place
from evenstep._exchange._progress import ProgressWatch

USERS = Place("at train.py:31 in forward", in_collective=False, compiling=False)
WAITING = Place("at train.py:40 in step", in_collective=True, compiling=False)
COMPILING = Place("at train.py:31 in forward", in_collective=False, compiling=True)


class Watched:
    """A watch over three ranks, whose clock moves by a second a look."""

    def __init__(self, hang_s=90.0):
        self.watch = ProgressWatch(["a", "b", "c"], hang_s=hang_s, heartbeat_s=1.0)
        self.now_s = 1000.0
        self.warnings = []

    def wait(self, num_looks, awaited, *, by_s=1.0, **places):
        """Look so many times; return the first verdict, and after how many looks."""
        for look in range(num_looks):
            self.now_s += by_s
            finding = self.watch.look(self.now_s, awaited)
            for rank, place in places.items():
                self.watch.heard(int(rank[1:]), awaited[0], place)
            if finding is not None and finding.warning:
                self.warnings.append(finding.warning)
            if finding is not None and finding.hung:
                return finding.hung, look
        return None, num_looks


def missing(*ranks, step=7):
    return step, frozenset(ranks)


def test_a_rank_that_hangs_is_named_at_the_deadline_with_its_place():
    """And is warned of long before."""
    watched = Watched()

    hung, looks = watched.wait(200, missing(2), r2=USERS)

    assert looks == 90
    assert hung == (
        2,
        "it has not finished step 7 for 90 s while others wait; it is at train.py:31 in forward "
        "(if it was only slow, raise `Runtime(hang_s=...)`)",
    )
    assert len(watched.warnings) == 1
    assert "Rank 2 on c has not finished step 7 for 16 s while others wait" in watched.warnings[0]
    assert "After 90 s it counts as hanging: `Runtime(hang_s=...)`" in watched.warnings[0]


def test_a_pause_that_all_share_is_none():
    """Nobody has finished the next step, so nobody waits, for an hour if need be."""
    watched = Watched()
    watched.wait(5, missing(1))

    assert watched.wait(3600, None) == (None, 3600)
    assert watched.wait(80, missing(1, step=8)) == (None, 80)


def test_the_clock_starts_anew_with_every_step():
    """A rank that is always a little late never adds up to one that hangs."""
    watched = Watched()

    for step in range(20):
        assert watched.wait(60, missing(1, step=step))[0] is None


def test_a_rank_that_compiles_is_given_three_times_as_long():
    """A compiler runs for minutes; but compilers hang too."""
    hung, looks = Watched().wait(1000, missing(1), r1=COMPILING)

    assert hung[0] == 1
    assert looks == 270


def test_who_waits_for_others_is_not_the_one_to_blame():
    """Of two that are missing, one may be held up by the other in a collective."""
    assert Watched().wait(200, missing(0, 2), r0=WAITING, r2=USERS)[0][0] == 2
    assert Watched().wait(200, missing(0, 2), r0=USERS, r2=WAITING)[0][0] == 0


def test_one_that_does_not_answer_is_named_all_the_same():
    """Its threads may hang as well, short of the heartbeats."""
    hung, looks = Watched().wait(200, missing(1))

    assert hung == (
        1,
        "it has not finished step 7 for 90 s while others wait; where it is, it does not say "
        "(if it was only slow, raise `Runtime(hang_s=...)`)",
    )
    assert looks == 90


def test_a_pause_of_this_process_is_not_the_others():
    """Stopped for an hour itself, it has not waited for an hour."""
    watched = Watched()
    watched.wait(5, missing(1))

    assert watched.wait(1, missing(1), by_s=3600.0) == (None, 1)
    assert watched.wait(70, missing(1)) == (None, 70)


def test_without_a_limit_nobody_hangs():
    """For those who know that a rank may be busy for any time."""
    watched = Watched(hang_s=None)

    assert watched.wait(10_000, missing(1), r1=USERS) == (None, 10_000)
    assert watched.warnings == []


@pytest.mark.parametrize(
    ("places", "elsewhere"),
    [
        ({"r1": USERS, "r2": USERS}, True),
        ({"r1": USERS, "r2": WAITING}, False),
        ({"r1": USERS, "r2": replace(USERS, past_backward=True)}, False),
        ({"r1": USERS}, False),
    ],
)
def test_elsewhere_is_whoever_is_known_to_wait_for_nobody(places, elsewhere):
    """All late ranks have to be: one of unknown place may wait for the one that asks."""
    watched = Watched()
    watched.wait(5, missing(1, 2), **places)

    assert watched.watch.look(watched.now_s + 1, missing(1, 2)).elsewhere is elsewhere


def test_one_that_may_wait_unseen_is_not_the_one_to_blame():
    """Past its backward it may wait in C++, where it looks like anybody."""
    past = replace(USERS, past_backward=True)

    assert Watched().wait(200, missing(0, 2), r0=past, r2=USERS)[0][0] == 2
