"""A small neural network for every worker, and the descent that trains it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .._types import FloatArray

MEAN_MEMORY, SQUARE_MEMORY = 0.9, 0.99
"""Adam's two, per descent. The second is shorter than the usual 0.999: runs begin anew often, and
the first hundred descents count."""
DECAY = 0.1
"""Weight decay in units of the learning rate. Half of it overfits noise, three times as much
forgets what inputs explain."""


@dataclass(frozen=True, slots=True)
class TanhNetwork:
    r"""One tanh hidden layer: $f(x) = c + \sum_h w_h \tanh(u_h \cdot x + b_h)$, by worker.

    Weights are ``(world_size, num_weights)``, inputs ``(world_size, num_rows, num_inputs)``. All
    workers' networks begin alike and are computed at once, and none sees another's.

    Attributes:
        num_inputs: entries of $x$.
        num_hidden: hidden units $h$.
    """

    num_inputs: int
    num_hidden: int

    @property
    def num_weights(self) -> int:
        """Weights of one network, biases included."""
        return (self.num_inputs + 2) * self.num_hidden + 1

    def fresh(self, seed: int) -> FloatArray:
        """Return the weights of one network to begin with, whose output is 0 for any input."""
        weights = np.zeros(self.num_weights)
        into = np.random.default_rng(seed).standard_normal(self.num_inputs * self.num_hidden)
        weights[: len(into)] = into / math.sqrt(self.num_inputs)
        return weights

    def outputs(self, weights: FloatArray, inputs: FloatArray) -> FloatArray:
        """Return $f$ for every row, ``(world_size, num_rows)``."""
        into, bias, out, shift = self._layers(weights)
        outputs: FloatArray = (np.tanh(inputs @ into + bias) @ out + shift)[..., 0]
        return outputs

    def gradient(
        self, weights: FloatArray, inputs: FloatArray, targets: FloatArray, known: FloatArray
    ) -> FloatArray:
        """Return the gradient of the mean Huber loss, in the shape of ``weights``.

        Args:
            weights: of every worker.
            inputs: rows to learn from.
            targets: what $f$ should be, ``(world_size, num_rows)``. Being off by more than 1 pulls
                no harder than that, or one slow step would undo a hundred usual ones.
            known: 1 for rows that count and 0 for the others, likewise.
        """
        into, bias, out, shift = self._layers(weights)
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

    def _layers(self, weights: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return weights and biases of the hidden layer and of the output, as views."""
        first, hidden = self.num_inputs * self.num_hidden, self.num_hidden
        return (
            weights[:, :first].reshape(-1, self.num_inputs, hidden),
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
