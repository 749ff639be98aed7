"""A small neural network on past values and on free CPU and memory, after Chen et al."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, Resources, check_fields
from ._base import AbstractPredictor, positive
from ._classical import LocalLevel

MEAN_MEMORY, SQUARE_MEMORY = 0.9, 0.99
"""Adam's two, per descent. The second is shorter than the usual 0.999: runs begin anew often, and
the first hundred descents count."""
DECAY = 0.1
"""Weight decay in units of the learning rate. Half of it overfits noise, three times as much
forgets what inputs explain."""


def fresh_weights(num_inputs: int, num_hidden: int, *, seed: int) -> FloatArray:
    """Return the weights of one network to begin with, whose output is 0 for any input."""
    weights = np.zeros((num_inputs + 2) * num_hidden + 1)
    into = np.random.default_rng(seed).standard_normal(num_inputs * num_hidden)
    weights[: len(into)] = into / math.sqrt(num_inputs)
    return weights


def outputs_of(weights: FloatArray, inputs: FloatArray) -> FloatArray:
    r"""Return what networks say of every row, ``(world_size, num_rows)``.

    Each has one tanh hidden layer: $f(x) = c + \sum_h w_h \tanh(u_h \cdot x + b_h)$. All workers'
    networks begin alike and are computed at once, and none sees another's.

    Args:
        weights: biases included, ``(world_size, num_weights)``.
        inputs: $x$, ``(world_size, num_rows, num_inputs)``.
    """
    into, bias, out, shift = _layers(weights, inputs.shape[2])
    outputs: FloatArray = (np.tanh(inputs @ into + bias) @ out + shift)[..., 0]
    return outputs


def gradient_of(
    weights: FloatArray, inputs: FloatArray, targets: FloatArray, known: FloatArray
) -> FloatArray:
    """Return the gradient of the networks' mean Huber loss, in the shape of ``weights``.

    Args:
        weights: of every worker.
        inputs: rows to learn from.
        targets: what $f$ should be, ``(world_size, num_rows)``. Being off by more than 1 pulls
            no harder than that, or one slow step would undo a hundred usual ones.
        known: 1 for rows that count and 0 for the others, likewise.
    """
    into, bias, out, shift = _layers(weights, inputs.shape[2])
    hidden = np.tanh(inputs @ into + bias)
    off = (hidden @ out + shift)[..., 0] - targets
    num_known = np.maximum(known.sum(axis=1, keepdims=True), 1)
    pull = (np.clip(off, -1, 1) * known / num_known)[..., np.newaxis]
    back = pull * out.transpose(0, 2, 1) * (1 - hidden * hidden)
    layers = (
        inputs.transpose(0, 2, 1) @ back,
        back.sum(axis=1),
        hidden.transpose(0, 2, 1) @ pull,
        pull.sum(axis=1),
    )
    return np.concatenate([layer.reshape(len(weights), -1) for layer in layers], axis=1)


def _layers(
    weights: FloatArray, num_inputs: int
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return weights and biases of the hidden layer and of the output, as views."""
    hidden = (weights.shape[1] - 1) // (num_inputs + 2)
    first = num_inputs * hidden
    return (
        weights[:, :first].reshape(-1, num_inputs, hidden),
        weights[:, np.newaxis, first : first + hidden],
        weights[:, first + hidden : first + 2 * hidden, np.newaxis],
        weights[:, -1:, np.newaxis],
    )


def descend(
    learnt: FloatArray, gradient: FloatArray, *, num_before: FloatArray, rate: float
) -> FloatArray:
    """Return weights and moments after one descent by Adam with decoupled weight decay.

    Args:
        learnt: weights, mean gradient and mean squared gradient, ``(3, world_size, num_weights)``.
        gradient: at these weights.
        num_before: descents each worker's network has behind it, ``(world_size, 1)``.
        rate: learning rate.

    References:
        D. Kingma and J. Ba, ICLR 2015, algorithm 1; the decay: I. Loshchilov and F. Hutter,
        ICLR 2019.
    """
    weights, mean, square = learnt
    mean = MEAN_MEMORY * mean + (1 - MEAN_MEMORY) * gradient
    square = SQUARE_MEMORY * square + (1 - SQUARE_MEMORY) * gradient * gradient
    mean_share = 1 - MEAN_MEMORY ** (num_before + 1)
    square_share = 1 - SQUARE_MEMORY ** (num_before + 1)
    step = (mean / mean_share) / (np.sqrt(square / square_share) + 1e-8)
    return np.stack([(1 - rate * DECAY) * weights - rate * step, mean, square])


