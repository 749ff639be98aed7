"""A script that fails since ranks have unlike numbers of rows is told so."""

import pytest

from evenstep.testing import WorkerFailed, run_workers

from .unequal_rows import notes_of, reduced_features

pytestmark = pytest.mark.cluster


def test_an_error_about_a_fixed_batch_size_has_a_note_with_the_sizes():
    """Labels and masks made from `args.batch_size`; not an error about something else."""
    for own, notes in zip((22, 2), run_workers(2, notes_of), strict=True):
        noted = {case: texts for case, texts in notes.items() if texts}

        assert noted.keys() == {
            ("labels_of_a_fixed_size", "unequal"),
            ("mask_of_two_views", "unequal"),
            ("noise_before_the_forward", "unequal"),
        }
        assert all(len(texts) == 1 for texts in noted.values())
        text = noted["mask_of_two_views", "unequal"][0]
        assert f"this rank has {own} samples in this step, not 12" in text
        assert "ranks have 22 and 2" in text
        assert "len(batch)" in text


def test_a_rank_that_ends_in_a_collective_over_rows_is_told_what_to_pad():
    """Gloo ends its process; the others learn why, as far as it can be known."""
    other, _ = run_workers(2, reduced_features, check=False)

    assert isinstance(other, WorkerFailed)
    assert "Rank 1" in str(other)
    assert "ranks have 22 and 2 samples in this step, so pad the rows to 22" in str(other)
    assert "policy='equal'" in str(other)
