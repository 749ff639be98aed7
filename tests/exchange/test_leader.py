"""What rank 0 makes of reports: who keeps others waiting, losses that are wrong, time lost."""

import gc
import math
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._exchange import _message_kinds as m
from evenstep._exchange._loss_checks import LossScales, LossTrial, NotFinite
from evenstep._exchange._progress import STEPS, UNITS, HangDetector
from evenstep._exchange._threads import frame_of
from evenstep.events import LossNotFinite

from .exchanges import router

USERS = m.ThreadLocation("at train.py:31 in forward", in_collective=False, compiling=False)
WAITING = m.ThreadLocation("at train.py:40 in step", in_collective=True, compiling=False)
COMPILING = m.ThreadLocation("at train.py:31 in forward", in_collective=False, compiling=True)
ALONE = m.ThreadLocation("at train.py:52 in report", in_collective=True, compiling=False)
WORLD, PAIR = "gloo group 0 (world)", "gloo group 1 (pair)"


class Watched:
    """A watch over three ranks, whose clock moves by a second a look."""

    def __init__(self, hang_s=90.0):
        self.watch = HangDetector(["a", "b", "c"], hang_s=hang_s, heartbeat_s=1.0)
        self.now_s = 1000.0
        self.warnings = []

    def come_to(self, *counts, paused=()):
        """Have each rank come to what it is said to have counted."""
        for rank, of_rank in enumerate(counts):
            self.watch.take(rank, m.ProgressReport(of_rank, is_paused=rank in paused))
        self.watch.look(self.now_s)  # sees that they moved

    def wait(self, num_looks, *, by_s=1.0, **places):
        """Look so many times; return the first who hangs and why, and after how many looks."""
        for look in range(num_looks):
            self.now_s += by_s
            finding = self.watch.look(self.now_s)
            for rank, place in places.items():
                self.watch.found(int(rank[1:]), place)
            late, _, warning, hung = finding or (None, (), "", "")
            self.warnings += [warning] if warning else []
            if hung:
                return (late, hung), look
        return None, num_looks


APART = {WORLD: 10, PAIR: 4}, {WORLD: 11, PAIR: 3}, {WORLD: 11, PAIR: 3}


def test_ranks_that_wait_for_each_other_in_two_collectives_are_told_early():
    """Neither will come; both lines are named."""
    watched = Watched()
    watched.come_to(*APART)
    (rank, why), num_looks = watched.wait(90, r0=ALONE, r1=WAITING, r2=WAITING)

    assert rank == 0
    assert "train.py:52 in report, and rank 1 is at train.py:40 in step" in why
    assert 12 < num_looks < 20


BACKWARD = m.ThreadLocation("at train.py:9 in step", True, False, call="backward")
BARRIER = m.ThreadLocation("at train.py:11 in log", True, False, call="barrier")


@pytest.mark.parametrize(("place", "soon"), [(BARRIER, True), (BACKWARD, False), (WAITING, False)])
def test_ranks_that_wait_in_two_calls_of_one_group_are_told_early(place, soon):
    """Their counts are alike. In the same call, or one that is not known, it may be slow."""
    watched = Watched()
    watched.come_to(*({STEPS: 7 - (rank == 1), WORLD: 11} for rank in range(3)))
    (rank, why), num_looks = watched.wait(200, r0=BACKWARD, r1=place, r2=BACKWARD)

    assert rank == 1
    assert (num_looks < 20) == soon
    assert ("train.py:11 in log, and rank 0 is at train.py:9" in why) == soon


@pytest.mark.parametrize("busy", [0, 2])
def test_a_rank_that_may_still_come_has_its_time(busy):
    """Where one computes, another collective may only be late."""
    watched = Watched()
    watched.come_to(*APART)
    places = {"r0": ALONE, "r1": WAITING, "r2": WAITING} | {f"r{busy}": USERS}

    _, num_looks = watched.wait(120, **places)
    assert num_looks > 80


def late(*ranks, step=7, **settings):
    """Return a watch over ranks of which some have not finished a step that the others have."""
    watched = Watched(**settings)
    watched.come_to(*({STEPS: step - (rank in ranks)} for rank in range(3)))
    return watched


def test_a_rank_that_hangs_is_named_at_the_deadline_with_its_place():
    """And is warned of long before."""
    watched = late(2)

    hung, looks = watched.wait(200, r2=USERS)

    assert looks == 89
    assert hung == (
        2,
        "it has not finished step 7 for 90 s while others wait; it is at train.py:31 in forward "
        "(if it was only slow, raise `Runtime(hang_s=...)`)",
    )
    assert len(watched.warnings) == 1
    assert "Rank 2 on c has not finished step 7 for 16 s while others wait" in watched.warnings[0]
    assert "After 90 s it counts as hanging: `Runtime(hang_s=...)`" in watched.warnings[0]


