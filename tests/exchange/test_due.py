"""Whatever loops do with the steps they are handed, all ranks have one plan in each, and go on."""

import random
import threading

import pytest

from evenstep._exchange._message_kinds import StepReports
from evenstep._planner import Report
from evenstep.events import StepMeasured

from .exchanges import gathering, pairs

NUM_STEPS = 100
LOOPS = [
    # lag, steps fetched ahead, steps by which a device is late, share of steps that are not used
    (0, 0, 0, 0.0),
    (0, 0, 0, 0.1),
    (0, 1, 0, 0.0),
    (0, 3, 0, 0.1),
    (1, 0, 1, 0.0),
    (1, 0, 1, 0.1),
    (1, 1, 0, 0.1),
    (1, 3, 1, 0.0),
]


def train(exchange, told, used, *, ahead, late, took_s):
    """Run one rank's loop; note the sizes of each step."""
    rank, waiting, fetched = exchange._router.rank, [], 0
    for step in range(NUM_STEPS):
        while fetched <= min(step + ahead, NUM_STEPS - 1):
            told.append(exchange.at(fetched, may_look_ahead=True).batch_size)
            fetched += 1
        if step not in used:
            continue
        size, seconds = told[step][rank], took_s[step]
        waiting.append(Report(step, size, 16, seconds, 0.0, wall_s=1.2 * seconds))
        ready = tuple(waiting[: len(waiting) - late])
        del waiting[: len(ready)]
        exchange.report(step, lambda step=step, ready=ready: [StepReports(step, ready)])
    exchange.hear_out(limit_s=10.0)
    exchange.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("lag", "ahead", "late", "unused"), LOOPS)
def test_all_ranks_have_one_plan_in_each_step(lag, ahead, late, unused, seed):
    """In steps of 1, 5 and 30 ms, of which some have no backward on any rank; each is measured."""
    rng = random.Random(seed)
    took_s = [rng.choice([0.001, 0.005, 0.005, 0.03]) if seed else 0.005 for _ in range(NUM_STEPS)]
    used = [step for step in range(NUM_STEPS) if rng.random() >= unused]
    told = [], []
    with pairs() as make:
        both, emitted = make(lag=lag, planner=gathering(), heartbeat_s=60.0)
        threads = [
            threading.Thread(
                target=train,
                args=(exchange, sizes, used),
                kwargs={"ahead": ahead, "late": late, "took_s": took_s},
                daemon=True,
            )
            for exchange, sizes in zip(both, told, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    measured = [event.step for event in list(emitted.queue) if isinstance(event, StepMeasured)]

    assert [len(sizes) for sizes in told] == [NUM_STEPS] * 2
    assert told[0] == told[1]
    assert ahead or len(set(told[0])) > 1  # a loop that looks ahead waits for no plan
    assert measured == (used[:-1] if late else used)
