"""Changes of links, and torchrun over the hosts of a lab."""

import math
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from evenstep.lab import Change, Host, Lab, drawn_trace
from evenstep.lab._lab import playing, run_agents, undisturbed

from .remains import left_of


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"at_s": -1.0, "mbit": 5}, "at least 0"),
        ({"at_s": math.inf, "mbit": 5}, "finite"),
        ({"at_s": 0.0}, "one at least"),
        ({"at_s": 0.0, "mbit": 0}, "from 0.1 to 10000"),
    ],
)
def test_a_change_that_cannot_be_is_refused(wrong, words):
    """Where it is made, not where it would be carried out."""
    with pytest.raises(ValueError, match=words):
        Change(host=0, **wrong)


def test_drawn_rates_are_even_in_their_bounds_and_the_seed_s():
    """Redrawn every 20 s for every host; the same seed gives the same trace."""
    trace = drawn_trace(4, 4000.0, seed=3)
    rates = np.array([change.mbit.up_mbit for change in trace])

    assert trace == drawn_trace(4, 4000.0, seed=3)
    assert trace != drawn_trace(4, 4000.0, seed=4)
    assert [change.at_s for change in trace[::4]] == [20.0 * i for i in range(200)]
    assert [change.host for change in trace] == [0, 1, 2, 3] * 200
    assert all(change.mbit.up_mbit == change.mbit.down_mbit for change in trace)
    assert 20 <= rates.min() < 21
    assert 154 < rates.max() <= 155
    assert rates.mean() == pytest.approx(87.5, abs=4)  # 3 of its standard deviations


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hosts": 0},
        {"duration_s": 0.0},
        {"every_s": math.inf},
        {"least_mbit": 0.0},
        {"least_mbit": 200.0},
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong):
    """With the argument's name."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        drawn_trace(**{"num_hosts": 2, "duration_s": 60.0, "seed": 0} | wrong)


class Written:
    """Stands where a lab does, and writes down what it is told."""

    def __init__(self, fail_on=None, num_told=None):
        self.told, self.fail_on, self.enough = [], fail_on, threading.Event()
        self.num_told = num_told

    def set_mbit(self, host, mbit):
        if host == self.fail_on:
            self.enough.set()
            raise OSError("the link is gone")
        self.note(host, "mbit", mbit.up_mbit)

    def set_cpus(self, host, cpus):
        self.note(host, "cpus", cpus)

    def note(self, *told):
        self.told.append(told)
        if len(self.told) == self.num_told:
            self.enough.set()


def test_a_trace_is_carried_out_in_the_order_of_its_times():
    """What it has at 0 before anything else goes on, the rest while it does."""
    lab = Written(num_told=4)
    trace = [Change(0.02, 0, cpus=0.6), Change(0, 1, mbit=5, cpus=0.3), Change(0.01, 0, mbit=7)]
    with playing(lab, trace):
        first = lab.told[:2]
        assert lab.enough.wait(30)

    assert first == [(1, "mbit", 5.0), (1, "cpus", 0.3)]
    assert lab.told[2:] == [(0, "mbit", 7.0), (0, "cpus", 0.6)]


def test_a_trace_ends_with_what_it_accompanies():
    """Nothing is changed afterwards, and nobody waits for the rest of it."""
    lab = Written()
    with playing(lab, [Change(3600, 0, mbit=5)]):
        pass

    assert lab.told == []
    assert not [each for each in threading.enumerate() if each.name.startswith("evenstep-lab")]


def test_a_change_that_fails_is_not_kept_quiet():
    """Raised at the end, or added to the error that ended it."""
    trace = [Change(0.001, 0, mbit=5)]

    def play(then):
        lab = Written(fail_on=0)
        with playing(lab, trace):
            assert lab.enough.wait(30)
            then()

    with pytest.raises(OSError, match="the link is gone"):
        play(lambda: None)
    with pytest.raises(ZeroDivisionError) as caught:
        play(lambda: 1 / 0)
    assert "the link is gone" in caught.value.__notes__[0]


ADDRESSES = ["10.77.0.1", "10.77.0.2", "10.77.0.3"]

SCRIPT = """
import os, socket, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(total)
names = [None] * dist.get_world_size()
dist.all_gather_object(names, socket.gethostname())
print("sum", total[0].item(), "rank", dist.get_rank(), "of", *names, *sys.argv[1:])
dist.destroy_process_group()
"""


def stand_in(*scripts):
    """Starts, where torchrun's agent would be, a script per host; and what it was asked for."""
    asked, processes = [], []

    def start(host, words):
        asked.append(words)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen([sys.executable, "-S", "-c", scripts[host]], **pipes)
        processes.append(process)
        return process

    return start, asked, processes


