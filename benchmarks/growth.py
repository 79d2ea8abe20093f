"""The growth of the time of each call: `python -m benchmarks.growth`.

Four sizes grow, one at a time: the pool, to a million half-used blocks; the live sequences, to ten thousand,
every other one a fork; the length of a sequence, to a hundred thousand positions; and the positions of one
call. Time may grow in proportion to the data that a call visits, a slope of 1 on logarithmic axes. Everything
else must make no difference, a slope of 0.

The sizes take turns, so that a busy machine slows all of them. A figure is the processor time of one thread,
for each size the lower quartile of its turns: the clock of a virtual machine sometimes loses most of a turn,
so the fastest turn can be wrong. `--svg FILE` draws the times.

It takes two to three minutes and 2.6 GB; `--quick` takes seconds, at sizes too small for a verdict. It needs
the extra `check`, and `bench` for `--svg`. Exit code: 0 every target is met, 1 one is missed.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time_ns

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.axes import AXES, NONE, PROPORTION, YARDSTICK, Axis
from benchmarks.cache import keep_freed_memory
from benchmarks.calls import BLOCK, DIMS, HEADS, LAYERS, SHORT, Timed

LEAST = 5  # turns of each size at least

SPARE = 0.1
"""The margin of a slope over 0, 1 or its yardstick.

The upper half of three decades is one and a half, over which 0.1 is a factor of 1.4: larger sizes miss the
processor's caches more often. A part that grows with one power more is found once it is three tenths of the
call at the largest size, or four tenths in a range of four decades. A logarithm is not found.
"""

STYLES = {
    "append": ("#0072b2", "o", "-"),
    "append, copying": ("#d55e00", "s", "-"),
    "append, refused": ("#000000", "x", "--"),
    "fork": ("#009e73", "^", "-"),
    "free": ("#e69f00", "v", ":"),
    "gather": ("#cc79a7", "D", "-"),
    "block_table": ("#7f5f00", "P", "-."),
    "blocks_needed": ("#56b4e9", "*", "--"),
    "stats": ("#777777", ".", "-"),
}
"""The drawn calls: colour, marker and line, distinct in grey too."""


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The power of the size that the time grows with: the slope of their logarithms.

    It is a least-squares fit to the upper half of the range, from its geometric mean on. At smaller sizes the
    fixed cost of a call hides growth. The range must not depend on the times, which would bias the fit.
    """
    middle = (min(sizes) * max(sizes)) ** 0.5
    upper = [(size, time) for size, time in zip(sizes, seconds) if size >= middle]
    x, y = np.log(upper).T
    return float(np.polyfit(x, y, 1)[0])


@dataclass(frozen=True)
class Line:
    """The times of a call on one axis, whether they may grow, and the steepest slope that passes.

    `most` is None for a yardstick, and for sizes too small for a verdict.
    """

    call: str
    axis: str
    grows: bool
    most: float | None
    sizes: list[int]
    seconds: list[float]

    @property
    def slope(self) -> float:
        """The fitted slope."""
        return slope(self.sizes, self.seconds)

    def verdict(self) -> str:
        """`met` or `missed`; empty without a limit."""
        if self.most is None:
            return ""
        return "met" if self.slope <= self.most else "missed"


def take_turns(timed: Sequence[Timed], seconds: float) -> list[float]:
    """Seconds of one call of each: the lower quartile of the turns within `seconds`."""
    took: list[list[float]] = [[] for _ in timed]
    stop, turn = perf_counter() + seconds, 0
    while turn < LEAST or perf_counter() < stop:
        for i in range(len(timed))[:: 1 if turn % 2 else -1]:
            timed[i].reset()
            start = thread_time_ns()
            timed[i].act()
            took[i].append((thread_time_ns() - start) / 1e9 / timed[i].calls)
        turn += 1
    for one in timed:
        one.end()
    return [float(np.quantile(times, 0.25)) for times in took]


def most(right: str, yardsticks: dict[str, float]) -> float | None:
    """The steepest slope that passes for an allowed growth; None for a yardstick."""
    if right == YARDSTICK:
        return None
    if right in yardsticks:
        return max(1.0, yardsticks[right]) + SPARE
    return {NONE: 0.0, PROPORTION: 1.0}[right] + SPARE


