"""`tinyllm soak`: run the machine for hours, on all cores or on a cluster, and keep every finding."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinyllm.cli.executor import pool
from tinyllm.cli.extras import need
from tinyllm.cli.options import REFERENCE, Exec, Impl, Jobs, On, at_least, chosen
from tinyllm.cli.outputs import check_writable
from tinyllm.cli.reach import NOTHING, Report
from tinyllm.cli.screen import fail, terminal
from tinyllm.exit_codes import USAGE

if TYPE_CHECKING:
    from tinyllm.jobs.bundle import Bundle

FOLDER = Path("tinyllm-traces")
UNITS = {"h": 3600, "m": 60, "s": 1}


def duration(text: str) -> float:
    """Seconds of `8h`, `1h30m`, `90s` or `90`."""
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not text.strip() or parts is None:
        raise typer.BadParameter(f"{text} is not a time such as 8h, 1h30m, 90s or 90")
    seconds = sum(float(part or 0) * unit for part, unit in zip(parts.groups(), UNITS.values()))
    if seconds < 1:
        raise typer.BadParameter(f"{text} is less than a second")
    return seconds


def shard_of(text: str) -> tuple[int, int]:
    """The numbers of `2/8`."""
    parts = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    number, of = map(int, parts.groups()) if parts else (0, 0)
    if not 1 <= number <= of:
        raise typer.BadParameter(f"{text} is not a shard such as 2/8, from 1/8 to 8/8")
    return number, of


def soak(
    impl: Impl = REFERENCE,
    command: Exec = None,
    lasts: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Time to search: 8h, 1h30m, 90s.")
    ] = "10m",
    shard: Annotated[
        str, typer.Option(metavar="i/N", help="Search part i of N; shards of one --seed share no program.")
    ] = "1/1",
    jobs: Jobs = None,
    executor: On = None,
    seed: Annotated[
        int | None,
        typer.Option(parser=at_least(0), metavar="N", help="Seed of the programs.", show_default="random"),
    ] = None,
    traces: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder of counterexamples: they run first, and new ones are added."
        ),
    ] = FOLDER,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")] = None,
) -> None:
    """Search for a program that breaks a law, until the time is up.

    Programs are longer, pools larger and sequences more than in `tinyllm check`. The traces in --traces run
    first. New counterexamples are written there at once and then shortened; machines can share the folder.
    The report shows what the programs reached and what none reached. Ctrl-C ends the search with its report.

    The exit code is 0 if every law holds; 1 if one is broken, or the cache ended its process; 6 if the
    cluster is lost.

    Examples: `tinyllm soak --for 8h`, `tinyllm soak paged.py --shard 2/8 --seed 7`
    """
    import secrets  # noqa: PLC0415 - heavy

    from tinyllm.cli.search import Search  # noqa: PLC0415
    from tinyllm.grading import report as files  # noqa: PLC0415

    need("pytest", "hypothesis")
    console = terminal()
    impl = chosen(impl, command)
    part, seconds = shard_of(shard), duration(lasts)
    check_writable(json)
    if os.path.lexists(traces) and not traces.is_dir():
        fail(USAGE, f"--traces {traces} is no folder")
    report = Report(impl, secrets.randbelow(2**32) if seed is None else seed, shard)
    work = Search(console, report, part, traces)
    with pool(executor, jobs, lambda: _bundle(impl)) as workers:
        work.run(workers, seconds)
    if report.code == 0 and not report.programs:
        work.stop(USAGE, NOTHING)
    if json:
        try:
            files.write(json, report.as_json())
        except OSError as error:
            work.stop(USAGE, f"{json} cannot be written: {error.strerror}")
    work.show()
    if work.problem:
        fail(report.code, work.problem)
    raise typer.Exit(report.code)


def _bundle(impl: str) -> "Bundle":
    from tinyllm.jobs import bundle  # noqa: PLC0415 - heavy

    path = Path(impl.partition(":")[0])
    return bundle.of_file(path) if path.is_file() else bundle.nothing()