def test_a_pause_that_all_share_is_none():
    """No rank is ahead, so none waits, for an hour if need be."""
    watched = late(1)
    watched.wait(5)
    watched.come_to({STEPS: 7}, {STEPS: 7}, {STEPS: 7})

    assert watched.wait(3600) == (None, 3600)
    watched.come_to({STEPS: 8}, {STEPS: 7}, {STEPS: 8})
    assert watched.wait(80) == (None, 80)


def test_the_clock_starts_anew_with_every_move():
    """A rank that is always a little late never adds up to one that hangs."""
    watched = Watched()

    for step in range(20):
        watched.come_to({STEPS: step}, {STEPS: step - 1}, {STEPS: step})
        assert watched.wait(60)[0] is None


def test_a_rank_that_moves_in_any_count_does_not_hang():
    """A long step of many collectives, say, whose end the others have reported."""
    watched = Watched()

    for bucket in range(20):
        watched.come_to({STEPS: 7}, {STEPS: 6, WORLD: bucket}, {STEPS: 7})
        assert watched.wait(60)[0] is None


def test_a_rank_that_compiles_is_given_three_times_as_long():
    """A compiler runs for minutes; but compilers hang too."""
    hung, looks = late(1).wait(1000, r1=COMPILING)

    assert hung[0] == 1
    assert looks == 269


def test_who_waits_for_others_is_not_the_one_to_blame():
    """Of two that are late, one may be held up by the other in a collective."""
    assert late(0, 2).wait(200, r0=WAITING, r2=USERS)[0][0] == 2
    assert late(0, 2).wait(200, r0=USERS, r2=WAITING)[0][0] == 0


def test_who_has_not_begun_a_collective_is_the_one_to_blame():
    """Though it has finished its step, which another, who waits for it there, has not."""
    watched = Watched()
    watched.come_to({STEPS: 7, WORLD: 40}, {STEPS: 7, WORLD: 39}, {STEPS: 6, WORLD: 40})

    (rank, problem), _ = watched.wait(200, r0=WAITING)

    assert rank == 1
    assert f"it has not come to collective 40 of {WORLD} for 90 s while others wait" in problem


def test_at_the_end_of_a_chain_is_the_one_that_waits_for_none():
    """Rank 0 waits for rank 1, and rank 1 for rank 2, in another group."""
    watched = Watched()
    watched.come_to({WORLD: 5}, {WORLD: 4, PAIR: 3}, {WORLD: 4, PAIR: 2})

    assert watched.wait(200, r0=WAITING, r1=WAITING)[0][0] == 2


def test_two_that_wait_for_each_other_end_all_the_same():
    """Each in another group, which is a mistake of the script's: one of them is named."""
    watched = Watched()
    watched.come_to({WORLD: 5, PAIR: 2}, {WORLD: 4, PAIR: 3}, {WORLD: 5})

    assert watched.wait(200, r0=WAITING, r1=WAITING)[0][0] in {0, 1}


def test_units_that_a_rank_has_not_told_are_waited_for():
    """Its data set never answers, and the others have theirs for the step."""
    watched = Watched()
    watched.come_to(*({STEPS: 6, UNITS: 7 - (rank == 2)} for rank in range(3)))

    (rank, problem), _ = watched.wait(200)

    assert rank == 2
    assert "it has not come to step 7 for 90 s" in problem


def test_counts_that_sends_brought_apart_end_nothing():
    """Rank 1 never took part in them: it stands behind for good, and no rank waits for it."""
    watched = Watched()
    watched.come_to({WORLD: 6}, {WORLD: 5}, {WORLD: 6})

    assert watched.wait(1000, r0=USERS, r1=USERS, r2=USERS) == (None, 1000)
    assert len(watched.warnings) == 1


def test_who_works_alone_for_a_while_does_not_hang():
    """Nor does a rank that waits for it. One that keeps both waiting does."""
    watched = Watched()
    watched.come_to({WORLD: 5}, {WORLD: 6}, {WORLD: 6}, paused={0})
    assert watched.wait(1000, r1=WAITING) == (None, 1000)

    watched.come_to({WORLD: 5, PAIR: 1}, {WORLD: 5, PAIR: 2}, {WORLD: 6}, paused={0})
    assert watched.wait(1000, r1=WAITING, r2=WAITING) == (None, 1000)

    watched.come_to({WORLD: 5}, {WORLD: 6}, {WORLD: 5}, paused={0})
    assert watched.wait(1000, r1=WAITING)[0][0] == 2


