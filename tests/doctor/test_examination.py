"""Ranks that meet at a store: what they find, who does not answer, and how each of them ends."""

import json
import socket
import sys
import threading
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist

from evenstep._doctor import judge
from evenstep.doctor._examination import (
    Patience,
    StageLine,
    StoreChannel,
    examine,
    open_desk,
)

from .facts import rank

HASTY = Patience(arrive_s=1.0, links_s=20.0, turn_s=3.0, timing_s=0.05, steps_s=10.0)


@pytest.fixture(autouse=True)
def as_started_by_hand(monkeypatch):
    """No variable of torchrun's, and threads as they were."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick_step(tmp_path, monkeypatch):
    """A step of one's own that takes no time, so that tests are about the rest."""
    (tmp_path / "quick.py").write_text("def step(n):\n    pass\n")
    (tmp_path / "broken.py").write_text("def step(n):\n    raise KeyError('weights')\n")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    return "quick.py:step"


def quiet():
    return StageLine(False)


def run(num_present, world_size, step):
    """What rank 0 finds, and the errors of the others; each rank is a thread at one store."""
    store, errors = dist.HashStore(), {}

    def other(rank):
        try:
            examine(StoreChannel(store, rank, world_size), quiet(), step=step, patience=HASTY)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=other, args=(rank,)) for rank in range(1, num_present)]
    for thread in threads:
        thread.start()
    found = examine(StoreChannel(store, 0, world_size), quiet(), step=step, patience=HASTY)
    for thread in threads:
        thread.join()
    return found, errors


def test_two_ranks_find_each_other(quick_step):
    """Facts, the link between them both ways, and times of both."""
    found, errors = run(2, 2, quick_step)

    assert errors == {}
    assert [facts.rank for facts in found.ranks] == [0, 1]
    assert sorted((link.receiver, link.sender) for link in found.links) == [(0, 1), (1, 0)]
    assert all(link.error == "" for link in found.links)
    assert [pace.rank for pace in found.paces] == [0, 1]
    assert found.global_batch_size == 64


def test_a_rank_alone_needs_no_others(quick_step):
    """No store, no link; its facts and times."""
    found = examine(
        open_desk({}, timeout_s=1.0),
        quiet(),
        step=quick_step,
        global_batch_size=6,
        patience=HASTY,
    )

    assert (found.world_size, found.links, found.missing) == (1, (), ())
    assert set(found.paces[0].sizes) == {1, 6}


def test_a_rank_that_does_not_come_is_named(quick_step):
    """The others are looked at all the same."""
    found, errors = run(2, 3, quick_step)

    assert (found.missing, errors) == ((2,), {})
    assert len(found.links) == 2
    assert [each.ranks for each in judge(found) if each.ailment == "rank-missing"] == [(2,)]


def test_ranks_of_unlike_versions_are_named(quick_step):
    """Also where a newer one says more than this one knows, or something else altogether."""
    store = dist.HashStore()
    newer = asdict(rank(1, "b", versions={"evenstep": "9.0", "torch": "3.0"})) | {"mood": "good"}
    StoreChannel(store, 1, 3).leave("facts", json.dumps(newer))
    StoreChannel(store, 2, 3).leave("facts", json.dumps({"rank": 2}))
    short = Patience(arrive_s=5.0, turn_s=0.1, timing_s=0.05, steps_s=0.1)
    found = examine(StoreChannel(store, 0, 3), quiet(), step=quick_step, patience=short)
    by_name = {each.ailment: each for each in judge(found)}

    assert found.missing == (2,)
    assert "9.0 on rank 1" in " ".join(e.evidence for e in judge(found))
    assert "versions-differ" in by_name


