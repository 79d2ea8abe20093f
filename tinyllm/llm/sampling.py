"""Which token comes next: the most likely one, or one drawn from the likely ones."""

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
        temperature: what logits are divided by; 0 takes the most likely token, the first of equals.
        top_p: draw from the most likely tokens that have this share of the probability together, in (0, 1].
        seed: of the random numbers, at least 0. Output i of a prompt draws from a stream of its own.

    Raises:
        ValueError: a value out of bounds. TypeError: a seed that is no integer.
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
        """The random numbers of one output."""
        return np.random.default_rng([self.seed, output])

    def pick(self, logits: Logits, random: np.random.Generator) -> int:
        """The next token, given the logits `[vocab]` after the last one.

        Raises ValueError: NaN among the logits.
        """
        best = int(logits.argmax())
        if math.isnan(logits[best]):  # argmax takes NaN for the highest
            raise ValueError("the logits hold NaN: weights or cached values are not finite")
        if self.temperature == 0:
            return best
        with np.errstate(over="ignore"):  # of what is far below the best at a low temperature
            weights = np.exp((logits.astype(np.float64) - logits[best]) / self.temperature)
        order = np.argsort(-weights, kind="stable")
        sums = weights[order].cumsum()
        kept = int(np.searchsorted(sums, self.top_p * sums[-1])) + 1  # the first that reach the share
        at = np.searchsorted(sums[:kept], random.random() * sums[min(kept, len(sums)) - 1], side="right")
        return int(order[min(int(at), len(order) - 1)])


def log_probabilities(logits: Logits) -> NDArray[np.float64]:
    """Logarithms of the probabilities of all tokens, `[..., vocab]` as `logits` is, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide
