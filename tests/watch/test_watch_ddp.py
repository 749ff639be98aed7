"""Scripts under a watch: the same losses, and who is waited for."""

import os
import signal

import pytest

from .runs import SCRIPT, TORCHRUN, begun, events, losses, plain, said, torchrun, watched

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


def waiting(run_dir):
    """Parts of each rank's time that are waiting, in all steps together."""
    accounts = events(run_dir, "StepsAccounted")
    wall_s = sum(sum(account["wall_s"]) for account in accounts)
    each_s = zip(*(account["waiting_s"] for account in accounts), strict=True)
    return [sum(waited_s) / wall_s for waited_s in each_s]


@pytest.mark.alone
def test_a_slow_rank_is_named_and_no_loss_changes(tmp_path):
    """DDP: rank 1's forward takes six times as long, so that rank 0 waits for it."""
    alone = plain("ddp", SLOW="1")
    done = watched(torchrun("ddp"), run_dir=tmp_path, every=1, SLOW="1")

    assert losses(done) == alone
    (verdict,) = (line for line in said(done) if " steps, " in line)
    assert "for rank 1 (" in verdict
    assert "because of compute" in verdict
    assert any(line.startswith("step ") for line in said(done))
    assert [event["world_size"] for event in events(tmp_path, "RunStarted")] == [2]
    assert events(tmp_path, "StepMeasured")[-1]["batch_size"] == [8, 8]
    assert len(events(tmp_path, "RunEnded")) == 1
    of_rank_0, of_rank_1 = waiting(tmp_path)
    assert 0.3 < of_rank_0 < 0.48
    assert of_rank_1 < 0.1


def test_micro_batches_are_one_step(tmp_path):
    """`no_sync` on two of three: the steps are those of the optimizer, and losses are the same."""
    env = {"SLOW": "1", "STEPS": "72", "SLEEP_S": "0.03"}
    alone = plain("accumulating", **env)
    done = watched(torchrun("accumulating"), run_dir=tmp_path, **env)

    assert losses(done) == alone
    assert "for rank 1 (" in said(done)[0]
    measured = events(tmp_path, "StepMeasured")
    assert {tuple(event["batch_size"]) for event in measured} == {(24, 24)}
    assert measured[-1]["step"] == 72 // 3 - 2


def test_a_loop_without_a_loader(tmp_path):
    """The next batch is drawn before the backward, and one rank evaluates: a step is a step."""
    env = {"SLOW": "1", "STEPS": "40"}
    alone = plain("hand_made", **env)
    done = watched(torchrun("hand_made"), run_dir=tmp_path, **env)

    assert losses(done) == alone
    assert "for rank 1 (" in said(done)[0]
    assert "because of compute" in said(done)[0]
    accounts = events(tmp_path, "StepsAccounted")
    assert sum(account["evaluation_s"][0] for account in accounts) > 0
    assert sum(account["evaluation_s"][1] for account in accounts) == 0


def test_buffers_evaluation_and_checkpoint(tmp_path):
    """The wait for DDP's broadcast of buffers is no computing, and an evaluation is none either."""
    alone = plain("norms", SLOW="1")
    done = watched(torchrun("norms"), run_dir=tmp_path, SLOW="1")

    assert losses(done) == alone
    assert "for rank 1 (" in said(done)[0]
    accounts = events(tmp_path, "StepsAccounted")
    assert sum(account["evaluation_s"][0] for account in accounts) > 0
    assert sum(account["checkpoint_s"][0] for account in accounts) > 0
    assert sum(account["checkpoint_s"][1] for account in accounts) == 0


