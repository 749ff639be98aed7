"""Under torchrun: one agent's workers train, the other's only sum, by its environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .._ports import free_port

SCRIPT = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from evenstep.torch import Balancer, Network

dist.init_process_group("gloo")
balancer = Balancer(network=Network())
torch.manual_seed(0)  # the same data on every rank
stock = DataLoader(TensorDataset(torch.randn(80, 64)), batch_size=4)
model, loader = balancer.prepare(torch.nn.Linear(64, 64), stock)
num_steps = 0
for epoch in range(2):
    for (x,) in loader:
        model(x).square().mean().backward()
        num_steps += 1
# In one piece: the workers of a node have one pipe.
print(f"{'server' if balancer.is_server else 'worker'} {num_steps}\\n", end="")
"""


@pytest.mark.slow
@pytest.mark.cluster
def test_a_role_by_environment_needs_no_other_script(tmp_path):
    """Nor a close at its end: all processes end by themselves, with exit code 0."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    shared = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    agents = []
    for node, role in enumerate(("worker", "server")):
        own = [f"--node-rank={node}", f"--nproc-per-node={2 - node}"]
        agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *shared, *own, "train.py"],
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1", "EVENSTEP_ROLE": role},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        workers, servers = [agent.communicate(timeout=100)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()

    assert [agent.returncode for agent in agents] == [0, 0], workers + servers
    assert workers.count("worker 20") == 2
    assert servers.count("server 0") == 1
