"""The benchmark of growth: slopes, verdicts, and that what is timed stays as it was. No time is asserted."""

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import calls, growth
from benchmarks.axes import AXES, NONE, PROPORTION, YARDSTICK, Axis, growing
from benchmarks.calls import Operation, Place, Timed
from benchmarks.growth import LEAST, STYLES, Line, most, slope, take_turns
from tinyllm.infer.paged import PagedKVCache

SIZES = [round(10 ** (third / 3)) for third in range(6, 16)]
YARDSTICKS = {"a copy": 1.3, "a list": 0.9}


def line(right: str, share: float, power: float, rest: float = 0.0) -> Line:
    """A call of a second at the largest size: a share of it grows by one power, and the rest by another."""
    seconds = [
        share * (size / SIZES[-1]) ** power + (1 - share) * (size / SIZES[-1]) ** rest for size in SIZES
    ]
    return Line("it", "length", right != NONE, most(right, YARDSTICKS), SIZES, seconds)


@pytest.mark.parametrize("power", [0, 0.5, 1, 2, 3])
def test_the_slope_of_a_power_is_the_power(power: float) -> None:
    assert math.isclose(line(NONE, 1, power).slope, power, abs_tol=1e-9)


def test_the_slope_is_that_of_the_upper_half() -> None:
    """What a call costs anyway hides growth where it is small."""
    bent = [1.0] * 5 + [(size / SIZES[5]) ** 2 for size in SIZES[5:]]
    assert math.isclose(slope(SIZES, bent), 2)
    assert slope(SIZES[::-1], bent[::-1]) == pytest.approx(2)


@pytest.mark.parametrize(
    ("right", "share", "power", "rest", "verdict"),
    [
        (NONE, 0.2, 1, 0, "met"),
        (NONE, 0.4, 1, 0, "missed"),
        (NONE, 1, 1, 0, "missed"),
        (NONE, 0.5, 2, 0, "missed"),
        (PROPORTION, 1, 0, 0, "met"),
        (PROPORTION, 0.2, 2, 1, "met"),
        (PROPORTION, 0.4, 2, 1, "missed"),
        (PROPORTION, 1, 2, 1, "missed"),
        ("a copy", 1, 1.35, 0, "met"),
        ("a copy", 1, 1.45, 0, "missed"),
        ("a list", 1, 1.05, 0, "met"),  # a gentle yardstick forbids nothing that is in proportion
        ("a list", 1, 2, 0, "missed"),
        (YARDSTICK, 1, 3, 0, ""),
    ],
)
def test_verdicts(right: str, share: float, power: float, rest: float, verdict: str) -> None:
    assert line(right, share, power, rest).verdict() == verdict


class Clock:
    """Processor time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(growth, "thread_time_ns", clock)
    yield clock
    gc.enable()  # which the benchmark turns off


def taking(clock: Clock, cost: Callable[[int], int]) -> Operation:
    """An operation that takes so long at a size."""

    def act(size: int) -> None:
        clock.now += cost(size)

    return lambda at: Timed(lambda: act(at.size))


@pytest.mark.parametrize(
    ("right", "cost", "code", "shown"),
    [
        (NONE, lambda _: 1000, 0, "0.00"),
        (NONE, lambda n: 1000 * n, 1, "1.000 > 0.100"),
        (PROPORTION, lambda n: 1000 * n, 0, "∝ 1.00"),
        (PROPORTION, lambda n: n * n, 1, "∝ 2.000 > 1.100"),
    ],
)
def test_a_call_that_grows_too_fast_is_told_and_fails(
    right: str,
    cost: Callable[[int], int],
    code: int,
    shown: str,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def place(size: int) -> Place:
        return Place(PagedKVCache(1, 1, 1, 1, 1), size)

    axis = Axis("pool", "blocks", (3, 6), place, growing(right, {"planted": taking(clock, cost)}))
    monkeypatch.setattr(growth, "AXES", (axis,))
    assert growth.main(["--seconds", "0"]) == code
    row = next(line for line in capsys.readouterr().out.splitlines() if "planted" in line)
    assert f" {shown} " in row
    assert ("missed" if code else "met") in row
    assert growth.main(["--seconds", "0", "--quick"]) == 0
    assert "missed" not in capsys.readouterr().out


def test_turns_are_reset_and_ended(clock: Clock) -> None:
    """What is reset is not timed, a turn that the clock lost does not count."""
    told: list[str] = []
    took = iter([0, 4000, 4000, 5000, 900_000])

    def act() -> None:
        told.append("act")
        clock.now += next(took)

    def reset() -> None:
        told.append("reset")
        clock.now += 77

    one = Timed(act, reset, calls=4, end=lambda: told.append("end"))
    assert take_turns([one], 0) == [pytest.approx(1e-6)]
    assert told == ["reset", "act"] * LEAST + ["end"]


def seen(pool: PagedKVCache) -> tuple[object, ...]:
    """Tables, lengths and counts."""
    pool.check()
    named = {name: value for name, value in vars(calls).items() if name.isupper() and isinstance(value, int)}
    known = [seq_id for seq_id in {*named.values(), *range(100)} if seq_id in pool._seqs]
    return pool.stats(), {
        i: (pool.block_table(i).tolist(), pool.seq_len(i), pool.seq_len(i, 1)) for i in known
    }


@pytest.mark.parametrize(
    ("axis", "call"),
    [pytest.param(axis, call, id=f"{axis.name}-{call}") for axis in AXES for call in axis.calls],
)
def test_a_timed_call_leaves_the_pool_as_it_was(axis: Axis, call: str) -> None:
    place = axis.build(axis.sizes(quick=True)[1])
    before = seen(place.pool)
    take_turns([axis.calls[call][1](place)], 0)
    assert seen(place.pool) == before


def test_a_quick_run_shows_and_draws_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert growth.main(["--quick", "--svg", str(tmp_path / "growth.svg")]) == 0
    gc.enable()
    cells = [[cell.strip(" ∝") for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    rows = {row[0]: row[1:] for row in cells if len(row) == 8}
    assert rows.keys() == {call for axis in AXES for call in axis.calls}
    for call, row in rows.items():
        slopes = [float(cell) for cell in row[:4] if cell]
        assert len(slopes) == sum(call in axis.calls for axis in AXES)
        assert all(math.isfinite(slope) for slope in slopes)
        least, most = (float(cell.replace(",", "")) for cell in row[4:6])
        assert 0 < least <= most
    shown = set(ElementTree.parse(tmp_path / "growth.svg").getroot().itertext())
    assert {axis.label for axis in AXES} | STYLES.keys() <= shown
    assert any("µs" in text for text in shown)