def test_a_rank_that_has_ended_its_run_is_late_for_nothing():
    """What it left undone is noticed elsewhere."""
    watched = late(1)
    watched.watch.left(1)

    assert watched.wait(1000) == (None, 1000)


def test_one_that_does_not_answer_is_named_all_the_same():
    """Its threads may hang as well, short of the heartbeats."""
    hung, looks = late(1).wait(200)

    assert hung == (
        1,
        "it has not finished step 7 for 90 s while others wait; its position is unknown "
        "(if it was only slow, raise `Runtime(hang_s=...)`)",
    )
    assert looks == 89


def test_a_pause_of_this_process_is_not_the_others():
    """Stopped for an hour itself, it has not waited for an hour."""
    watched = late(1)
    watched.wait(5)

    assert watched.wait(1, by_s=3600.0) == (None, 1)
    assert watched.wait(70) == (None, 70)


@pytest.mark.parametrize("place", [USERS, WAITING])
def test_without_a_limit_no_rank_hangs(place):
    """For those who know that a rank may be busy for any time."""
    watched = late(1, hang_s=None)

    assert watched.wait(10_000, r1=place) == (None, 10_000)
    assert watched.warnings == []


def test_who_owes_the_message_that_others_wait_for_is_the_one_to_blame():
    """Of rank 0 all wait, and rank 0 of each other one; who sent it before is not behind."""
    waiting, sent = {"loader 0": 2}, {"loader 0": 1}
    asks, owes = m.ProgressReport(awaited=waiting), m.ProgressReport(sent=sent)
    cases = [([owes, asks, asks], 0), ([m.ProgressReport(), asks, asks], 0)]
    cases += [([asks, m.ProgressReport(sent=waiting), owes], 2)]
    for progress, culprit in cases:
        watched = Watched()
        for rank, told in enumerate(progress):
            watched.watch.take(rank, told)

        (rank, problem), looks = watched.wait(200, **{f"r{culprit}": USERS})

        assert rank == culprit
        assert looks < 95
        assert "it has not sent a message about loader 0 for 90 s while others wait" in problem
        assert "at train.py:31 in forward" in problem


def test_a_rank_that_owes_a_message_may_wait_for_a_step_itself():
    """Rank 0 waits for rank 2, whose sizes the next plan needs, before it draws the next order."""
    watched = Watched()
    watched.watch.take(0, m.ProgressReport({STEPS: 7}))
    watched.watch.take(1, m.ProgressReport({STEPS: 7}, awaited={"loader 0": 1}))
    watched.watch.take(2, m.ProgressReport({STEPS: 6}))

    assert watched.wait(200)[0][0] == 2


def test_messages_that_are_sent_ahead_keep_none_waiting():
    """Ranks may read ahead by unlike numbers of steps, and all pause then."""
    watched = Watched()
    for rank in range(3):
        watched.watch.take(rank, m.ProgressReport(sent={"lengths of loader 0": 5 - rank}))

    assert watched.wait(1000) == (None, 1000)


def test_who_waits_for_a_rank_that_raised_need_not_wait_until_it_hangs():
    """Three looks in the collective are enough, with the words of its goodbye."""
    watched = Watched()
    watched.come_to({WORLD: 5}, {WORLD: 4}, {WORLD: 5})
    watched.watch.left(1, (1, "it raised ValueError: no label after step 7"))

    assert watched.wait(100, r0=USERS, r2=USERS) == (None, 100)
    hung, looks = watched.wait(100, r0=USERS, r2=WAITING)
    assert hung == (1, "it raised ValueError: no label after step 7")
    assert looks <= 3


def test_no_garbage_is_collected_while_frames_are_listed():
    """A destructor that lets other threads run would stop the process for good."""
    go_on, collected = threading.Event(), []
    threads = [threading.Thread(target=go_on.wait) for _ in range(8)]
    before = gc.get_threshold()

    def hear(phase, info):
        if phase == "start":
            collected.append(sys._getframe(1).f_code.co_name)

    for thread in threads:
        thread.start()
    gc.callbacks.append(hear)
    gc.set_threshold(1)
    try:
        found = [frame_of(thread.ident) for thread in threads]
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(hear)
        go_on.set()
    for thread in threads:
        thread.join()

    assert None not in found
    assert collected  # elsewhere
    assert "frame_of" not in collected
    assert frame_of(threads[0].ident) is None
    assert gc.isenabled()


EQUAL = np.array([32.0, 32.0])
SIZES = [EQUAL, *[np.array(sizes) for sizes in ((44.0, 20.0), (22.0, 42.0))] * 20]


