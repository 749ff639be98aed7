"""Many ways to foresee the next step, each trusted by what following it would have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from .._types import Cluster, FloatArray, Resources, check_fields, check_range, own
from ..prediction import AbstractPredictor, Ar, Ema, Holt, LocalLevel, Seasonal, WindowMedian
from ..timemodels._curves import AffineTime
from ._base import equal_split

_LARGEST_LOSS = 1.0  # a step twice as long as needed: more would only say that it was odd

# The calm one of the two ways to trust experts, and who of the two is trusted. Chosen on recordings
# and seeds that no benchmark uses.
_CALM_RATE, _CALM_SHARE = 1.0, 0.001
_TRUST_RATE, _TRUST_SHARE = 2.0, 0.002
_TRUST = own([0.99, 0.01], np.float64)


Expert = tuple[AbstractPredictor[Any], float]
"""A predictor of a worker's cost per sample, and its weight before anything is known.

The weight is relative to the filter's 1, finite and positive.
"""


def _usual() -> tuple[Expert, ...]:
    # The filter averages where nothing changes, so slow averages are rarely the best: what they
    # would hold back in the first step after a change is kept small.
    return (
        (Seasonal(), 0.5),
        (Holt(alpha=0.5, beta=0.2, damping=0.98), 0.2),
        (Ema(1.0), 0.2),
        (Ema(0.6), 0.02),
        (Ema(0.3), 0.02),
        (Ema(0.1), 0.02),
        (WindowMedian(5), 0.02),
        (LocalLevel(), 0.02),
        (Ar(), 0.02),
    )


@final
@dataclass(frozen=True, slots=True)
class Bank:
    r"""A mixture of splits, each of which one expert would have chosen.

    After a step every worker's time at its size gives its time at any size, so the makespan
    $m_e$ that the split of expert $e$ *would* have had is known, and so is the best one, $m^*$.
    With the loss $\ell_e = \min(m_e / m^* - 1, 1)$ the weights follow

    $$w_e \gets (1 - \alpha) \frac{w_e e^{-\eta \ell_e}}{\sum_f w_f e^{-\eta \ell_f}} +
    \alpha p_e,$$

    and the split is $\sum_e w_e b_e$. A makespan is convex in the sizes, so the mixture's is
    never above the mean of the experts' own, and over $T$ steps its summed loss is at most

    $$\sum_k \ell_{e_k} + \frac{\eta T}{8} + \frac{1}{\eta} \Bigl( (s + 1) \ln \frac{1}{\alpha p} +
    T \ln \frac{1}{1 - \alpha} \Bigr)$$

    for every sequence $e_k$ of experts that changes $s$ times, $p$ the smallest prior among them:
    fixed share, as long as no loss is cut off at 1. Losses of a good expert are far below 1, where
    the weights do much better than the term $\eta T / 8$ says: with the default $\eta$ it is all
    that losses can add up to, so that the bound alone promises nothing of these weights.

    Such weights follow within a few steps what lasts, and chase lucky experts where nothing
    does. So there are two sets of them, on the same experts: these, and calm ones, that learn
    eight times as slowly and begin with the equal split at a half. A third pair of weights, by the
    same rule from what the two mixtures would have cost, says how much of each is in the next
    split, for which the bound holds once more, of two experts. Where load is nothing but chance,
    and the equal split is best, that costs 1 to 2 % of a step where the quick ones alone cost 4
    to 9 %.

    The experts: the filter; every predictor in ``experts``, on the costs per sample that its
    fixed costs leave; and the equal split, so that in the long run nothing is worse than that.

    Args:
        experts: beside the filter and the equal split.
        rate: $\eta$, finite and positive.
        share: $\alpha$, in (0, 1): how fast an expert that was wrong can come back.
        equal: prior of the equal split, finite and positive.

    Raises:
        ValueError: an argument is out of range.

    References:
        M. Herbster and M. Warmuth, "Tracking the best expert", 1998; for convex losses N.
        Cesa-Bianchi and G. Lugosi, *Prediction, Learning, and Games*, 2006, theorem 5.2.
    """

    experts: tuple[Expert, ...] = field(default_factory=_usual)
    rate: float = 8.0
    share: float = 0.01
    equal: float = 0.02

    def __post_init__(self) -> None:
        check_fields(
            self,
            rate=("finite and positive", "8 suits most clusters."),
            share=("in (0, 1)", "Use 0.01."),
            equal=("finite and positive", "0.02 suits most clusters."),
        )
        for _, prior in self.experts:
            rule, remedy = "finite and positive", "1 is the filter's own."
            check_range("Bank(experts=...)", prior, rule, remedy)

    def init(self, cluster: Cluster) -> dict[str, Any]:
        """Return the state before the first step: only the equal split is known."""
        priors = self._priors()
        # Splits which cost nothing: no blame yet.
        splits = np.zeros((priors.shape[1], cluster.world_size))
        splits[-1] = equal_split(cluster)
        return {
            "weights": priors,
            "trust": _TRUST.copy(),
            "splits": splits,
            "experts": tuple(one.init(cluster.world_size) for one, _ in self.experts),
        }

    def update(
        self,
        state: dict[str, Any],
        cluster: Cluster,
        times: AffineTime,
        costs: FloatArray,
        *,
        usual: FloatArray,
        resources: Resources | None = None,
    ) -> dict[str, Any]:
        """Return the state after one more step, leaving ``state`` as it is.

        Args:
            state: from ``init`` or ``update``.
            cluster: what is planned for.
            times: the filter's estimate, after the step.
            costs: seconds per sample in the step, less fixed costs, positive; NaN where a worker
                had no samples, ``(world_size,)``.
            usual: the same, with NaN also where the filter takes a reading for a passing one.
            resources: what the machines have to spare now.
        """
        weights, trust = self._reweighted(state, cluster, times, costs)
        known = tuple(
            # A passing reading is nothing to go by, but who knows the clock may know it too.
            one.update(s, costs if isinstance(one, Seasonal) else usual, resources)
            for (one, _), s in zip(self.experts, state["experts"], strict=True)
        )
        slopes = np.stack([times.slope_s, *self._forecasts(known, times.slope_s)])
        splits = level_splits(times.intercept_s, slopes, cluster)
        equal = equal_split(cluster).astype(np.float64)
        splits = np.vstack([splits, equal])
        return {"weights": weights, "trust": trust, "splits": splits, "experts": known}

    def forecast(self, state: dict[str, Any], times: AffineTime) -> AffineTime:
        """Return the lines under which the mixture's split ends level: the bank's own forecast."""
        mixture = state["trust"] @ state["weights"] @ state["splits"]
        size = np.maximum(mixture, 1e-9)
        level_s = float((times.slope_s * mixture + times.intercept_s).mean())
        slope_s = np.maximum(level_s - times.intercept_s, 0.05 * level_s) / size
        return AffineTime(times.intercept_s, slope_s)

    def goes_by_the_clock(self, state: dict[str, Any]) -> bool:
        """Return whether a period is known of some worker, and has proved the best forecast."""
        weights = state["trust"] @ state["weights"]
        return any(
            isinstance(one, Seasonal) and weight == weights.max() and one.periods(known).any()
            for (one, _), known, weight in zip(
                self.experts, state["experts"], weights[1:-1], strict=True
            )
        )

    def _priors(self) -> FloatArray:
        """Return the weights to begin with, quick and calm, ``(2, num_experts)``."""
        others = np.array([1.0, *(prior for _, prior in self.experts)])
        quick = np.append(others, self.equal)
        calm = np.append(others, others.sum())
        return np.stack([quick / quick.sum(), calm / calm.sum()])

    def _reweighted(
        self, state: dict[str, Any], cluster: Cluster, times: AffineTime, costs: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the weights of the experts, quick and calm, and how much each are trusted."""
        ran = ~np.isnan(costs)
        actual = np.where(ran, costs, times.slope_s)
        best = level_splits(times.intercept_s, actual[np.newaxis], cluster)
        weights, splits = state["weights"], state["splits"]
        tried = np.vstack([splits, weights @ splits, best])
        makespans = np.where(tried > 0, times.intercept_s + actual * tried, 0.0).max(axis=1)
        loss = np.maximum(makespans[:-1] / makespans[-1] - 1, 0.0)
        each, both = np.minimum(loss[:-2], _LARGEST_LOSS), loss[-2:]
        rates, shares = (self.rate, _CALM_RATE), (self.share, _CALM_SHARE)
        fresh = [
            fixed_share(weight, each, rate=rate, share=share, prior=prior)
            for weight, rate, share, prior in zip(
                weights, rates, shares, self._priors(), strict=True
            )
        ]
        # From the better of the two: where both take three times as long as needed, the difference
        # still counts.
        apart = np.minimum(both - both.min(), _LARGEST_LOSS)
        trust = fixed_share(
            state["trust"], apart, rate=_TRUST_RATE, share=_TRUST_SHARE, prior=_TRUST
        )
        return np.stack(fresh), trust

    def _forecasts(self, known: Sequence[Any], slope_s: FloatArray) -> list[FloatArray]:
        """Return every expert's costs; the filter's where it has none of its own."""
        forecasts = []
        for (one, _), state in zip(self.experts, known, strict=True):
            costs = one.predict(state)
            own = np.isfinite(costs)
            if isinstance(one, Seasonal):
                own &= one.periods(state) > 0
            forecasts.append(np.where(own, costs, slope_s))
        return forecasts


