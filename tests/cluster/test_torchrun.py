"""Under torchrun: workers killed, agents killed and added, a notice to stop."""

from __future__ import annotations

import os
import signal

import pytest

from .elastic_agents import Agent, Progress, change_worlds, compare, ended, kill_in_turn

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """What an undisturbed run of 40 steps ends with, on one worker."""
    folder = tmp_path_factory.mktemp("calm")
    agent = Agent(folder, steps=40, launch=["--standalone", "--nproc-per-node=1"])
    with ended(agent):
        assert agent.wait(120) == 0, agent.tail()
    return folder


def one_agent(num_workers, max_restarts):
    return [
        "--standalone",
        f"--nproc-per-node={num_workers}",
        f"--max-restarts={max_restarts}",
        "--monitor-interval=0.1",
    ]


def test_killed_workers_leave_no_trace_in_the_parameters(tmp_path, calm):
    """After two kill -9: the parameters of the undisturbed run, and each sample counted once."""
    agent = Agent(tmp_path, steps=40, launch=one_agent(3, 3), pause_s=0.02)
    with ended(agent):
        done_twice = kill_in_turn(tmp_path, agent, num_kills=2, seed=5)
        assert agent.wait(60) == 0, agent.tail()
    found = compare(tmp_path, calm)

    assert found["difference"] <= 1e-9
    assert found["same_samples"]
    assert found["each_once"]
    assert all(num_steps <= 7 + 1 for num_steps in done_twice)


def test_the_world_shrinks_and_grows(tmp_path, calm):
    """From 2 agents to 1 and to 3, each with a worker: the same parameters still."""
    worlds = change_worlds(tmp_path, steps=40, sizes=(2, 1, 3), pause_s=0.2)
    found = compare(tmp_path, calm)

    assert worlds == [2, 1, 3]
    assert found["difference"] <= 1e-9
    assert found["same_samples"]
    assert found["each_once"]


def test_a_notice_to_stop_ends_in_a_checkpoint(tmp_path, calm):
    """SIGTERM to one worker, then to torchrun itself: saved, left, and gone on from there."""
    progress, stopped = Progress(tmp_path), [0]
    for told in ("worker", "agent"):
        agent = Agent(tmp_path, steps=40, launch=one_agent(2, 0), pause_s=0.05)
        with ended(agent):
            wanted = stopped[-1] + 5
            progress.wait_for(lambda lines, wanted=wanted: progress.newest_step() >= wanted, agent)
            pid = progress.starts()[-1]["pids"][1][0] if told == "worker" else agent.process.pid
            os.kill(pid, signal.SIGTERM)
            code = agent.wait(60)
        assert (code == 0) == (told == "worker"), agent.tail()  # torchrun says that it had a signal
        progress.read()
        stopped.append(progress.newest_step())
        assert wanted < stopped[-1] < 40

    agent = Agent(tmp_path, steps=40, launch=one_agent(2, 0))
    with ended(agent):
        assert agent.wait(60) == 0, agent.tail()
    progress.read()
    assert [start["started"] for start in progress.starts()] == stopped
    assert compare(tmp_path, calm)["difference"] <= 1e-9
