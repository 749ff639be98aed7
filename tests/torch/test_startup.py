"""Ranks that cannot work together say so at the start, all of them."""

import pytest

from evenstep._exchange._wire import ProtocolError
from evenstep.testing import run_workers
from evenstep.torch._exchange._startup import SideGroup

pytestmark = pytest.mark.cluster


def meet(rank):
    """Return what ranks of unlike versions raise, and whether ranks of one version meet then."""
    try:
        SideGroup(None, protocol=1 + rank)
    except ProtocolError as error:
        side = SideGroup(None)
        return str(error), side.collect(rank)


def test_unlike_versions_are_refused_on_all_ranks():
    """Before any of them reads what another one wrote, and with both versions."""
    (one, met), (other, _) = run_workers(2, meet)

    assert one == other
    assert "version 1 on ranks [0], version 2 on ranks [1]" in one
    assert met == [0, 1]
