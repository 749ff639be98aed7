"""A script that fails since ranks have unlike numbers of rows is told so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import Fixed
from evenstep.testing import WorkerFailed, run_workers
from evenstep.torch import Balancer, Runtime

pytestmark = pytest.mark.cluster

BATCH_SIZE = 12


def labels_of_a_fixed_size(out: torch.Tensor) -> None:
    functional.cross_entropy(out, torch.zeros(BATCH_SIZE, dtype=torch.long))


def mask_of_two_views(out: torch.Tensor) -> None:
    """SimCLR's: of both views of each sample, without the diagonal."""
    both = torch.cat([out, out])
    (both @ both.T)[~torch.eye(2 * BATCH_SIZE, dtype=torch.bool)].sum()


def own_mistake(out: torch.Tensor) -> None:
    raise ValueError("no file 1234.jpg")


def noise_before_the_forward(x: torch.Tensor) -> None:
    x + torch.zeros(BATCH_SIZE, 64)


def mixed_in_pairs(x: torch.Tensor) -> None:
    """As timm's mixup asserts it, without a number."""
    assert len(x) == BATCH_SIZE, "Batch size should be even when using this"


EARLY = (noise_before_the_forward, mixed_in_pairs)
MISTAKES = (labels_of_a_fixed_size, mask_of_two_views, own_mistake, *EARLY)


def train(policy: object, step: object) -> None:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(72, 64)), batch_size=BATCH_SIZE)
    runtime = Runtime(line_every=None, deadline_s=6.0)
    with Balancer(policy=policy, runtime=runtime) as balancer:
        model, loader = balancer.prepare(torch.nn.Linear(64, 32), loader)
        for (x,) in loader:
            if step in EARLY:
                step(x)
            out = model(x)
            if step not in EARLY:
                step(out)
            out.square().mean().backward()


def notes_of(rank: int) -> dict[tuple[str, str], list[str]]:
    """Return the notes of the errors that end each script, by mistake and policy."""
    found = {}
    for mistake in MISTAKES:
        for name, policy in {"unequal": Fixed((22, 2)), "equal": "equal"}.items():
            try:
                train(policy, mistake)
            except (ValueError, IndexError, RuntimeError, AssertionError) as error:
                found[mistake.__name__, name] = getattr(error, "__notes__", [])
            dist.barrier()
    return found


def reduced_features(rank: int) -> None:
    """A collective over rows: it ends the process of the rank with fewer of them."""
    train(Fixed((22, 2)), lambda out: dist.all_reduce(out.detach().clone()))


def test_an_error_about_a_fixed_batch_size_has_a_note_with_the_sizes():
    """Labels and masks made from `args.batch_size`; not an error about something else."""
    for own, notes in zip((22, 2), run_workers(2, notes_of), strict=True):
        noted = {case: texts for case, texts in notes.items() if texts}

        assert noted.keys() == {
            ("labels_of_a_fixed_size", "unequal"),
            ("mask_of_two_views", "unequal"),
            ("noise_before_the_forward", "unequal"),
            ("mixed_in_pairs", "unequal"),
        }
        assert all(len(texts) == 1 for texts in noted.values())
        text = noted["mask_of_two_views", "unequal"][0]
        assert f"this rank has {own} samples in this step, not 12" in text
        assert "ranks have 22 and 2" in text
        assert "len(batch)" in text
        assert "`Bounds(granularity=2)`" in text


def test_a_rank_that_ends_in_a_collective_over_rows_is_told_what_to_pad():
    """Gloo ends its process; the others learn why, as far as it can be known."""
    other, _ = run_workers(2, reduced_features, check=False)

    assert isinstance(other, WorkerFailed)
    assert "Rank 1" in str(other)
    assert "ranks have 22 and 2 samples in this step, so pad the rows to 22" in str(other)
    assert "policy='equal'" in str(other)
