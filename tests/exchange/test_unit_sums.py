"""Units are summed alike on all ranks."""

import math
import socket

from evenstep._exchange._mailbox import UnitSums

from .channels import Reading, channel_over, router


def test_the_sum_is_the_same_bits_everywhere():
    """Over a real connection, in any order."""
    one, other = socket.socketpair()
    channels = [
        channel_over({1 - rank: end}, heartbeat_s=1.0, deadline_s=9.0)
        for rank, end in enumerate((one, other))
    ]
    routers = [router(rank, 2, channels[rank]) for rank in (0, 1)]
    sums = [UnitSums(routers[rank], came_to=lambda step: None) for rank in (0, 1)]
    for rank in (0, 1):
        routers[rank].add(sums[rank])
        channels[rank].start(Reading(routers[rank]))

    first = [sums[rank].add(0, (0.1, 0.2)[rank]) for rank in (0, 1)]
    second = [sums[rank].add(1, (0.1, 0.2)[rank]) for rank in (1, 0)]
    for rank in (0, 1):
        sums[rank].wait(first[rank])
        sums[1 - rank].wait(second[rank])

    assert {each.total for each in (*first, *second)} == {math.fsum((0.1, 0.2))}
    for channel in channels:
        channel.close()