def measure(axis: Axis, quick: bool, seconds: float, tell: Callable[[], object]) -> list[Line]:
    """Measure every call of an axis for `seconds` each; `tell` is called after each."""
    places = [axis.build(size) for size in axis.sizes(quick)]
    sizes = [place.size for place in places]
    lines: list[Line] = []
    yardsticks: dict[str, float] = {}
    for call, (right, operation) in axis.calls.items():
        took = take_turns([operation(place) for place in places], seconds)
        if right == YARDSTICK:
            yardsticks[call] = slope(sizes, took)
        steepest = None if quick else most(right, yardsticks)
        lines.append(Line(call, axis.name, right != NONE, steepest, sizes, took))
        tell()
    return lines


def table(lines: Sequence[Line]) -> Table:
    """A table of slopes: a row for each call, a column for each axis."""
    last = {line.axis: "⁰¹²³⁴⁵⁶⁷⁸⁹"[round(np.log10(line.sizes[-1]))] for line in lines}
    spans = {axis: f"{axis}\nto 10{power}" for axis, power in last.items()}
    shown = Table(
        title="the power with which the time of a call grows; ∝ where it may", show_edge=False, pad_edge=False
    )
    shown.add_column("call", no_wrap=True)
    for head in (*spans.values(), "µs at\nleast", "at\nmost"):
        shown.add_column(head, justify="right")
    shown.add_column("target")
    for call in dict.fromkeys(line.call for line in lines):
        row = {line.axis: line for line in lines if line.call == call}
        times = [time for line in row.values() for time in line.seconds]
        verdicts = {line.verdict() for line in row.values()}
        verdict = next((one for one in ("missed", "met") if one in verdicts), "")
        shown.add_row(
            call,
            *(cell(row[axis]) if axis in row else "" for axis in spans),
            microseconds(min(times)),
            microseconds(max(times)),
            verdict,
        )
    return shown


def cell(line: Line) -> str:
    """A slope, with `∝` if time may grow, and with the limit if it is exceeded."""
    may = "∝ " if line.grows else ""
    if line.verdict() == "missed":
        return f"[bold red]{may}{line.slope:.3f} > {line.most:.3f}"
    return f"{may}{round(line.slope, 2) + 0.0:.2f}"  # adding 0.0 turns -0.00 into 0.00


def microseconds(seconds: float) -> str:
    """Microseconds with at least two digits."""
    return f"{seconds * 1e6:.2g}" if seconds < 1e-5 else f"{seconds * 1e6:,.0f}"


def draw(path: Path, lines: Sequence[Line]) -> None:
    """Draw the times of the calls in `STYLES` as SVG, a panel for each axis."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "tinyllm", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot, ticker  # noqa: PLC0415

    figure, panels = pyplot.subplots(2, 2, figsize=(9, 6.6), sharey=True, layout="constrained")
    handles = {}
    for panel, axis in zip(panels.flat, AXES):
        shown = [line for line in lines if line.axis == axis.name and line.call in STYLES]
        for line in shown:
            color, marker, dashes = STYLES[line.call]
            (handles[line.call],) = panel.loglog(
                line.sizes, line.seconds, dashes, color=color, marker=marker, markersize=4, linewidth=1.1
            )
        first, last = shown[0].sizes[0], shown[0].sizes[-1]
        x = np.array([first, first * (last / first) ** 0.42])
        for power, text, place in ((0, "no growth", "right"), (1, " in proportion", "left")):
            y = 1.5e-4 * (x / first) ** power  # above every line that starts low
            panel.plot(x, y, color="#888888", linewidth=1.4, linestyle=":")
            panel.text(x[1], y[1], text, ha=place, va="bottom", color="#555555")
        panel.set_xlabel(axis.label)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.minorticks_off()
        panel.yaxis.set_major_formatter(ticker.EngFormatter("s"))
    for panel in panels[:, 0]:
        panel.set_ylabel("processor time of one call")
    shape = f"{LAYERS} layers, {HEADS} heads of {DIMS}, blocks of {BLOCK} positions"
    figure.suptitle(f"{shape}; a sequence has {SHORT} positions, unless that is what grows", fontsize=9)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, handlelength=3
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="of turns, for each call (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, few turns, and no verdict")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the times")
    options = parser.parse_args(arguments)
    gc.disable()  # a collection would count against the current call
    keep_freed_memory()
    console = Console()
    lines: list[Line] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=sum(len(axis.calls) for axis in AXES))
        for axis in AXES:
            bar.update(task, description=axis.name)
            seconds = 0 if options.quick else options.seconds
            lines += measure(axis, options.quick, seconds, lambda: bar.advance(task))
    console.print(table(lines))
    if options.svg:
        draw(options.svg, lines)
    return int(any(line.verdict() == "missed" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