@pytest.fixture
def said():
    """What rank 0 emitted."""
    return []


@pytest.fixture
def books(said):
    alone = router()
    made = NotFinite(alone, emit=said.append)
    alone.add(made)
    return made


def hear(books, rank, *steps, half=False):
    """Have rank 0 hear of a rank's steps."""
    for step in steps:
        books.received(rank, m.NotFiniteReport(step, half))


def test_five_steps_in_a_row_are_said_with_the_first_and_its_ranks(books, said):
    """One rank's NaN is in all losses from the next step on: who was first is what helps."""
    hear(books, 1, 3)
    hear(books, 2, 3)
    for step in (4, 5, 6):
        for rank in (1, 2):
            hear(books, rank, step)
        books.report(step, is_half=False)
    assert said == []

    hear(books, 1, 7)

    assert said == [LossNotFinite(3, (1, 2))]


def test_it_is_said_once(books, said):
    """A dead run does not repeat it, at its end neither."""
    hear(books, 1, *range(40), *range(50, 90))
    books.end(89)

    assert said == [LossNotFinite(0, (1,))]


def test_a_finite_step_in_between_begins_anew(books, said):
    """Steps that a script skips by hand, now and then, are its own affair."""
    hear(books, 1, 0, 1, 2, 3, 5, 6, 7, 8, 10, 11)
    books.end(12)

    assert said == []


def test_in_half_precision_a_loss_scale_may_halve_until_it_is_one(books, said):
    """GradScaler begins with 2**16, and skips a step for each halving."""
    hear(books, 1, *range(16), half=True)
    books.end(15)
    assert said == []

    hear(books, 1, 16, half=True)

    assert said == [LossNotFinite(0, (1,))]


def test_a_run_that_ends_so_is_told_of_it(books, said):
    """A script that raises on its first NaN has fewer than five."""
    hear(books, 1, 3)
    books.report(4, is_half=False)
    books.end(4)

    assert said == [LossNotFinite(3, (1,))]


@pytest.mark.parametrize("bad", [(), (0, 1)])
def test_a_run_that_ends_well_says_nothing(bad, books, said):
    """Whatever was before."""
    hear(books, 1, *bad)
    books.end(9)

    assert said == []


def test_a_device_that_is_read_late_is_still_the_first(books, said):
    """Ranks tell of their steps when their devices have got there."""
    for step in (4, 5, 6):
        books.report(step, is_half=False)
    hear(books, 1, 3, 4, 5, 6, 7)

    assert said == [LossNotFinite(3, (1,))]


def verdicts(slope, *, noise, seed, believed=1.0, skew=0.0, sizes=SIZES, at_random=True):
    """What a trial says of each step, whose scales follow a slope."""
    draw = np.random.default_rng(seed)
    trial = LossTrial(2, at_random=at_random)
    found = []
    for size in sizes:
        variance = noise**2 * size.mean() / size
        spread = draw.normal(0.0, np.sqrt(variance))
        common = draw.normal(0.0, 1.0)  # as training goes on, and by the loss scale
        own = np.array([skew, -skew])
        scale = np.exp(common + own + slope * np.log(size) + spread)
        found.append(trial.add(scale, size, variance * believed))
    return found


@given(seed=st.integers(0, 10**6), noise=st.floats(0.0, 0.05))
def test_little_noise_is_decided_within_ten_steps(seed, noise):
    for slope, found in ((0.0, "mean"), (1.0, "sum")):
        assert verdicts(slope, noise=noise, seed=seed)[10] == found


@given(seed=st.integers(0, 10**6), noise=st.floats(0.1, 1.0), at_random=st.booleans())
def test_much_noise_is_never_decided_wrong(seed, noise, at_random):
    for slope, other in ((0.0, "sum"), (1.0, "mean")):
        assert other not in verdicts(slope, noise=noise, seed=seed, at_random=at_random)


@given(seed=st.integers(0, 10**6), skew=st.floats(-1.5, 1.5), noise=st.floats(0.01, 0.3))
def test_ranks_that_differ_at_equal_sizes_are_compared_with_themselves(seed, skew, noise):
    """In an order of the user's own, rank 0 may have all that is hard."""
    for slope, other in ((0.0, "sum"), (1.0, "mean")):
        settings = {"noise": noise, "seed": seed, "skew": skew, "at_random": False}
        assert other not in verdicts(slope, **settings)