SAVES = """
import sys, time
import torch.distributed.checkpoint as dcp  # as at the top of a script: before the group opens
from safetensors.torch import save_file as save
from torch import distributed, nn, ones, optim

class Planner(dcp.DefaultSavePlanner):
    def finish_plan(self, *given):
        time.sleep(0.2)
        return super().finish_plan(*given)

class Weights(dict):
    def items(self):
        time.sleep(0.2)
        return super().items()

distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer, folder = optim.SGD(model.parameters()), sys.argv[1]
for _ in range(4):
    model(ones(2, 4)).mean().backward()
    optimizer.step()
    if distributed.get_rank() == 0:
        dcp.save(model.state_dict(), checkpoint_id=folder, planner=Planner(), no_dist=True)
    else:
        save(Weights(model.state_dict()), folder + ".safetensors")
distributed.destroy_process_group()
"""


def test_saving_is_heard_by_whatever_name_the_script_has_it(tmp_path):
    """Of what was imported before: rank 0 saves by `dcp.save`, rank 1 by `save_file`."""
    (tmp_path / "saves.py").write_text(SAVES, encoding="utf-8")
    command = [*TORCHRUN, "2", tmp_path / "saves.py", tmp_path / "saved"]
    done = watched(command, run_dir=tmp_path / "run")
    accounts = events(tmp_path / "run", "StepsAccounted")
    of_rank_0, of_rank_1 = zip(*(account["checkpoint_s"] for account in accounts), strict=True)

    assert done.returncode == 0, done.stderr
    assert min(sum(of_rank_0), sum(of_rank_1)) > 3 * 0.2


@pytest.mark.alone
def test_waits_in_collectives_of_the_script_are_waits(tmp_path):
    """An `all_reduce` for the log, and a barrier: rank 0 waits there, and does nothing itself."""
    alone = plain("reporting", SLOW="1")
    done = watched(torchrun("reporting"), run_dir=tmp_path, SLOW="1")

    assert losses(done) == alone
    assert "for rank 1 (" in said(done)[0]
    assert "what the loop does there alone, such as logging" in said(done)[0]
    of_rank_0, of_rank_1 = waiting(tmp_path)
    assert 0.3 < of_rank_0 < 0.48
    assert of_rank_1 < 0.1


def test_workers_of_loaders_say_nothing():
    """They never open a process group: nothing of theirs is told, and nothing of them fails."""
    done = watched(torchrun("workers"))

    assert losses(done) == plain("ddp")  # which reads the same samples itself
    assert len(said(done)) >= 1
    assert "off" not in done.stderr
    assert "nothing to wait for" not in done.stderr


def test_spawned_processes_are_watched():
    """`torch.multiprocessing.spawn` starts fresh interpreters: the environment reaches them."""
    done = watched([SCRIPT, "spawn"], SLOW="0")

    assert losses(done) == plain("ddp", SLOW="0")
    assert "for rank 0 (" in said(done)[0]


def test_a_file_that_cannot_be_written_is_a_line_and_nothing_more(tmp_path):
    """The watch goes on without it, and the losses are the same."""
    (tmp_path / "file").write_text("in the way")
    alone = plain("ddp", STEPS="60")
    done = watched(torchrun("ddp"), run_dir=tmp_path / "file", every=1, STEPS="60")
    lines = said(done)

    assert losses(done) == alone
    assert sum(line.startswith("no more events are written to") for line in lines) == 1
    assert not any(line.startswith("off on rank") for line in lines)


def test_inputs_that_cannot_be_read_switch_it_off():
    """On each rank with one line, in the middle of the run; the losses are the same.

    Both say it at the same moment, and unbuffered: their lines are not mixed.
    """
    done = watched(torchrun("odd_inputs"), PYTHONUNBUFFERED="1")
    off = sorted(line for line in said(done) if line.startswith("off on rank"))

    assert losses(done) == plain("odd_inputs")
    assert [line.partition(",")[0] for line in off] == ["off on rank 0", "off on rank 1"]
    assert all("odd inputs" in line for line in off)


def test_an_error_of_the_users_comes_with_the_summary():
    """The script fails: its error is told as ever, its status stays, and the summary is there."""
    done = watched(torchrun("fails"), SLOW="1")

    assert done.returncode == 1
    assert "RuntimeError: of the user's" in done.stderr
    assert any("for rank 1 (" in line for line in said(done))


