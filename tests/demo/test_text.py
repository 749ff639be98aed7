"""The demo's text is real, and cut without loss or overlap."""

from __future__ import annotations

import torch

from evenstep.demo._text import Corpus


def test_pieces_cover_the_files_in_order_of_their_paths(tmp_path):
    """Put together, the pieces are the files again, up to a rest shorter than a piece."""
    (tmp_path / "b.py").write_text("def second(): ...\n")
    (tmp_path / "a.py").write_text("first = 1\n")
    text = Corpus(context=4, folder=tmp_path)
    whole = b"".join(bytes(text[i][:-1].tolist()) for i in range(len(text)))

    assert b"first = 1\n\ndef second(): ...\n".startswith(whole)
    assert len(whole) >= 24


def test_each_piece_ends_with_what_the_next_begins_with(tmp_path):
    """The last byte of a piece is there to be predicted, by a piece that does not see it."""
    (tmp_path / "a.py").write_bytes(bytes(range(1, 100)))
    text = Corpus(context=8, folder=tmp_path)

    assert text[0].dtype == torch.int64
    assert all(text[i][-1] == text[i + 1][0] for i in range(len(text) - 1))


def test_installed_packages_are_no_part_of_it(tmp_path):
    """Two machines with the same Python and other packages train on the same text."""
    (tmp_path / "a.py").write_text("x" * 50)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "b.py").write_text("y" * 50)

    assert bytes(Corpus(context=4, folder=tmp_path).data) == b"x" * 50


def test_every_machine_has_enough_of_it():
    """The standard library holds more than the longest demo reads."""
    assert len(Corpus(context=64)) > 80 * 24 * 8