def test_sizes_that_never_change_leave_an_order_of_the_users_own_undecided():
    """A rank with fewer samples may as well have the easy ones."""
    sizes = [np.array([44.0, 20.0])] * 200

    assert set(verdicts(1.0, noise=0.02, seed=0, sizes=sizes, at_random=False)) == {None}
    assert verdicts(1.0, noise=0.02, seed=0, sizes=sizes)[-1] == "sum"


def test_a_mixed_term_is_neither():
    found = verdicts(0.5, noise=0.05, seed=0)

    assert found[-1] == "between"
    assert set(found) <= {None, "between"}


@pytest.mark.parametrize("sizes", [[EQUAL] * 200, [np.array([32.0, 32.2])] * 200])
def test_sizes_that_hardly_differ_are_not_judged(sizes):
    """The wrong weight is right there."""
    assert set(verdicts(1.0, noise=0.01, seed=0, sizes=sizes)) == {None}


def test_one_step_is_never_enough():
    assert set(verdicts(1.0, noise=0.0, seed=0)[:3]) == {None}


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan, -1.0])
def test_what_is_no_scale_is_left_out(bad):
    trial = LossTrial(3, at_random=True)
    for size in ([44.0, 20.0, 32.0], [20.0, 44.0, 32.0]) * 20:
        found = trial.add(np.array([size[0], size[1], bad]), np.array(size), np.ones(3) / 100)

    assert found == "sum"


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_scale_without_a_known_variance_is_left_out(bad):
    """Of both ranks, even: nothing is decided, and nothing fails."""
    trial = LossTrial(2, at_random=True)

    assert trial.add(np.array([44.0, 20.0]), np.array([44.0, 20.0]), np.full(2, bad)) is None


@pytest.fixture
def news():
    return []


@pytest.fixture
def scales(news):
    """Rank 0's part in a run of two."""
    alone = router(0, 2)
    return LossScales(alone, refuse=news.append, warn=news.append)


def compare(scales, slopes, *, left_out=(), first=0):
    """Have both ranks tell of many steps, by one slope for each output."""
    for step in range(first, first + 60):
        sizes = (44.0, 20.0) if step % 2 else (22.0, 42.0)
        for rank, size in enumerate(sizes):
            if (rank, step) not in left_out:
                told = [(0, output, size**slope, size, 0.01) for output, slope in enumerate(slopes)]
                scales.received(rank, m.ScalesReport(step, tuple(told)))


def test_what_is_as_it_was_said_is_no_news(scales, news):
    compare(scales, [0.0, 0.0])

    assert news == []


def test_another_loss_is_refused_once_with_its_remedy(scales, news):
    scales.open("sum", at_random=True)
    compare(scales, [0.0])

    (refused,) = news
    assert 'Leave `loss_reduction="sum"` out' in refused.text


def test_outputs_of_unlike_losses_are_told_apart(scales, news):
    compare(scales, [0.0, 1.0])

    assert "`balancer.weight(means) + sums`" in news[0].text
    assert "and not at another" in news[0].text


def test_what_is_neither_is_said_and_training_goes_on(scales, news):
    compare(scales, [0.5])

    (warning,) = news
    assert "neither a mean nor a sum" in warning


def test_a_number_whose_gradient_all_ranks_share_is_let_be(scales, news):
    """A temperature in a loss over all samples is no mean beside the sum of the features."""
    scales.open("sum", at_random=True)
    for step in range(60):
        sizes = (44.0, 20.0) if step % 2 else (22.0, 42.0)
        for rank, size in enumerate(sizes):
            told = (0, 0, size, size, 0.01), (0, 1, 0.3 + step, size, 1.0 / size)
            scales.received(rank, m.ScalesReport(step, told))

    assert news == []


def test_the_gradient_of_an_input_is_judged_apart(scales, news):
    """An attack may be by a sum where training is by a mean: its gradients are weighted as such."""
    for step in range(60):
        sizes = (44.0, 20.0) if step % 2 else (22.0, 42.0)
        for rank, size in enumerate(sizes):
            told = (0, 0, 1.0, size, 0.01), (0, ~0, size, size, 0.01)
            scales.received(rank, m.ScalesReport(step, told))

    (warning,) = news
    assert "the gradient of an input" in warning
    assert "`model.module(x)`" in warning


def test_steps_that_not_all_have_told_of_are_forgotten(scales, news):
    compare(scales, [1.0], left_out={(1, step) for step in range(0, 60, 5)})

    assert len(news) == 1


def test_a_loss_that_becomes_another_one_is_refused_then(scales, news):
    """As one whose second term grows, from nothing."""
    compare(scales, [0.0])
    compare(scales, [1.0], first=60)

    assert len(news) >= 1
    assert 'loss_reduction="sum"' in news[0].text
