"""What a server hears of the workers, and how long it waits for them."""

import threading
from dataclasses import replace

import msgspec
import pytest

from evenstep.exceptions import WorkerLostError
from evenstep.network._torch._serving import ServerWatch
from evenstep.torch import Runtime
from evenstep.torch._unequal_links import timeout_s

from ...exchange.exchanges import PLAIN


def test_a_server_hears_of_the_end_once():
    """Rank 0 that leaves after its goodbye is no loss, and a server that is not told ends too."""
    ends = []
    busy = [True]
    watch = ServerWatch(
        ["a", "b"],
        fail=ends.append,
        ask=print,
        end=lambda: ends.append("end"),
        is_idle=lambda: not busy,
        grace_s=-1.0,
        framework=PLAIN,
    )
    watch.received(0, msgspec.msgpack.encode([["Goodbye", 7, 7, 2, None]]))
    watch.lost(0, "its connection closed")
    watch.tick()
    assert not ends  # the last sums are on their way to a worker with a slow link
    busy.clear()
    watch.tick()

    assert watch.ended(within_s=0) == 2
    assert ends == ["end"]
    watch.check()


def test_a_server_stuck_with_a_lost_rank_is_ended():
    """Its own thread could tell nobody; and what is lost is told to whoever sums, once."""
    losses, ended = [], []
    watch = ServerWatch(
        ["a", "b"],
        fail=losses.append,
        ask=print,
        end=pytest.fail,
        is_idle=lambda: True,
        grace_s=-1.0,
        framework=replace(PLAIN, is_stuck=lambda thread_id: thread_id == threading.get_ident()),
        abort=ended.append,
    )
    watch.received(
        0, msgspec.msgpack.encode([["Answer", 7, 9, 6, False], ["RankLost", 1, "it is silent", 6]])
    )
    watch.received(0, msgspec.msgpack.encode([["Goodbye", 6, 6, 2, [0, "rank 0 ended"]]]))
    watch.tick()
    assert not ended  # outside of a collective it comes by to hear of it
    watch.enter_collective()
    watch.tick()

    assert [loss.rank for loss in losses] == [1]
    assert "Rank 1 on b was lost: it is silent. The last step complete" in ended[0]
    with pytest.raises(WorkerLostError, match="on all ranks is 6"):
        watch.check()


def test_a_step_may_take_as_long_as_the_user_says():
    """Sums are given up after those who watch the steps would have."""
    assert timeout_s(Runtime(hang_s=10.0, deadline_s=5.0)) == 35.0
    assert timeout_s(Runtime(hang_s=None)) > 1e7


@pytest.mark.parametrize(
    ("row", "words"),
    [(["UnitsReply", 3, 7.0], "`UnitsReply`"), (["LaterKind"], "LaterKind")],
)
def test_a_message_that_a_server_has_no_use_for_ends_the_run_by_name(row, words):
    """It is never dropped: a later version may mean something by it."""
    losses = []
    watch = ServerWatch(
        ["a", "b"],
        fail=losses.append,
        ask=print,
        end=pytest.fail,
        is_idle=lambda: True,
        grace_s=1.0,
        framework=PLAIN,
    )
    watch.received(0, msgspec.msgpack.encode([row]))

    with pytest.raises(WorkerLostError, match=rf"Rank 0 on a was lost: it sent .*{words}"):
        watch.check()
    assert len(losses) == 1
