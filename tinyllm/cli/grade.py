"""`tinyllm grade`: score a test suite by the planted bugs it kills."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from tinyllm.cli.ci_reports import Gate
from tinyllm.cli.extras import need
from tinyllm.cli.options import Badge, Html, Jobs, Junit, On, Only, Reveal, Seed, at_least, set_option
from tinyllm.cli.outputs import check_writable, write
from tinyllm.cli.screen import terminal
from tinyllm.cli.suite import SO_FAR, choose, run_grader, suite_pool
from tinyllm.cli.verdict import show


def grade(
    context: typer.Context,
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Tests, as pytest takes them.")],
    trials: Annotated[
        int,
        typer.Option(
            parser=at_least(1), metavar="N", help="Seeds; a bug is killed if it is killed with each."
        ),
    ] = 1,
    jobs: Jobs = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            parser=at_least(0.1, float),
            metavar="SECONDS",
            help="For one run.",
            show_default="from a clean run",
        ),
    ] = None,
    seed: Seed = 0,
    bug: Only = None,
    bug_set: Annotated[str | None, set_option("course; all with --bug")] = None,
    bugs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plant the bugs of this TOML file.")
    ] = None,
    module: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where the bugs of --bugs go: pkg.mod.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a mutation-testing-report.")
    ] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run all tests on each bug; write bugs by tests as CSV."),
    ] = None,
    reveal: Reveal = False,
    junit: Junit = None,
    badge: Badge = None,
    html: Html = None,
    executor: On = None,
) -> None:
    """Score tests by how many planted bugs they kill. The exit code is the verdict.

    A correct module has one bug planted in it at a time, in a process of its own; nothing on disk is edited.
    Killed means that a test failed which passes without the bug. The verdict is good at a score of 80 % with
    every required bug killed, and none that is no bug.

    The page of --html is whole by itself and needs no network. With --matrix, its table of bugs by tests is
    whole too: else each run ends with its first kill.

    With --executor the runs are spread over a cluster; the tests are sent there, the versions compared. If it
    is lost, what was known by then is written to the file of --json, or to tinyllm-grade-so-far.json.

    Examples: `tinyllm grade tests/own`, `tinyllm grade --bugs mine.toml --module pkg.mod tests`
    """
    from tinyllm.grading import report  # noqa: PLC0415 - heavy
    from tinyllm.grading.grade import Grader  # noqa: PLC0415

    need("pytest", "hypothesis", *(["jinja2"] if html else []))
    console = terminal()
    gate = Gate(junit, badge)
    check_writable(json, matrix, html)
    target, chosen = choose(bug or [], bug_set or ("all" if bug else "course"), bugs, module)
    grader = Grader(
        tuple(paths),
        target,
        chosen,
        trials=trials,
        seed=seed,
        timeout=timeout,
        keep_going=matrix is not None,
    )
    with suite_pool(executor, jobs, grader) as workers:
        result = run_grader(console, grader, gate, workers, json or SO_FAR)
    show(console, result, reveal=reveal)
    with contextlib.ExitStack() as each:  # a report that cannot be written keeps none of the others
        each.callback(gate.publish, result.code)
        if html:
            from tinyllm.cli.html_report import write_page  # noqa: PLC0415 - heavy

            each.callback(write_page, console, html, result, context, whole=matrix is not None)
        if matrix:
            each.callback(write, matrix, report.as_matrix(result))
        if json:
            each.callback(write, json, report.as_json(result))
    raise typer.Exit(result.code)
