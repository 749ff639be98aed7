"""What reads a machine, and for which policies."""

import numpy as np

from evenstep._run._machine_reader import (
    PsutilReader,
    machine_reader_of,
    own_reader,
    read_by,
)
from evenstep.policies import Auto, LbBsp2018


def test_what_this_system_has_gives_a_share_and_bytes():
    """From the first call on: this process's files, or psutil where there are none."""
    for reader in (machine_reader_of(LbBsp2018()), PsutilReader()):
        share, size = reader.read()

        assert 0 <= share <= 1
        assert size > 2**20


def test_numbers_of_numpy_are_read_as_pythons_own():
    """Messages between ranks carry no others."""

    class Mine:
        def read(self):
            return np.float32(0.5), np.int64(7)

    assert list(map(type, read_by(Mine()))) == [float, int]


def test_without_the_files_of_linux_psutil_reads_the_host(tmp_path):
    """As on macOS and Windows."""
    assert isinstance(own_reader(tmp_path), PsutilReader)


def test_a_reader_that_is_given_is_taken():
    """The user's own, wherever the policy asks."""
    mine = PsutilReader()

    assert machine_reader_of(LbBsp2018(), mine) is mine


def test_nothing_is_read_for_a_policy_that_does_not_ask():
    """Unless one asks, a reader costs nothing."""
    assert machine_reader_of(Auto(), PsutilReader()) is None
