"""What is printed in the README is what a reader gets."""

import inspect
import re

import numpy as np
import pytest

from evenstep import policies
from evenstep.testing import run_workers

from .._snippets import ROOT, blocks

README = ROOT / "README.md"

# What a training script has before the lines that the README shows.
PREAMBLE = """
import torch
torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(
    torch.randn(512, 8, dtype=torch.float64), torch.randint(0, 4, (512,))
)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
model.double()
loss_fn = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""


def the_change():
    """The script before the change and after it, and the lines that were added and removed."""
    (diff,) = blocks(README, "diff")
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    added = [line for line in lines if line.startswith("+") and line[1:].strip()]
    removed = [line for line in lines if line.startswith("-")]
    return before, after, added, removed


def train(rank, script):
    """Run a script as one of its workers and return the parameters that it trained."""
    names = {"__name__": "__main__"}
    exec(PREAMBLE + script, names)
    if "balancer" in names:
        names["balancer"].close()
    return np.concatenate(
        [parameter.detach().numpy().ravel() for parameter in names["model"].parameters()]
    )


@pytest.mark.cluster
def test_three_lines_more_train_the_same_model():
    """The script of the README runs before and after the change, with the same result."""
    before, after, added, removed = the_change()

    plain = run_workers(2, train, before)
    balanced = run_workers(2, train, after)

    assert (len(added), removed) == (3, [])
    np.testing.assert_allclose(balanced[0], plain[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(balanced[0], balanced[1])


def test_its_table_holds_every_policy_as_it_can_be_given():
    """As text what needs no arguments, as an instance what does; none is missing."""
    column = "\n".join(re.findall(r"^\| (`[^|]*) \|", README.read_text("utf-8"), re.M))
    named = {type(policies.by_name(name)) for name in re.findall(r'`"([a-z0-9-]+)"`', column)}
    built = {getattr(policies, name) for name in re.findall(r"`([A-Z]\w+)\(", column)}
    exported = {getattr(policies, name) for name in policies.__all__}
    concrete = {value for value in exported if inspect.isclass(value)} - {policies.AbstractPolicy}

    assert named | built == concrete
    for policy in built:
        with pytest.raises(TypeError, match="missing"):
            policy()


def test_the_first_screen_has_what_a_newcomer_needs():
    """What to expect of equal workers, picture, change and commands are at the top."""
    lines = README.read_text("utf-8").splitlines()
    first, top = "\n".join(lines[:10]), "\n".join(lines[:45])

    assert len(lines) <= 120
    assert "With equal workers" in first
    for sight in ("docs/images/demo.png", "```diff", "make demo", "make test", "pip install"):
        assert sight in top
