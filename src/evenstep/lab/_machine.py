"""What a machine needs so that a lab can be made there."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Self, final

from .._install import install_line


class LabUnavailable(RuntimeError):
    """This machine, or this user, cannot make a lab; the message holds the remedy."""


@final
@dataclass(frozen=True, slots=True)
class Machine:
    """What was found.

    Attributes:
        system: name of the kernel, "Linux" say.
        is_root: whether this process runs as root.
        packages: those of ``pyroute2`` and ``torch`` that are installed.
        num_cores: cores that this process may use, at least 1.
    """

    system: str
    is_root: bool
    packages: frozenset[str]
    num_cores: int

    @classmethod
    def here(cls) -> Self:
        """Look around."""
        system = platform.system()
        linux = system == "Linux"
        found = (name for name in ("pyroute2", "torch") if find_spec(name) is not None)
        cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
        return cls(system, linux and os.geteuid() == 0, frozenset(found), cores)


def check_machine(machine: Machine) -> None:
    """Raise unless a lab can be made there.

    Raises:
        LabUnavailable: with what to do about it.
    """
    if machine.system != "Linux":
        message = (
            f"A lab is made of Linux network namespaces and control groups; this is "
            f"{machine.system or 'an unknown system'}. Run it on Linux, in a virtual machine say; "
            f"`evenstep demo` and `evenstep simulate` run anywhere."
        )
        raise LabUnavailable(message)
    if not machine.is_root:
        message = (
            "A lab makes network namespaces and control groups, which takes root. Run it with "
            "`sudo`, or in a container started with `docker run --privileged`."
        )
        raise LabUnavailable(message)
    if "pyroute2" not in machine.packages:
        raise LabUnavailable(f"A lab needs pyroute2: `{install_line('lab')}`.")


def check_torch(machine: Machine) -> None:
    """Raise unless ``torchrun`` can be started there."""
    if "torch" not in machine.packages:
        raise LabUnavailable(f"`Lab.torchrun` needs PyTorch: `{install_line('torch')}`.")
