"""Ray Train on a local cluster: `python -m tests.cluster.ray_runs KIND FOLDER`.

Runs one kind of training and writes what it found as JSON into the folder. A process of its own,
so that nothing of Ray is left in another one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes" / "ray.md"
EXAMPLE = "ray/train/examples/pytorch/torch_fashion_mnist_example.py"
STORE_BYTES = 100 * 2**20
STEPS, KILL_AT, WORLDS = 40, 8, {18: 3, 28: 2}


def run(kind: str, folder: Path, *, timeout_s: float = 500) -> dict[str, Any]:
    """Run a kind of training in a process of its own, and return what it found.

    Args:
        kind: "steady" or "elastic", the functions of these names.
        folder: for all traces, which every worker shares.
        timeout_s: seconds after which it is ended, with all that it started.

    Raises:
        RuntimeError: it failed, or took too long; with the end of what it said.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "PYTHONWARNINGS": "ignore",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process more for each worker group
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "3",  # for a number of workers that is too large
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    log = folder / f"{kind}.log"
    command = [sys.executable, "-m", "tests.cluster.ray_runs", kind, str(folder)]
    with log.open("w") as said:
        started = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True
        )
    try:
        code = started.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
        started.terminate()
        started.wait(20)
    finally:
        started.kill()  # the cluster ends with it
    if code != 0:
        raise RuntimeError(f"{kind} ended with {code}:\n{log.read_text(errors='replace')[-6000:]}")
    found: dict[str, Any] = json.loads((folder / f"{kind}.json").read_text())
    return found


@contextmanager
def local_cluster(*, num_cpus: int) -> Iterator[Any]:
    """Yield a cluster of one small node, to which others can be added, and connect to it."""
    import ray
    from ray.cluster_utils import Cluster

    folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(dir="/tmp")  # short, for sockets in it
    (Path(folder) / "ray").mkdir()  # which the first node of a cluster takes for granted
    head = {"num_cpus": num_cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, log_to_driver=True)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of the recipe's page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.M)


def changed_example(folder: Path) -> tuple[str, list[str]]:
    """Return the installed example with the page's diff applied, and the lines that it adds."""
    import ray

    (diff,) = (block for block in blocks("diff") if EXAMPLE in block)
    copy = folder / EXAMPLE
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(ray.__file__).parents[1] / EXAMPLE, copy)
    command = ["git", "apply", "-p0", "--unidiff-zero", "-"]
    environment = os.environ | {"GIT_DIR": "/nonexistent"}
    subprocess.run(command, cwd=folder, input=diff, text=True, check=True, env=environment)
    lines = [line[1:].strip() for line in diff.splitlines() if re.match(r"[+-](?![+-]{2})", line)]
    return copy.read_text(), lines


def steady(folder: Path) -> dict[str, Any]:
    """Run all that keeps its workers, in one cluster of three CPUs."""
    with local_cluster(num_cpus=3):
        found = published(folder)
        return found | {"said": said_by_page(folder), "rows": rows_of_ray_data(folder)}