def test_ctrl_c_ends_with_the_summary():
    """All processes get it, as from a terminal, once the first line is there."""
    process, keyboard = begun(torchrun("ddp"), SLOW="1", STEPS="100000")
    assert any("evenstep watch: step " in line for line in process.stderr)

    os.killpg(process.pid, signal.SIGINT)
    lines = process.communicate(timeout=90)[1].splitlines()
    os.close(keyboard)

    assert process.returncode != 0
    assert any(" steps, " in line and "for rank 1 (" in line for line in lines)


ENDS_OPEN = """
import atexit, sys, threading  # before torch is loaded: called after the watch's

def left():
    names = [one.name for one in threading.enumerate() if "evenstep" in one.name]
    sys.stdout.write(f"LEFT {names}\\n")  # at once: both ranks have the one pipe

atexit.register(left)
import torch
from torch import distributed, nn

distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
for _ in range(5):
    model(torch.ones(2, 4)).mean().backward()
"""


def test_no_thread_of_the_watch_outlives_its_end(tmp_path):
    """Where the group stays open: Python would end a thread in the middle of torch, and abort."""
    script = tmp_path / "ends_open.py"
    script.write_text(ENDS_OPEN, encoding="utf-8")
    done = watched([*TORCHRUN, "2", script])

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("LEFT []") == 2


TWO_OF_A_KIND = """
import sys, time

from torch import distributed, nn, no_grad, ones, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

distributed.init_process_group("gloo")
data = TensorDataset(ones(384, 4))
model = DDP(nn.Linear(4, 4))
if "critic" in sys.argv:
    critic = DDP(nn.Linear(4, 4))
optimizer = optim.SGD(model.parameters())
train_loader = DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(range(320)))
val_loader = DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(range(320, 384)))
with no_grad():
    next(iter(val_loader))
unlabelled = DataLoader(data, batch_size=8) if "unlabelled" in sys.argv else iter(lambda: None, 0)
for (inputs,), _ in zip(train_loader, unlabelled):
    outputs = model(inputs)
    time.sleep(0.06 if distributed.get_rank() else 0.01)
    outputs.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
"""


def test_of_two_loaders_over_one_data_set_the_one_that_trains_is_prepared(tmp_path):
    """The other is made later, and read first, in an evaluation."""
    script = tmp_path / "two.py"
    script.write_text(TWO_OF_A_KIND, encoding="utf-8")
    done = watched([*TORCHRUN, "2", script])

    assert f"the change, for `git apply` in {tmp_path}:" in done.stderr
    assert "+model, train_loader = balancer.prepare(model, train_loader)" in done.stderr


def test_of_two_models_none_is_prepared_alone(tmp_path):
    """Both lines are named, and there is no diff."""
    script = tmp_path / "two.py"
    script.write_text(TWO_OF_A_KIND, encoding="utf-8")
    done = watched([*TORCHRUN, "2", script, "critic"])

    lines = [n for n, text in enumerate(TWO_OF_A_KIND.splitlines(), 1) if "DDP(" in text]
    at = ", ".join(f"{script}:{line}" for line in lines)
    assert f"after all models that train ({at}) and the loader" in done.stderr
    assert "git apply" not in done.stderr


def test_of_two_loaders_that_a_step_reads_none_is_prepared_alone(tmp_path):
    """Batches of the other would be weighted as if they were shared out in the same way."""
    script = tmp_path / "two.py"
    script.write_text(TWO_OF_A_KIND, encoding="utf-8")
    done = watched([*TORCHRUN, "2", script, "unlabelled"])

    text = TWO_OF_A_KIND.splitlines()
    lines = [next(n for n, line in enumerate(text, 1) if line.startswith("unlabelled"))]
    lines += [next(n for n, line in enumerate(text, 1) if line.startswith("train_loader"))]
    at = " or ".join(f"{script}:{line}" for line in lines)
    assert f"the loader that trains ({at})" in done.stderr
    assert "git apply" not in done.stderr
