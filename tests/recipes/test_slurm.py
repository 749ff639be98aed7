"""The batch scripts of docs/recipes/slurm.md, through stand-ins for SLURM's commands."""

from __future__ import annotations

import re

import pytest

from .._snippets import ROOT, blocks
from .slurm_commands import hostnames
from .started import Slurm, directives, write_script

SCRIPTS = dict(
    zip(
        ("one task for each rank", "nodes of different kinds", "torchrun"),
        blocks(ROOT / "docs" / "recipes" / "slurm.md", "bash"),
        strict=True,
    )
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_directives_are_those_of_sbatch(name):
    """Every group asks for nodes, tasks, cards and cores; a job that is requeued has a notice."""
    groups = directives(SCRIPTS[name])

    assert len(groups) == (2 if "different" in name else 1)
    assert groups[0].signal == "TERM@180"
    assert groups[0].requeue
    assert all(group.ntasks_per_node in (1, int(group.gres.rpartition(":")[2])) for group in groups)


def test_lists_of_nodes_are_read_as_slurm_writes_them():
    """The stand-in for `scontrol show hostnames`."""
    assert list(hostnames("a,n[1-2,7],b[03]")) == ["a", "n1", "n2", "n7", "b3"]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_job_is_told_to_stop_and_comes_back(name, tmp_path):
    """SIGTERM to the tasks: saved, back in the queue, continued there, and finished."""
    slurm = Slurm(tmp_path)
    write_script(tmp_path, steps=100_000)
    with slurm.submit(SCRIPTS[name]) as first:
        first.wait_for("saved step 20\n")
        slurm.notify()
        code = first.wait()
    saved = int(re.findall(r"saved step (\d+)\n", first.text)[-1])
    assert code == (1 if name == "torchrun" else 75), first.text
    assert slurm.requeued, first.text

    write_script(tmp_path, steps=saved + 7)
    with slurm.submit(SCRIPTS[name], restarts=1) as second:
        assert second.wait() == 0, second.text

    assert "begins at step 0\n" in first.text
    assert f"begins at step {saved}\n" in second.text
    assert f"saved step {saved + 7}\n" in second.text
    assert not slurm.requeued


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_mistake_in_the_script_is_tried_again_under_torchrun_alone(name, tmp_path):
    """Its exit code is not 75; torchrun hides that of its workers, and 20 times is the end."""
    slurm = Slurm(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    requeued = []
    for restarts in (0, 20):
        with slurm.submit(SCRIPTS[name], restarts=restarts) as job:
            job.wait()
        requeued.append(slurm.requeued)

    assert requeued == [name == "torchrun", False]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python -m evenstep.doctor --out doctor.json", "evenstep doctor: 3 ranks on 1 host"),
        ("python -m evenstep.watch train.py", "evenstep watch: "),
    ],
    ids=["doctor", "watch"],
)
def test_a_checkup_and_a_watch_start_in_the_same_job(command, said, tmp_path):
    """In the place of the training, as the page says."""
    assert command in (ROOT / "docs" / "recipes" / "slurm.md").read_text("utf-8")
    slurm = Slurm(tmp_path)
    plain = (ROOT / "examples" / "plain.py").read_text("utf-8")
    (tmp_path / "train.py").write_text(plain.replace("range(5)", "range(1)"))
    script = SCRIPTS["nodes of different kinds"].replace("python train.py", command)
    with slurm.submit(script) as job:
        assert job.wait() == 0, job.text

    assert said in job.text
