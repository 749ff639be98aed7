"""What a machine has to spare, read from a live one."""

from evenstep._run._machine_reader import PsutilReader, machine_reader_of
from evenstep.policies import Auto


def test_psutil_gives_a_share_and_bytes():
    """From the first call on."""
    share, size = PsutilReader().read()

    assert 0 <= share <= 1
    assert size > 2**20


def test_nothing_is_read_for_a_policy_that_does_not_ask():
    """Unless one asks, a reader costs nothing."""
    assert machine_reader_of(Auto(), PsutilReader()) is None