def test_a_rank_that_stops_answering_is_named(quick_step):
    """It told its facts, and neither measures nor times."""
    half = Patience(arrive_s=5.0, turn_s=0.5, timing_s=0.05, steps_s=0.5)

    def leave_facts(store):
        desk = StoreChannel(store, 2, 3)
        assert desk.wait("token", 5.0)
        facts = json.loads(desk.fetch("facts", [1], 5.0)[1])
        facts |= {"rank": 2, "machine": "elsewhere", "host": "elsewhere"}
        desk.leave("facts", json.dumps(facts))

    store = dist.HashStore()
    results = {}

    def take_part(number):
        desk = StoreChannel(store, number, 3)
        results[number] = examine(desk, quiet(), step=quick_step, patience=half)

    threads = [threading.Thread(target=take_part, args=(number,)) for number in (0, 1)]
    leader = threading.Thread(target=leave_facts, args=(store,))
    for thread in (*threads, leader):
        thread.start()
    for thread in (*threads, leader):
        thread.join()
    found = results[0]
    silent = [link for link in found.links if link.receiver == 2]
    (pace,) = (pace for pace in found.paces if pace.rank == 2)

    assert [link.error for link in silent] == ["it stopped answering"]
    assert "no times 0.5 s after" in pace.error
    assert {pace.rank for pace in found.paces if pace.seconds} == {0, 1}


def test_links_that_take_too_long_are_left_out(quick_step):
    """After half as long again as they may take, and they are counted."""
    store, found = dist.HashStore(), {}
    hurried = replace(HASTY, links_s=0.0)

    def take_part(number):
        desk = StoreChannel(store, number, 2)
        found[number] = examine(desk, quiet(), step=quick_step, patience=hurried)

    threads = [threading.Thread(target=take_part, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (found[0].links, found[0].skipped_pairs) == ((), 1)
    assert len(found[0].paces) == 2


def test_a_step_that_fails_is_told_of_each_rank(quick_step):
    """With its error, and nothing else goes wrong for it."""
    found, errors = run(2, 2, "broken.py:step")

    assert errors == {}
    assert [pace.error for pace in found.paces] == ["KeyError: 'weights'"] * 2


def test_without_rank_0_the_others_end():
    """In a bounded time, saying so."""
    desk = StoreChannel(dist.HashStore(), 1, 2)
    with pytest.raises(RuntimeError, match=r"Rank 0 was not heard within 0\.1 s"):
        examine(desk, quiet(), patience=replace(HASTY, arrive_s=0.1))


def test_one_that_comes_too_late_is_told_so():
    """The others began without it."""
    store = dist.HashStore()
    leader = StoreChannel(store, 0, 2)
    leader.leave("token", "0" * 32)
    orders = {"ranks": [0], "addresses": {}, "turns": [], "sizes": [1, 2]}
    leader.leave("orders", json.dumps(orders))
    with pytest.raises(RuntimeError, match="Rank 1 came too late"):
        examine(StoreChannel(store, 1, 2), quiet(), patience=HASTY)


def test_what_is_left_is_found_and_waiting_is_bounded():
    """By a clock that the test holds; ranks that left nothing are missing in the answer."""
    now_s = 0.0

    def sleep(seconds):
        nonlocal now_s
        now_s += seconds

    store = dist.HashStore()
    desk = StoreChannel(store, 0, 3, clock=lambda: now_s, sleep=sleep)
    StoreChannel(store, 2, 3).leave("topic", "said")

    waited = []
    found = desk.fetch("topic", range(3), 5.0, meanwhile=lambda: waited.append(now_s))

    assert found == {2: "said"}
    assert 5.0 <= now_s < 5.1
    assert len(waited) > 100
    assert desk.wait("topic", 0.0) is None


def test_an_environment_without_the_rest_is_refused():
    """RANK alone is no way to meet."""
    with pytest.raises(ValueError, match=r"MASTER_ADDR.*torchrun --nproc-per-node 2"):
        open_desk({"RANK": "0", "WORLD_SIZE": "2"}, timeout_s=1.0)


def test_ranks_meet_without_an_agent():
    """As SLURM starts them: rank 0 holds the store, and does not wait for those who never come."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first = open_desk({**env, "RANK": "0"}, timeout_s=5.0)
    second = open_desk({**env, "RANK": "1"}, timeout_s=5.0)
    second.leave("topic", "here")

    assert first.fetch("topic", [1, 2], 0.2) == {1: "here"}
