"""The default policy: fit every worker's times, solve exactly, change sizes if it pays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, final

import numpy as np

from .._types import Cluster, Decision, FloatArray, IntArray, StepTimings, check_fields
from ..prediction._affine_filter import AffineFilter
from ..solve._allocate import allocate, apportion, ends_within, makespan_s
from ..timemodels._curves import AffineTime
from ._bank import Bank
from ._base import (
    LEAST_SAVING_S,
    READING_S,
    AbstractPolicy,
    equal_split,
    errors_by_chance,
    refit,
    within_reach,
)

_LEAST, _MEMORY = 8, 32  # readings at unequal sizes: to judge by, and to average over
_SURE = 2.5  # standard errors
_REST, _LONGEST_REST = 16, 128  # readings at the equal split, until others are tried anew
_PROVED = 64  # readings in a row at unequal sizes: the next rest is short again
_IN_A_ROW = 8  # times that one worker is the slowest: that is no chance
_WORSE, _MUCH_WORSE = 2.0, 3.0  # times what the equal split took: in as many readings as above,
_FEW = 3  # and in so many
_GROWN = 1.1  # times what the equal split takes: as long as others took, so load has grown
_LONGEST_PROVED_REST = 1024


class _Proof(NamedTuple):
    """The state: an array of these numbers, as all state of a policy.

    Attributes:
        ratio, variance, num_ratios: what unequal sizes took over what equal ones would have: mean,
            variance, and of how many readings.
        rest, next_rest: for how many readings sizes stay equal, now and the next time.
        slowest, in_a_row: the slowest worker at the equal split, and how often it was in a row.
        num_equal, equal_s: what steps took at the equal split: in the mean, and of how many.
        num_others, others_s: at other sizes since, likewise.
        is_proved: whether the rest is for what steps took: 1 or 0.
    """

    ratio: float = 0.0
    variance: float = 0.0
    num_ratios: float = 0.0
    rest: float = 0.0
    next_rest: float = float(_REST)
    slowest: float = -1.0
    in_a_row: float = 0.0
    num_equal: float = 0.0
    num_others: float = 0.0
    equal_s: float = 0.0
    others_s: float = 0.0
    is_proved: float = 0.0


def no_proof() -> FloatArray:
    """Return the state before the first reading."""
    return np.array(_Proof())


def why_equal(proof: FloatArray) -> str:
    """Return why sizes have to be equal for a while; nothing where they need not be."""
    state = _Proof(*proof.tolist())
    if not state.rest:
        return ""
    if state.is_proved:
        return "equal: steps at other sizes took at least twice as long as equal ones"
    return "equal: following times that vary by chance cost more than it saved"


def proved(
    proof: FloatArray, timings: StepTimings, times: AffineTime, equal: IntArray
) -> FloatArray:
    r"""Return the state after one more reading.

    At unequal sizes it took $m / e$ of what the equal split would have taken, with
    $m = \max_r \tau_r$ as measured and $e = \max_r \tau_r \, t_r(b'_r) / t_r(b_r)$ by the fit:
    whatever befell a worker would have befallen it at any size. One without samples was not
    measured, and would have taken $t_r(b'_r)$. Where the mean of the newest readings, at least 8,
    exceeds 1 by 2.5 standard errors, times differ by chance, and following them costs time. Then
    sizes stay equal for 16 readings, and for twice as many each further time, up to 128. They may
    differ again as soon as one worker was the slowest 8 times in a row.

    No fit shows times that jump at some size, as where memory is swapped. So $m$ is compared
    with what equal steps took before, too, where a worker with more than its equal share is the
    slowest. Where it is three times as much in the mean of 3 readings, or twice in that of 8, sizes
    stay equal too, for up to 1,024 readings, or until 3 of them show that equal steps take as long
    by now.

    Args:
        proof: from ``no_proof`` or ``proved``; left as it is.
        timings: the reading.
        times: what workers take, by the fit.
        equal: the equal split.
    """
    before = _Proof(*proof.tolist())
    ran = timings.batch_size > 0
    took_s = np.where(ran, timings.compute_s, 0.0)
    if np.array_equal(timings.batch_size, equal):
        return np.array(_at_equal(before, took_s))
    before = before._replace(slowest=-1.0, in_a_row=0.0)
    if not before.rest:
        last = int(took_s.argmax())
        has_more = bool(timings.batch_size[last] > equal[last])
        before = _at_others(before, float(took_s[last]), has_more=has_more)
        if _is_worse(before):
            before = _resting(before, _LONGEST_PROVED_REST)
            return np.array(before._replace(num_equal=0.0, equal_s=0.0, is_proved=1.0))
    size, foreseen_s = np.maximum(timings.batch_size, 1), times.seconds(equal)
    equal_s = np.where(ran, took_s * foreseen_s / times.seconds(size), foreseen_s)
    return np.array(_by_ratio(before, float(took_s.max() / equal_s.max())))


def _at_equal(proof: _Proof, took_s: FloatArray) -> _Proof:
    """Return the state after a step at the equal split."""
    last = int(took_s.argmax())
    proof = proof._replace(
        ratio=0.0,
        variance=0.0,
        num_ratios=0.0,
        slowest=float(last),
        in_a_row=proof.in_a_row + 1 if last == proof.slowest else 1.0,
    )
    if proof.num_others and not proof.is_proved:  # the first one after others
        proof = proof._replace(num_equal=0.0, num_others=0.0)
    num_equal = proof.num_equal + 1
    off_s = float(took_s[last]) - proof.equal_s
    proof = proof._replace(
        num_equal=num_equal, equal_s=proof.equal_s + off_s / min(num_equal, _MEMORY)
    )
    is_over = _has_grown(proof) if proof.is_proved else proof.in_a_row >= _IN_A_ROW
    proof = proof._replace(rest=0.0 if is_over else max(proof.rest - 1, 0.0))
    if not proof.rest:
        proof = proof._replace(num_others=0.0, others_s=0.0, is_proved=0.0)
    return proof


def _at_others(proof: _Proof, step_s: float, *, has_more: bool) -> _Proof:
    """Return the state with a step at other sizes; without one that others' load made slow."""
    if not has_more:
        return proof._replace(num_others=max(proof.num_others - 1, 0.0))
    num_others = proof.num_others + 1
    off_s = step_s - proof.others_s
    return proof._replace(
        num_others=num_others, others_s=proof.others_s + off_s / min(num_others, _MEMORY)
    )


def _by_ratio(proof: _Proof, ratio: float) -> _Proof:
    """Return the state with one ratio more: sizes stay equal where it is above 1 for sure."""
    num = proof.num_ratios + 1
    rate = 1 / min(num, _MEMORY)
    off = ratio - proof.ratio
    mean, variance = proof.ratio + rate * off, (1 - rate) * (proof.variance + rate * off**2)
    if not proof.rest and num >= _LEAST and mean > 1 + _SURE * math.sqrt(variance * rate):
        return _resting(proof, max(_LONGEST_REST, proof.next_rest))
    return proof._replace(
        ratio=mean,
        variance=variance,
        num_ratios=num,
        next_rest=float(_REST) if num >= _PROVED else proof.next_rest,
    )


def _resting(proof: _Proof, longest: float) -> _Proof:
    """Return the state in which sizes stay equal, and for twice as long the next time."""
    return proof._replace(
        ratio=0.0,
        variance=0.0,
        num_ratios=0.0,
        rest=proof.next_rest,
        next_rest=min(2 * proof.next_rest, longest),
    )


def _is_worse(proof: _Proof) -> bool:
    """Return whether steps at other sizes took much longer than equal ones."""
    num, others_s, equal_s = proof.num_others, proof.others_s, proof.equal_s
    is_sure = num >= _LEAST and others_s > _WORSE * equal_s
    return bool(proof.num_equal) and (is_sure or (num >= _FEW and others_s > _MUCH_WORSE * equal_s))


def _has_grown(proof: _Proof) -> bool:
    """Return whether the equal split now takes as long as others took, so that load has grown."""
    return proof.num_equal >= _FEW and proof.equal_s * _GROWN > proof.others_s


_MOST_APART = 0.1  # past that, noise or not, it is looked into at once
_RESIZE_WEIGHT = 0.3  # of the newest change, in what a change costs
_USUAL = 1.1  # times what was expected: no more than noise
_FAR = 2.0  # times as long as the fastest worker: in a first step, less may be its warming up
_FAR_S = 0.25  # by which it also has to be longer, as warming up takes as much
_STEPS_TO_KNOW_NOISE = 10  # of every worker; until then it is a guess


@final
@dataclass(frozen=True, slots=True)
class Auto(AbstractPolicy[dict[str, Any]]):
    r"""The split with the shortest predicted step, adopted if it saves enough.

    $b = \arg\min_b \max_r (a_r + c_r b_r)$ over the integers that the cluster allows, the minimum
    exact: $a_r$ from ``AffineFilter``, and $c_r$ as ``Bank`` foresees it, which weighs that filter
    against trends, periods, averages and the last step by what following each would have cost.
    The split in force stays unless the best one is predicted to shorten the step by at least
    ``min_saving``, and to save within ``horizon`` steps what a change costs
    (``resize_cost_s``); or within as many as sizes have stayed, as a pause may pass for that cost.

    Leaving the equal split takes more: the saving has to exceed what noise alone would pretend,
    $(2 + \sqrt{2 \ln W})$ standard errors of the slowest worker's estimate. Of $W$ equal workers
    the slowest looks slow by $\sqrt{2 \ln W}$ of them. So equal workers keep the equal split
    under jitter of some percent, and return to it if no other split is sure to save half of that.
    Workers that differ by less than 5 % are distinguished after a few steps, very different ones
    after the first. The saving also has to exceed a millisecond of a step.

    Without noise the second plan is near the best and the third within 2 %: one size shows the
    speed, and two sizes the fixed cost too. The first step of a run warms up, so its times are no
    measurement. If a worker took at least twice as long as the fastest in it, and a quarter of a
    second longer, the second step has sizes in proportion to these speeds. No size is tried only to
    learn. Once sizes are settled, unknown fixed costs cost 0.2 points at most.
    A single slow step changes nothing. A permanent change is
    followed after its second step, or after its first if earlier changes were permanent. A step in
    which all workers end within the noise changes nothing by itself. Load that follows the clock is
    predicted after one and a half periods, up to 256 steps.

    If a larger share costs more than in proportion, as with samples padded to the longest one, and
    times vary by chance, unequal sizes can take longer than equal ones. This shows after 8 to 30
    readings, and then the equal split stays for a while (see ``proved``). It does so after 3 to 8
    readings if times jump at a size, as with swapped memory, so that steps take two or three times
    as long as equal ones did.

    In the long run, ``auto`` is not worse than any single forecast, or than the equal split, by
    more than the bound in ``Bank``. Wrong if no line fits (see ``AffineFilter``): the
    time of equal steps is by the fit, too.

    A worker with zero samples, which needs ``min_batch_size=0``, is not measured and keeps its
    last estimate. It gets samples again only if the others slow down. Nothing changes until every
    worker was measured.

    Args:
        min_saving: least predicted saving that is worth a change, as a share of the step, in
            [0, 1).
        horizon: steps within which a change has to pay for itself, at least 1, if the first step
            at new sizes was seen to take longer; as many as since the last change if that is more.
        reach: largest factor by which one plan changes a batch size, above 1. A line through sizes
            around 50 says little about size 1, so sizes go there in several plans.
        filter: estimates the times.
        bank: predicts the next step from these estimates.

    Raises:
        ValueError: ``min_saving``, ``horizon`` or ``reach`` is out of range.

    References:
        None of the papers' rules. The minimum over fitted lines is LBB's rapid step as well; the
        filter, the test against noise and the price of a change are evenstep's own.
    """

    name: ClassVar[str] = "auto"

    min_saving: float = 0.01
    reach: float = 4.0
    horizon: int = 100
    filter: AffineFilter = field(default_factory=AffineFilter)
    bank: Bank = field(default_factory=Bank)

    def __post_init__(self) -> None:
        check_fields(
            self,
            min_saving=("in [0, 1)", "0.01 asks for 1 % of the step."),
            reach=("above 1", "4 is a factor of four."),
            horizon=("at least 1", "100 steps suit most runs."),
        )

    @property
    def reading_s(self) -> float:
        return READING_S

    def init(self, cluster: Cluster) -> Decision[dict[str, Any]]:
        equal = equal_split(cluster)
        state = {
            "held": equal,
            "filter": self.filter.init(cluster.world_size),
            "bank": self.bank.init(cluster),
            "level": self.min_saving,
            "resize_s": 0.0,
            "proof": no_proof(),
            "num_held": 0,  # steps since sizes have changed
        }
        return Decision(equal, state, "equal: nothing measured yet", self.min_saving)

    def guess(
        self, cluster: Cluster, timings: StepTimings, state: dict[str, Any]
    ) -> Decision[dict[str, Any]] | None:
        took_s = timings.compute_s
        fast, slow = int(took_s.argmin()), int(took_s.argmax())
        is_far = took_s[slow] >= max(_FAR * took_s[fast], took_s[fast] + _FAR_S)
        if not is_far or not timings.batch_size.all() or state["filter"]["num_steps"].any():
            return None
        within = within_reach(state["held"], cluster, self.reach)
        sizes = apportion(timings.batch_size / took_s, within)
        reason = (
            f"by the first step: rank {slow} took {took_s[slow] / took_s[fast]:.1f} times as long "
            f"as rank {fast}"
        )
        return Decision(sizes, state | {"held": sizes}, reason)

    def update(
        self, cluster: Cluster, timings: StepTimings, state: dict[str, Any]
    ) -> Decision[dict[str, Any]]:
        fitted = self.filter.update(
            state["filter"],
            timings.batch_size,
            timings.compute_s,
            num_steps=timings.num_steps,
        )
        held, equal = refit(state["held"], cluster), equal_split(cluster)
        times, bank = self.filter.times(fitted), state["bank"]
        resize_s, proof = self._resize_s(timings, state), state["proof"]
        if times is None:
            rank = int(np.argmin(fitted["num_steps"]))
            wanted, reason = held, f"held: rank {rank} was given no samples so far"
        else:
            bank = self._learn(bank, cluster, timings, times, fitted)
            foreseen = self.bank.forecast(bank, times)
            proof = proved(proof, timings, times, equal)
            horizon = max(self.horizon, state["num_held"])
            pays = max(self.min_saving, resize_s / horizon / makespan_s(foreseen, held))
            if reason := why_equal(proof):
                wanted = self._on_the_way_back(held, equal, cluster)
            elif np.array_equal(held, equal):
                wanted, reason = self._leave_equal(foreseen, equal, cluster, fitted, pays)
            else:
                wanted, reason = self._continue(foreseen, held, equal, cluster, fitted, pays)
        level = self._level(fitted, bank)
        if timings.apart <= state["level"] and held is state["held"]:
            if not np.array_equal(wanted, held):  # the next step has to confirm it
                level, reason = 0.0, f"held: level to {state['level']:.1%}, not yet: {reason}"
            wanted = held
        stays = np.array_equal(wanted, state["held"])
        state = {
            "held": wanted,
            "filter": fitted,
            "bank": bank,
            "level": level,
            "resize_s": resize_s,
            "proof": proof,
            "num_held": state["num_held"] + timings.num_steps if stays else 0,
        }
        return Decision(wanted, state, reason, level)

    def _level(self, fitted: dict[str, Any], bank: dict[str, Any]) -> float:
        """Return how far apart workers may end for that alone to change nothing.

        By the least saving: in any other split some worker has more than now, and takes no less
        than now, so no split could have saved more. And by what noise alone does to two of them:
        one step cannot distinguish so small a change from it. But where a worker's load comes and
        goes by the clock, the next step may not be as this one.
        """
        if self.bank.goes_by_the_clock(bank):
            return 0.0
        if fitted["num_steps"].min() < _STEPS_TO_KNOW_NOISE:
            return self.min_saving
        return min(self.min_saving + 2 * float(self.filter.noise(fitted).max()), _MOST_APART)

    def _resize_s(self, timings: StepTimings, state: dict[str, Any]) -> float:
        """Return what a change costs, learnt from this step if it was the first after one."""
        resize_s: float = state["resize_s"]
        former = self.filter.times(state["filter"])
        # Of a worker without samples the filter keeps the last size that was measured.
        same = timings.batch_size == state["filter"]["batch_size"]
        if former is None or same[timings.batch_size > 0].all():
            return resize_s
        return resize_cost_s(resize_s, timings, self.bank.forecast(state["bank"], former))

    def _learn(
        self,
        bank: dict[str, Any],
        cluster: Cluster,
        timings: StepTimings,
        times: AffineTime,
        fitted: dict[str, Any],
    ) -> dict[str, Any]:
        """Show the bank what every worker took per sample, less its fixed cost."""
        ran, size = timings.batch_size > 0, np.maximum(timings.batch_size, 1)
        fixed_s = np.minimum(times.intercept_s, 0.9 * timings.compute_s)
        costs = np.where(ran, (timings.compute_s - fixed_s) / size, np.nan)
        usual = np.where(self.filter.holds_back(fitted), np.nan, costs)
        return self.bank.update(
            bank, cluster, times, costs, usual=usual, resources=timings.resources
        )

    def _leave_equal(
        self,
        times: AffineTime,
        equal: IntArray,
        cluster: Cluster,
        fitted: dict[str, Any],
        needed: float,
    ) -> tuple[IntArray, str]:
        """Return a better split than the equal one if it saves more than noise pretends."""
        each_s = times.seconds(equal)
        needed = max(needed, LEAST_SAVING_S / float(each_s.max()))
        budget_s = (1 - needed) * each_s.max()
        # In any other split some worker has more than now, and takes no less than now.
        if each_s.min() > budget_s or not ends_within(times, cluster, float(budget_s)):
            return equal, _no_split_saves(needed, float(each_s.max()))
        needed += self._noise(times, equal, fitted)
        return self._better(times, equal, cluster, needed=needed)

    def _continue(
        self,
        times: AffineTime,
        held: IntArray,
        equal: IntArray,
        cluster: Cluster,
        fitted: dict[str, Any],
        pays: float,
    ) -> tuple[IntArray, str]:
        """Return what follows an unequal split: the way back, a better one, or the same."""
        equal_s = makespan_s(times, equal)
        if makespan_s(times, held) > 0.9 * equal_s:
            needed = 0.5 * (self.min_saving + self._noise(times, equal, fitted))
            if not ends_within(times, cluster, (1 - needed) * equal_s):
                back = self._on_the_way_back(held, equal, cluster)
                return back, f"equal: nothing is sure to save {min(needed, 1):.1%} against it"
        return self._better(times, held, cluster, needed=pays)

    def _on_the_way_back(self, held: IntArray, equal: IntArray, cluster: Cluster) -> IntArray:
        """Return the equal split, or what lies within reach on the way to it."""
        return apportion(equal.astype(np.float64), within_reach(held, cluster, self.reach))

    def _better(
        self, times: AffineTime, held: IntArray, cluster: Cluster, *, needed: float
    ) -> tuple[IntArray, str]:
        """Return the best split if it saves enough against the one held, else that."""
        held_s = makespan_s(times, held)
        # Asked before the best split is looked for, which takes longer and is rarely needed.
        if not ends_within(times, cluster, (1 - needed) * held_s):
            return held, _no_split_saves(needed, held_s)
        best = allocate(times, within_reach(held, cluster, self.reach))
        saving = 1 - makespan_s(times, best) / held_s
        slow = int(np.argmax(times.slope_s))
        speed = 1 / times.slope_s[slow]
        return best, f"saves {saving:.1%}: rank {slow} slowest at {speed:.3g} samples/s"

    def _noise(self, times: AffineTime, equal: IntArray, fitted: dict[str, Any]) -> float:
        """Return the saving against the equal split that noise alone would pretend."""
        slowest = int(np.argmax(times.seconds(equal)))
        return errors_by_chance(len(equal)) * float(self.filter.uncertainty(fitted)[slowest])


def _no_split_saves(needed: float, step_s: float) -> str:
    """Return the reason to hold sizes: by the share that is asked for, or what it amounts to."""
    if needed < 1:
        return f"held: no split would save {needed:.1%}"
    return f"held: steps of {step_s:.2g} s cannot save the {needed * step_s:.2g} s asked for"


def resize_cost_s(before_s: float, timings: StepTimings, expected: AffineTime) -> float:
    r"""Return the seconds that a change costs, after one more first step at new sizes.

    $c \leftarrow 0.7\, c + 0.3\, (T - \hat T)$, where the step took a tenth longer than expected,
    else towards 0: kernels tuned per shape, an allocator that grows, a graph compiled anew.

    Args:
        before_s: the estimate so far, at least 0.
        timings: the first step after a change.
        expected: what the workers were expected to take.
    """
    ran = timings.batch_size > 0
    taken_s = float(timings.compute_s[ran].max())
    expected_s = float(expected.seconds(timings.batch_size)[ran].max())
    excess_s = taken_s - expected_s if taken_s > _USUAL * expected_s else 0.0
    return before_s + _RESIZE_WEIGHT * (excess_s - before_s)