def test_every_agent_is_told_where_to_meet_and_who_it_is():
    """Rank and host are the same number; the script's own words come last."""
    start, asked, _ = stand_in("print('a')", "print('b\\nc')", "print('d')")
    lines = []
    code = run_agents(start, ADDRESSES, ["train.py", "--nnodes=7"], lines.append)

    assert code == 0
    assert sorted(lines) == ["[h0] a", "[h1] b", "[h1] c", "[h2] d"]
    for host, words in enumerate(asked):
        assert {f"--node-rank={host}", "--nnodes=3", "--master-addr=10.77.0.1"} <= set(words)
        assert f"--local-addr={ADDRESSES[host]}" in words
        assert words[-2:] == ["train.py", "--nnodes=7"]


def test_the_first_failure_counts_and_ends_the_others():
    """Those that would wait for ever are ended, after time to end by themselves."""
    started = "print('up', flush=True); "
    start, _, processes = stand_in(
        started + "import time; time.sleep(600)",
        started + "raise SystemExit(3)",
    )
    lines = []
    code = run_agents(start, ADDRESSES[:2], ["x.py"], lines.append, grace_s=0.1)

    assert code == 3
    assert processes[0].returncode == -15
    assert {"[h0] up", "[h1] up"} <= set(lines)


def test_later_failures_are_of_the_first(tmp_path):
    """They tell what the first one did to them; its code is the one that says something."""
    gone = tmp_path / "gone"
    start, _, _ = stand_in(
        f"open({str(gone)!r}, 'w').close(); raise SystemExit(3)",
        f"import os, time\nwhile not os.path.exists({str(gone)!r}): time.sleep(0.01)\n"
        "time.sleep(0.2); raise SystemExit(4)",
    )

    assert run_agents(start, ADDRESSES[:2], ["x.py"], print) == 3


def test_a_listener_that_fails_ends_the_run():
    """A closed pipe, say: raised, rather than agents that wait for one to be emptied."""
    start, _, processes = stand_in("while True: print('x' * 999, flush=True)")

    def refuse(line):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_agents(start, ADDRESSES[:1], ["x.py"], refuse)
    assert processes[0].returncode is not None


def test_a_signal_counts_as_in_a_shell():
    """128 and its number."""
    start, _, _ = stand_in("import os; os.kill(os.getpid(), 9)")

    assert run_agents(start, ADDRESSES[:1], ["x.py"], print) == 137


def test_an_interrupt_leaves_no_agent():
    """Nor a thread that listens to one."""
    threads = set(threading.enumerate())
    start, _, processes = stand_in("import time; time.sleep(600)")

    def interrupted(host, words):
        if host == 1:
            raise KeyboardInterrupt
        return start(host, words)

    with pytest.raises(KeyboardInterrupt):
        run_agents(interrupted, ADDRESSES[:2], ["x.py"], lambda line: None)

    assert [process.returncode for process in processes] == [-15]
    assert not set(threading.enumerate()) - threads


@pytest.fixture
def interruptible():
    """Python's own handler of Ctrl-C, which a process in the background begins without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_signals_wait_for_what_must_not_be_left_half_done():
    """Raised at the end, and once; handlers are as they were. One without a handler is not kept."""
    done, before = [], signal.getsignal(signal.SIGINT)

    def work():
        with undisturbed(), undisturbed():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            done.append(1)
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.usefixtures("a_lab_can_be_made")
def test_three_hosts_sum_over_gloo(tmp_path):
    """Real torchrun, real links, a trace besides; bytes went over the links; nothing is left."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    lines = []
    trace = [Change(0, 1, mbit=40)]
    with Lab([Host(mbit=100, cpus=1.5), Host(mbit=100), Host()]) as lab:
        command = [str(tmp_path / "script.py"), "--word"]
        code = lab.torchrun(command, trace=trace, write=lines.append)
        traffic = [lab.interface_bytes(host) for host in range(3)]
        rate = lab.hosts[1].mbit
        run_id = lab.run_id

    assert code == 0, "\n".join(lines)
    assert sorted(line for line in lines if " sum " in line) == [
        f"[h{host}] sum 6.0 rank {host} of lab-h0 lab-h1 lab-h2 --word" for host in range(3)
    ]
    assert all(min(each) > 4000 for each in traffic)  # the tensor at the least
    assert rate.up_mbit == 40
    assert left_of(run_id) == []