NUM_BATCHES = 4
"""Mini-batches that the replay window is dealt into; each step descends once by each of them."""
FAR = 4.0
"""Standard deviations past which an input or a forecast counts as no further."""
LEAST_SPREAD = 0.01
"""Standard deviation taken for the least there is, or rounding errors of a steady series would be
inputs: 1 % of the value, 1 % of a CPU, 1 % of the memory."""
MEMORY = 0.97
"""Weight of the past in the two errors that are compared, per step."""
TRIAL_STEPS = 30
"""Forecasts that a network is judged by before it may decide."""
TAKES_OVER = 0.9
"""Error of the network, as a share of the fallback's, below which it takes over. It decides until
its error is above the fallback's: the gap keeps it from going to and fro."""


@final
@dataclass(frozen=True, slots=True)
class Narx(AbstractPredictor[dict[str, Any]]):
    r"""A network on past values and past and current free CPU and memory; a fallback until then.

    $\hat v_{k+1} = F(v_k, \dots, v_{k-d+1};\ \mathrm{cpu}_{k+1}, \dots, \mathrm{cpu}_{k-d+2};\
    \mathrm{mem}_{k+1}, \dots, \mathrm{mem}_{k-d+2})$, with $F$ a network with one tanh hidden
    layer, one for every worker. $\mathrm{cpu}_{k+1}$ is what is free at the end of step $k$.
    Values and free bytes enter as logarithms, everything standardised over the replay window.

    The network is trained during the run, by Adam on a Huber loss: after every step, once through
    the last ``window`` steps. The fallback decides until the network has proved better. The network
    takes over when its mean error in the logarithm, over its forecasts for about the last thirty
    steps, is below 0.9 times that of the fallback on the same steps. It gives way when its error is
    above the fallback's. ``decides`` says for which workers the network decides.

    Right if free resources explain the speed, as for CPU workers beside jobs that come and go:
    after 200 steps its error is 0.1 to 0.3 times that of ``Ema``, after 100 at most 0.7 times. Also
    right for cycles of a few steps, and without resources, on past values alone. A changed quota is
    known before a step has run under it, if the reading is of this worker alone. Wrong if nothing
    explains the speed: it takes time and gains nothing, and stays within one or two percent of the
    fallback. It knows nothing about loads that never occurred. One update takes 0.3 to 0.7 ms for 8
    workers, and its state has 5 KB per worker.

    If resources are missing in a step, those of the step before count; before the first reading, an
    average.

    Chosen here, as the paper's text was not recovered: lags, width, training, the logarithms, all
    constants, and that it is not trusted before it has proved better. They were chosen on
    simulated workers.

    Args:
        window: number of steps that are replayed, at least 16.
        lags: $d$, number of values of each series that the network sees, at least 1. Without
            resources, it predicts load that switches by the clock up to a period of $2 d$.
        num_hidden: number of hidden units, at least 1.
        learning_rate: of Adam, finite and positive.
        seed: seed of the first weights, at least 0. All workers begin with the same weights.
        fallback: the predictor that decides until the network has proved better, and if it fails.

    Raises:
        ValueError: an argument is out of range.

    References:
        C. Chen et al., arXiv 1806.02508v1, 2018: NARX on CPU and memory. NARX: T. Lin et al.,
        *IEEE Trans. Neural Networks* 7, 1996.
    """

    name: ClassVar[str] = "narx"
    reads_resources: ClassVar[bool] = True

    window: int = 128
    lags: int = 3
    num_hidden: int = 6
    learning_rate: float = 0.01
    seed: int = 0
    fallback: AbstractPredictor[Any] = field(default_factory=LocalLevel)

    def __post_init__(self) -> None:
        check_fields(
            self,
            window=("an integer of at least 16", "128 suits most runs."),
            lags=("an integer of at least 1", "3 suits most runs."),
            num_hidden=("an integer of at least 1", "6 suits most runs."),
            learning_rate=("finite and positive", "Adam's usual is 0.001."),
            seed=("an integer of at least 0", "Any will do."),
        )

    def init(self, world_size: int) -> dict[str, Any]:
        weights = fresh_weights(3 * self.lags, self.num_hidden, seed=self.seed)
        learnt = np.zeros((3, len(weights), world_size))
        learnt[0] = weights[:, np.newaxis]
        return {
            # Logarithm of the value, free CPU, logarithm of free bytes; the newest last.
            "rows": np.zeros((self.window + self.lags, 3, world_size)),
            "learnt": learnt,  # weights and their moments
            "own": np.zeros(world_size),  # the network's forecast, a logarithm
            "errors": np.zeros((2, world_size)),  # the network's and the fallback's
            "decides": np.zeros(world_size, np.bool_),
            "num_steps": np.zeros(world_size, np.int64),
            "num_known": np.zeros(world_size, np.int64),  # steps since resources were first known
            "fallback": self.fallback.init(world_size),
        }

    def update(
        self, state: dict[str, Any], values: FloatArray, resources: Resources | None = None
    ) -> dict[str, Any]:
        logs, measured = np.log(values), ~np.isnan(values)
        row = state["rows"][-1].copy()
        row[0] = logs
        if resources is not None:
            row[1:] = resources.free_cpu, np.log1p(resources.free_memory_bytes)
        fresh = self._judge(state, logs)
        is_known = (state["num_known"] > 0) | (resources is not None)
        fresh["num_known"] = state["num_known"] + is_known
        fresh["rows"] = np.concatenate([state["rows"][1:], row[np.newaxis]])
        # A moment may fall below the smallest float, and is 0 then.
        with np.errstate(under="ignore"):
            fresh["learnt"], fresh["own"] = self._train(state["learnt"], fresh)
        if not measured.all():
            fresh = {name: np.where(measured, fresh[name], state[name]) for name in fresh}
        return {**fresh, "fallback": self.fallback.update(state["fallback"], values, resources)}

    def predict(self, state: dict[str, Any]) -> FloatArray:
        average = self.fallback.predict(state["fallback"])
        return np.where(state["decides"], positive(state["own"]), average)

    def decides(self, state: dict[str, Any]) -> NDArray[np.bool_]:
        """Return for which workers the network decides, and not the fallback."""
        deciding: NDArray[np.bool_] = state["decides"].copy()
        return deciding

    def _judge(self, state: dict[str, Any], logs: FloatArray) -> dict[str, Any]:
        """Compare with what was foreseen, and say who may decide from now on."""
        num_steps = state["num_steps"] + 1
        average = np.log(self.fallback.predict(state["fallback"]))
        off = np.stack([state["own"], average]) - logs
        # Not squared: one slow step, which neither foresaw, would settle the matter for long.
        errors = MEMORY * state["errors"] + (1 - MEMORY) * np.where(num_steps > 1, abs(off), 0.0)
        own, other = errors
        better = (own < TAKES_OVER * other) & (num_steps > TRIAL_STEPS)
        decides = (state["decides"] | better) & (own <= other)
        return {"errors": errors, "decides": decides, "num_steps": num_steps}

    def _train(self, learnt: FloatArray, state: dict[str, Any]) -> tuple[FloatArray, FloatArray]:
        """Return what the networks have learnt after one more step, and their forecasts."""
        inputs, targets, known, mean, spread = self._examples(state)
        learnt = np.ascontiguousarray(learnt.transpose(0, 2, 1))
        num_before = NUM_BATCHES * (state["num_steps"][:, np.newaxis] - 1.0)
        for first in range(NUM_BATCHES):
            part = slice(first, self.window, NUM_BATCHES)
            gradient = gradient_of(learnt[0], inputs[:, part], targets[:, part], known[:, part])
            learnt = descend(
                learnt, gradient, num_before=num_before + first, rate=self.learning_rate
            )
        newest = outputs_of(learnt[0], inputs[:, -1:])[:, 0]
        own = mean + spread * np.clip(newest, -FAR, FAR)
        return learnt.transpose(0, 2, 1), own

    def _examples(
        self, state: dict[str, Any]
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return standardised inputs, one more than targets; which are known; mean and spread.

        The first three by worker and row, the last two those of the logarithms, by worker. What is
        unknown is average.
        """
        rows, is_known = state["rows"], state["num_known"]
        count = np.minimum(np.stack([state["num_steps"], is_known, is_known]), len(rows))
        there = np.arange(len(rows))[:, np.newaxis, np.newaxis] >= len(rows) - count
        count = np.maximum(count, 1)
        mean = np.where(there, rows, 0.0).sum(axis=0) / count
        off = np.where(there, rows - mean, 0.0)
        spread = np.maximum(np.sqrt((off * off).sum(axis=0) / count), LEAST_SPREAD)
        standard = np.clip(off / spread, -FAR, FAR).transpose(2, 0, 1)
        views = np.lib.stride_tricks.sliding_window_view(standard, self.lags, axis=1)
        inputs = views.reshape(*views.shape[:2], -1)
        known = there[self.lags :, 0].T.astype(np.float64)
        return inputs, standard[:, self.lags :, 0], known, mean[0], spread[0]
