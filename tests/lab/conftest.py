"""Labs for tests: skipped, with the reason, where none can be made."""

import pytest

from evenstep.lab import Host, Lab, LabUnavailable


@pytest.fixture(scope="session")
def a_lab_can_be_made():
    """Linux, root and pyroute2, and nobody who forbids it, as a container may."""
    try:
        with Lab([Host()]):
            pass
    except LabUnavailable as error:
        pytest.skip(f"no lab can be made here: {error}")
