"""The machines of the papers as set-ups of the arena."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks._setups import PER_WORKER, four_gpus
from benchmarks.arena._setups import ArenaSetUp
from benchmarks.arena._traces import Trace, drawn, periodic, recorded, static
from evenstep import AffineTime
from evenstep.policies import LbBsp2018, LbBsp2020
from evenstep.prediction import Ema
from evenstep.timemodels import PiecewiseTime

TRACES = Path(__file__).parents[1] / "traces"
SCALE = 2.0
"""How many times as long as in LBB's paper everything takes: no step is shorter than 200 ms."""
SSGD_GAIN = 0.6457
"""LBB's saving over SSGD, from which the cost of an exchange is fitted."""
LB_BSP_GAIN = 1.54
"""LB-BSP's "up to 54 %" on GPUs, read as times as fast: the fast half is chosen to allow it."""
DYNAMIC_CLAIMS = (
    ("ResNet-50", "dynamic-2-fold-static", 2.0),
    ("ResNet-50", "dynamic-10-fold-static", 2.4),
    ("MNIST CNN, at most", "dynamic-10-fold-static", 4.0),
    ("linear regression", "dynamic-10-fold-static", 1.15),
)
"""What dynamic batching's authors trained, on which set-up, and how many times as fast."""


def fitted_exchange_s() -> float:
    """Return the constant exchange for which LBB's own step times give its saving over SSGD."""
    equal_s = float(four_gpus().seconds(np.full(4, PER_WORKER)).max())
    balanced_s = float(four_gpus().seconds(np.array([167, 167, 158, 20])).max())
    return exchange_for(1 / (1 - SSGD_GAIN), equal_s, balanced_s)


def exchange_for(gain: float, equal_s: float, balanced_s: float) -> float:
    """Return the constant exchange x at which balancing gains this much; below 0 there is none.

    equal + x = gain (balanced + x).
    """
    return (equal_s - gain * balanced_s) / (gain - 1)


def lines(times: AffineTime, scale: float = 1.0) -> PiecewiseTime:
    """Return straight lines, ``scale`` times as long, in the form that has room for a flat part."""
    none = np.zeros(times.world_size, np.int64)
    return PiecewiseTime(scale * times.intercept_s, none, scale * times.slope_s)


def by_cores(*cores: float, equal_s: float) -> PiecewiseTime:
    """Return workers as fast as they have cores; the slowest takes ``equal_s`` at equal sizes."""
    slope_s = equal_s * min(cores) / np.array(cores) / PER_WORKER
    return lines(AffineTime(np.zeros(len(cores)), slope_s))


def _lbb(name: str, trace: Trace) -> ArenaSetUp:
    return ArenaSetUp(
        name=name,
        rule="lbb",
        times=lines(four_gpus(), SCALE),
        trace=trace,
        exchange_s=SCALE * fitted_exchange_s(),
        global_batch_size=4 * PER_WORKER,
        has_inexact=True,
    )


def _dynamic(name: str, times: PiecewiseTime, exchange_s: float) -> ArenaSetUp:
    return ArenaSetUp(
        name=name,
        rule="dynamic-batching",
        times=times,
        trace=static(3),
        exchange_s=exchange_s,
        global_batch_size=3 * PER_WORKER,
        duration_s=30.0,
        turn_s=5.0,
    )


def _gpus(gain: float) -> PiecewiseTime:
    """Return two slow GPUs and two fast ones, flat below 32 and 64 samples.

    The slow ones take 0.2 s, and 0.8 s at equal sizes; the fast ones 0.1 s, and past 64 samples
    what makes ``gain`` the bound.
    """
    flat_s, saturation = np.array([0.1, 0.1, 0.2, 0.2]), np.array([64, 64, 32, 32])
    slope_s = (0.8 - 0.2) / (PER_WORKER - 32)
    balanced_s = 0.8 / gain
    of_slow = 32 + (balanced_s - 0.2) / slope_s
    of_fast = 2 * PER_WORKER - of_slow
    fast_s = (balanced_s - 0.1) / (of_fast - 64)
    return PiecewiseTime(flat_s, saturation, np.array([fast_s, fast_s, slope_s, slope_s]))


def _lb_bsp_gpu() -> ArenaSetUp:
    return ArenaSetUp(
        name="lb-bsp-gpu-static",
        rule="lb-bsp-2020",
        times=_gpus(LB_BSP_GAIN),
        trace=static(4),
        exchange_s=0.0,
        global_batch_size=4 * PER_WORKER,
        rivals={"lb-bsp-2020-by-16": LbBsp2020(delta=16, window=2)},
    )


def _lb_bsp_cpu() -> ArenaSetUp:
    return ArenaSetUp(
        name="lb-bsp-cpu",
        rule="lb-bsp-2018",  # that of 2020 for CPUs too
        times=by_cores(1, 1, 1, 1, equal_s=0.3),
        trace=recorded(TRACES / "neighbours.csv", world_size=4, period_s=0.25),
        exchange_s=0.0,
        global_batch_size=4 * PER_WORKER,
        duration_s=30.0,
        turn_s=3.0,
        rivals={"lb-bsp-2020": LbBsp2020(), "last-value": LbBsp2018(predictor=Ema(1.0))},
    )


def _narx(name: str, *, tells_quota: bool) -> ArenaSetUp:
    """Return two machines whose quotas change every few steps; their readers are told, or not."""
    return ArenaSetUp(
        name=name,
        rule="lb-bsp-2018",
        times=by_cores(1, 1, equal_s=0.2),
        trace=drawn(2, seed=0, length_s=120.0, stay_s=(0.4, 1.2), slowdown=(1.5, 4.0)),
        exchange_s=0.0,
        global_batch_size=2 * 64,
        duration_s=99.0,  # the load of a turn matters more than the forecast: many turns
        turn_s=2.75,
        num_learning=6,
        tells_quota=tells_quota,
        rivals={
            "ema": LbBsp2018(predictor=Ema()),
            "last-value": LbBsp2018(predictor=Ema(1.0)),
        },
    )


# Cores as in the paper, 39 in all. Twofold, no exchange explains its figure: it is above the bound.
# Tenfold, an exchange is fitted to the most that its CNN for MNIST gained, 4 times.
_TWOFOLD = by_cores(9, 12, 18, equal_s=0.7)
_TENFOLD = by_cores(2, 17, 20, equal_s=1.3)
# "Severe dynamic" is LBB's word; its changes are not recovered. These are ours: jobs that
# come and go on all four cards every 3 to 9 s, and take a third to two thirds of a card.
_CONTENDED = drawn(4, seed=1, length_s=60.0, stay_s=(3.0, 9.0), slowdown=(1.5, 3.0))
SETUPS = {
    each.name: each
    for each in (
        _lbb("lbb-static", static(4)),
        _lbb("lbb-contended", _CONTENDED),
        _lbb("lbb-periodic", periodic(4, period_s=6.0, slowdown=3.0)),
        _dynamic("dynamic-2-fold-static", _TWOFOLD, 0.0),
        _dynamic("dynamic-10-fold-static", _TENFOLD, exchange_for(4.0, 1.3, 1.3 * 3 * 2 / 39)),
        _lb_bsp_gpu(),
        _lb_bsp_cpu(),
        _narx("narx-quotas", tells_quota=True),
        _narx("narx-neighbours", tells_quota=False),
    )
}
