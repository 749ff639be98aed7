"""What a rank's process and machine say of its slowness."""

from evenstep._diagnosis import Cause, HostClues

from .runs import shown, steps


def test_a_quota_and_the_want_of_a_core_are_told_apart_by_the_machine():
    """Both look like a slow worker; with equal times the one or the other is named."""
    slow = steps(
        100, 2, late=lambda step, rank: {"FORWARD": 30_000 * rank, "BACKWARD": 60_000 * rank}
    )
    for field, cause, word in (
        ("throttled_s", Cause.SLOW_WORKER, "quota"),
        ("run_delay_s", Cause.CONTENTION, "core"),
        ("major_faults", Cause.MEMORY, "disk"),
    ):
        diagnoser = shown(slow)
        amount = 500 if field == "major_faults" else 0.5
        for second in range(10):
            diagnoser.add_host(0, HostClues(second, 1.0))
            diagnoser.add_host(1, HostClues(second, 1.0, **{field: amount}))
        (found,) = diagnoser.diagnose().found

        assert (found.cause, found.rank) == (cause, 1)
        assert word in found.evidence


def test_a_quota_on_several_cpus_counts_once():
    """Eight threads that are held back together for 0.25 s of a second are held for 0.25 s."""
    late = {"FORWARD": 30_000, "BACKWARD": 60_000}
    diagnoser = shown(steps(100, 2, late=lambda step, rank: late if rank else {}))
    for second in range(10):
        diagnoser.add_host(0, HostClues(second, 1.0, cpu_s=8.0))
        diagnoser.add_host(1, HostClues(second, 1.0, cpu_s=6.0, throttled_s=2.0))

    (found,) = diagnoser.diagnose().found
    assert "holds it back for 25 % of the time" in found.evidence