def fixed_share(
    weights: FloatArray, losses: FloatArray, *, rate: float, share: float, prior: FloatArray
) -> FloatArray:
    r"""Return the weights after one more round.

    $w_e \gets (1 - \alpha) w_e e^{-\eta \ell_e} / \sum_f w_f e^{-\eta \ell_f} + \alpha p_e$. A
    number added to all losses changes nothing.

    Args:
        weights: $w$, positive, adding up to 1, ``(num_experts,)``.
        losses: $\ell$, ``(num_experts,)``.
        rate: $\eta$, positive.
        share: $\alpha$, in [0, 1).
        prior: $p$, as ``weights``.
    """
    grown = weights * np.exp(-rate * (losses - losses.min()))
    mixed: FloatArray = (1 - share) * grown / grown.sum() + share * prior
    return mixed


def level_splits(intercept_s: FloatArray, slope_s: FloatArray, cluster: Cluster) -> FloatArray:
    r"""Return the split that ends earliest under each forecast, not yet whole.

    $b_r = (T - a_r) / c_r$ with $T = (B + \sum a_r / c_r) / \sum 1 / c_r$ over the workers at no
    bound. Workers that violate one are pinned there and the rest is solved again, each time on
    the side that is violated more: what is pinned so stays pinned at the optimum.

    Args:
        intercept_s: fixed costs, the same in all forecasts, ``(world_size,)``.
        slope_s: cost of a sample, positive, ``(num_forecasts, world_size)``.
        cluster: supplies the total and the bounds; granules are left to who rounds.

    Returns:
        Sizes that add up to the global batch, ``(num_forecasts, world_size)``.

    References:
        The pinning is that of G. Bitran and A. Hax, *Management Science* 27, 1981.
    """
    lo, hi = cluster.min_batch_size, cluster.max_batch_size
    speed = 1 / slope_s
    split, free = np.zeros_like(speed), np.ones(speed.shape, np.bool_)
    left = np.full((len(speed), 1), float(cluster.global_batch_size))
    while True:
        rate = np.where(free, speed, 0.0)
        total = rate.sum(axis=1, keepdims=True)
        end_s = (left + (rate * intercept_s).sum(axis=1, keepdims=True)) / np.maximum(total, 1e-300)
        wanted = (end_s - intercept_s) * rate
        below, above = free & (wanted < lo), free & (wanted > hi)
        if not (below.any() or above.any()):
            return np.where(free, wanted, split)
        short = np.where(below, lo - wanted, 0.0).sum(axis=1, keepdims=True)
        over = np.where(above, wanted - hi, 0.0).sum(axis=1, keepdims=True)
        pinned = np.where(short >= over, below, above)
        split = np.where(pinned, np.where(below, lo, hi), split)
        left = left - np.where(pinned, split, 0.0).sum(axis=1, keepdims=True)
        free &= ~pinned
