"""Choose the next token: the most likely one, or a random draw."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyllm.infer.arguments import as_integer

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """How to choose among the next tokens.

    Args:
        temperature: divisor of the logits; 0 takes the most likely token, the first of equal ones.
        top_p: draw from the most likely tokens that together hold this share of the probability, in (0, 1].
        seed: seed of the random numbers, at least 0. Each output of a prompt has its own stream.

    Raises:
        ValueError: a value is out of bounds. TypeError: the seed is no integer.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; it must be finite and at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if as_integer("seed", self.seed) < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")

    def stream(self, output: int = 0) -> np.random.Generator:
        """The random generator of one output."""
        return np.random.default_rng([self.seed, output])

    def pick(self, logits: Logits, random: np.random.Generator) -> int:
        """The next token, given the logits `[vocab]` after the last one.

        Raises ValueError: a logit is NaN.
        """
        best = int(logits.argmax())
        if math.isnan(logits[best]):  # argmax returns a NaN, if there is one
            raise ValueError("the logits hold NaN: weights or cached values are not finite")
        if self.temperature == 0:
            return best
        with np.errstate(over="ignore"):  # from logits far below the best at a low temperature
            weights = np.exp((logits.astype(np.float64) - logits[best]) / self.temperature)
        order = np.argsort(-weights, kind="stable")
        sums = weights[order].cumsum()
        kept = int(np.searchsorted(sums, self.top_p * sums[-1])) + 1  # the first that reach the share
        at = np.searchsorted(sums[:kept], random.random() * sums[min(kept, len(sums)) - 1], side="right")
        return int(order[min(int(at), len(order) - 1)])


def log_probabilities(logits: Logits) -> NDArray[np.float64]:
    """The log probabilities of all tokens, float64 in the shape `[..., vocab]` of `logits`."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide
