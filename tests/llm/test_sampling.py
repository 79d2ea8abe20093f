from collections import Counter

import numpy as np
import pytest

from tinyllm.llm.sampling import Logits, Sampling, log_probabilities


def logits(*values: float) -> Logits:
    return np.array(values, np.float32)


def draws(sampling: Sampling, row: Logits, n: int = 4000) -> Counter[int]:
    random = sampling.stream()
    return Counter(sampling.pick(row, random) for _ in range(n))


def test_greedy_takes_the_first_of_equals() -> None:
    random = Sampling().stream()
    assert Sampling().pick(logits(1, 3, 3, 2), random) == 1
    assert Sampling(top_p=0.1).pick(logits(-np.inf, -5), random) == 1


def test_shares_are_those_of_the_softmax() -> None:
    row = np.log(logits(0.5, 0.25, 0.125, 0.125))
    found = draws(Sampling(temperature=1.0, seed=3), row)
    for token, share in enumerate((0.5, 0.25, 0.125, 0.125)):
        assert abs(found[token] / 4000 - share) < 5 * (share * (1 - share) / 4000) ** 0.5


def test_temperature_flattens_and_sharpens() -> None:
    row = np.log(logits(0.8, 0.2))
    hot, cold = (draws(Sampling(temperature=t), row)[1] for t in (4.0, 0.25))
    share = 0.2**0.25 / (0.2**0.25 + 0.8**0.25)
    assert abs(hot / 4000 - share) < 0.04
    assert 0 < cold < 60  # a share of 1 in 257
    assert draws(Sampling(temperature=1e-30), row, 50) == {0: 50}  # without a warning


@pytest.mark.parametrize(
    ("top_p", "left"), [(0.01, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.88, 4), (1, 4)]
)
def test_top_p_leaves_the_fewest_that_reach_it(top_p: float, left: int) -> None:
    row = np.log(logits(0.125, 0.5, 0.25, 0.125))
    assert set(draws(Sampling(1.0, top_p), row)) == {1, 2, 0, 3} - {2, 0, 3}.difference([2, 0, 3][: left - 1])


def test_top_p_that_is_reached_exactly_takes_no_more() -> None:
    assert draws(Sampling(1.0, 0.5), logits(0, 0)).keys() == {0}
    assert draws(Sampling(1.0, 0.75), logits(0, 0, 0, 0)).keys() == {0, 1, 2}


def test_minus_infinity_is_never_drawn() -> None:
    assert draws(Sampling(temperature=1.0), logits(0, -np.inf, 0)).keys() == {0, 2}


def test_a_seed_and_an_output_fix_the_draws() -> None:
    row = np.zeros(50, np.float32)
    first = [Sampling(1.0, seed=7).pick(row, r) for r in [Sampling(1.0, seed=7).stream(2)] for _ in range(20)]
    again = [Sampling(1.0, seed=7).pick(row, r) for r in [Sampling(1.0, seed=7).stream(2)] for _ in range(20)]
    assert first == again
    for other in (Sampling(1.0, seed=7).stream(1), Sampling(1.0, seed=8).stream(2)):
        assert first != [Sampling(1.0).pick(row, other) for _ in range(20)]


def test_nan_is_refused() -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="NaN"):
            Sampling(temperature).pick(logits(1, np.nan, 2), Sampling().stream())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
    ],
)
def test_bounds_are_named(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)  # type: ignore[arg-type]


def test_log_probabilities_sum_to_one() -> None:
    rows = np.random.default_rng(0).normal(0, 30, (3, 500)).astype(np.float32)
    found = log_probabilities(rows)
    assert found.dtype == np.float64
    np.testing.assert_allclose(np.exp(found).sum(axis=-1), 1, rtol=1e-12)
    np.testing.assert_allclose(np.diff(found), np.diff(rows.astype(np.float64)), atol=1e-9)