def published(folder: Path) -> dict[str, Any]:
    """Train the published example on three workers of speeds 1 : 2 : 4."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from . import ray_script as script

    source, lines = changed_example(folder)
    config = {"source": source, "folder": str(folder), "slopes_s": [0.006, 0.003, 0.0015]}
    config |= {"lr": 0.01, "epochs": 2, "batch_size_per_worker": 14}
    TorchTrainer(
        script.published,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(storage_path=str(folder / "storage")),
    ).fit()
    return {"lines": lines} | _compared(folder)


def _compared(folder: Path) -> dict[str, Any]:
    """Return how far three workers are from one process, and their sizes."""
    import torch

    kept = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(3)]
    alone = _trained_alone(kept[0]["begun"])
    off = max(
        float((one["ended"][name] - value).norm() / value.norm())
        for one in kept
        for name, value in alone.items()
    )
    sizes = [list(step) for step in zip(*(one["sizes"] for one in kept), strict=True)]
    return {"difference": off, "sizes": sizes}


def _trained_alone(state: dict[str, Any]) -> dict[str, Any]:
    """Return what one process ends with, given the global batches of the published example."""
    import torch
    from torch import nn

    from .ray_script import NUM_PICTURES, pictures

    layers = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Identity(), nn.Linear(512, 512))
    layers.extend([nn.ReLU(), nn.Identity(), nn.Linear(512, 10), nn.ReLU()])
    model = nn.ModuleDict({"linear_relu_stack": layers}).double()
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = pictures(NUM_PICTURES)
    for epoch in range(2):  # a `DistributedSampler` draws by the epoch's number
        order = torch.randperm(NUM_PICTURES, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(42):
            x, y = data[batch]
            optimizer.zero_grad()
            nn.functional.cross_entropy(layers(x.flatten(1)), y).backward()
            optimizer.step()
    ended: dict[str, Any] = model.state_dict()
    return ended


def elastic(folder: Path) -> dict[str, Any]:
    """Train on 2 workers, one of which is killed, then on 3 and on 2, and compare with plain torch.

    A node comes to the cluster, and leaves it, when the workers ask for it.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from . import ray_script as script
    from .elastic_agents import Progress, compare

    trainer = TorchTrainer(
        script.elastic,
        train_loop_config={
            "folder": str(folder),
            "steps": STEPS,
            "kill_at": KILL_AT,
            "worlds": WORLDS,
        },
        scaling_config=ScalingConfig(num_workers=(2, 3), elastic_resize_monitor_interval_s=1),
        run_config=RunConfig(
            storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=9)
        ),
    )
    progress, small = Progress(folder), {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    with local_cluster(num_cpus=2) as cluster:
        fitting = Thread(target=trainer.fit, daemon=True)
        fitting.start()
        for world_size in WORLDS.values():
            while not any(line.get("wanted") == world_size for line in progress.read()):
                if not fitting.is_alive():
                    raise RuntimeError("the training ended before its workers changed")
                sleep(0.1)
            if world_size == 3:
                node = cluster.add_node(**small)
            else:
                cluster.remove_node(node, allow_graceful=False)
        fitting.join()
    (folder / "calm").mkdir()
    _end_calmly(folder / "calm")
    progress.read()
    starts = progress.starts()
    return {
        "worlds": [len(start["pids"]) for start in starts],
        **compare(folder, folder / "calm"),
    }


def _end_calmly(folder: Path) -> None:
    """Train as the elastic workers do, in one process, with torch alone."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from .elastic_script import GLOBAL_BATCH_SIZE, make_data, make_model

    model, samples = make_model(), dict[int, list[int]]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    order = torch.Generator().manual_seed(2)
    loader = DataLoader(make_data(), GLOBAL_BATCH_SIZE, shuffle=True, generator=order)
    while len(samples) < STEPS:
        for x, y, index in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            samples[len(samples)] = index.tolist()
            if len(samples) == STEPS:
                break
    torch.save({"model": model.state_dict(), "steps": samples}, folder / "end.pt")


def said_by_page(folder: Path) -> list[tuple[list[str], list[str]]]:
    """Run the page's blocks, and return what each printed and what it promises to print."""
    os.chdir(folder)
    said = []
    for block in blocks("python"):
        heard = io.StringIO()
        with contextlib.redirect_stdout(heard):
            exec(block, {"__name__": "__main__"})
        promised = [line[2:] for line in block.splitlines() if line.startswith("# ")]
        said.append((heard.getvalue().splitlines(), promised))
    return said


def rows_of_ray_data(folder: Path) -> list[dict[str, Any]]:
    """Train on rows of Ray Data's that two workers read, and return what each trained on."""
    import ray.data
    from ray.train import DataConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from . import ray_script as script

    options = ray.data.ExecutionOptions(preserve_order=True)
    TorchTrainer(
        script.rows,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "storage")),
        datasets={"train": ray.data.range(60, override_num_blocks=5)},
        dataset_config=DataConfig(datasets_to_split=[], execution_options=options),
    ).fit()
    return [json.loads((folder / f"rows-{rank}.json").read_text()) for rank in range(2)]


if __name__ == "__main__":
    kind, where = sys.argv[1], Path(sys.argv[2])
    answer = {"steady": steady, "elastic": elastic}[kind](where)
    (where / f"{kind}.json").write_text(json.dumps(answer))
