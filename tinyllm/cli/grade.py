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
            parser=at_least(1),
            metavar="N",
            help="Number of seeds; a bug counts as killed if each seed kills it.",
        ),
    ] = 1,
    jobs: Jobs = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            parser=at_least(0.1, float),
            metavar="SECONDS",
            help="Time limit of one run.",
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
        str | None, typer.Option(metavar="NAME", help="Module to plant the bugs of --bugs in: pkg.mod.")
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

    One bug at a time is planted in a correct module, in a process of its own; no file on disk is changed. A
    bug is killed if a test fails that passes without it. A pass needs a score of 80 %, every required bug
    killed, and no test that objects to the change that is no bug.

    The page of --html is one file and needs no network. Each run ends with its first kill; with --matrix
    every test runs on every bug, and the page has the whole table.

    With --executor a cluster does the runs; the tests are sent there, and versions are compared. If the
    cluster is lost, the results so far are written to the file of --json or to tinyllm-grade-so-far.json.

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
    with contextlib.ExitStack() as each:  # every report is tried, even if one cannot be written
        each.callback(gate.publish, result.code)
        if html:
            from tinyllm.cli.html_report import write_page  # noqa: PLC0415 - heavy

            each.callback(write_page, console, html, result, context, whole=matrix is not None)
        if matrix:
            each.callback(write, matrix, report.as_matrix(result))
        if json:
            each.callback(write, json, report.as_json(result))
    raise typer.Exit(result.code)
