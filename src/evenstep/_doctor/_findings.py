"""What may be found, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Ailment(StrEnum):
    """What can be wrong; `docs/doctor.md` has a line for each."""

    RANK_MISSING = "rank-missing"
    VERSIONS_DIFFER = "versions-differ"
    THREADS_OVERSUBSCRIBED = "threads-oversubscribed"
    QUOTA_BELOW_THREADS = "quota-below-threads"
    QUOTA_THROTTLES = "quota-throttles"
    CORES_IDLE = "cores-idle"
    OTHERS_BUSY = "others-busy"
    GOVERNOR_SLOW = "governor-slow"
    GPU_SHARED = "gpu-shared"
    GPU_UNUSED = "gpu-unused"
    MEMORY_LOW = "memory-low"
    SHARED_MEMORY_LOW = "shared-memory-low"
    OPEN_FILES_LOW = "open-files-low"
    DEBUG_VARIABLE = "debug-variable"
    HOSTNAME_LOOPBACK = "hostname-loopback"
    INTERFACE_MISSING = "interface-missing"
    INTERFACE_SLOW = "interface-slow"
    LINK_UNREACHABLE = "link-unreachable"
    LINK_SLOW = "link-slow"
    LATENCY_HIGH = "latency-high"
    STEP_FAILED = "step-failed"
    SPEED_NOISY = "speed-noisy"
    RANK_SLOW = "rank-slow"
    NOT_WORTH_KEEPING = "not-worth-keeping"


@dataclass(frozen=True, slots=True)
class FoundAilment:
    """Something that is wrong, or costs time.

    Attributes:
        ailment: what it is.
        ranks: whose; empty where it is no rank's in particular.
        evidence: what was read or measured that says so, one sentence.
        remedy: what to do, one sentence.
    """

    ailment: Ailment
    ranks: tuple[int, ...]
    evidence: str
    remedy: str
