"""`tinyllm grade`: score a test suite by the planted bugs it kills."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from mutants.bugs import Bug
    from mutants.grade import Grader
    from mutants.plant import Target
    from mutants.verdict import Grade, Result, Trial

USAGE = 2

Jobs = Annotated[
    int | None, typer.Option("-j", "--jobs", min=1, help="Runs at the same time.", show_default="cores")
]
Seed = Annotated[int, typer.Option(min=0, help="Of what Hypothesis draws; the first of several trials.")]


def grade(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Tests, as pytest takes them.")],
    trials: Annotated[int, typer.Option(min=1, help="Seeds; a bug is killed if it is killed with each.")] = 1,
    jobs: Jobs = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds for one run.", show_default="from a clean run")
    ] = None,
    seed: Seed = 0,
    bug: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Plant this one alone; may be repeated.")
    ] = None,
    bug_set: Annotated[
        str, typer.Option("--set", metavar="course|wild|all", help="Which bugs to plant.")
    ] = "course",
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
) -> None:
    """Score tests by how many planted bugs they kill. The exit code is the verdict.

    A correct module has one bug planted in it at a time, in a process of its own; nothing on disk is edited.
    Killed means that a test failed which passes without the bug. The verdict is good at a score of 80 % with
    every required bug killed.

    Examples: `tinyllm grade tests/own`, `tinyllm grade --bugs mine.toml --module pkg.mod tests`
    """
    from mutants.grade import Grader  # noqa: PLC0415 - heavy

    console = terminal()
    check_writable(*(path for path in (json, matrix) if path))
    target, chosen = choose(bug or [], bug_set, bugs, module)
    grader = Grader(
        tuple(paths),
        target,
        chosen,
        trials=trials,
        seed=seed,
        jobs=jobs or cores(),
        timeout=timeout,
        keep_going=matrix is not None,
    )
    result = run_grader(console, grader)
    show(console, result)
    save(json, matrix, result)
    raise typer.Exit(result.code)


def terminal(*, stderr: bool = False) -> Console:
    """Where to print; a pipe or a file has no width of its own, and gets one that the tables fit into."""
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 110
    return console


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose(
    ids: Sequence[str], bug_set: str, file: Path | None, module: str | None
) -> "tuple[Target, list[Bug]]":
    """The module and the bugs that the options name; exits with a message when they name nothing."""
    from mutants import bugs, plant  # noqa: PLC0415

    if (file is None) != (module is None):
        fail(USAGE, "--bugs FILE and --module NAME go together")
    if bug_set not in {*bugs.SETS, "all"}:
        fail(USAGE, f"--set {bug_set}: there are {', '.join(bugs.SETS)} and all")
    here = [str(Path.cwd()), str(Path.cwd() / "src")]
    sys.path += here  # as for the tests themselves, a module can lie in the folder one is in, or in its src
    try:
        target = plant.find(module or bugs.MODULE)
        known = {
            bug.id: bug for bug in (bugs.load(file) if file else bugs.load_set("all" if ids else bug_set))
        }
    except (plant.PlantError, bugs.BugError) as error:
        fail(USAGE, str(error))
    finally:
        for folder in here:
            sys.path.remove(folder)
    if unknown := [name for name in ids if name not in known]:
        fail(USAGE, f"there is no bug {', '.join(unknown)}; there are {', '.join(known)}")
    return target, [known[name] for name in ids] if ids else list(known.values())


def run_grader(console: Console, grader: "Grader") -> "Grade":
    """Grade with a progress bar; exits with a message when there is no verdict."""
    from mutants.verdict import GradeError  # noqa: PLC0415

    for path in grader.tests:
        if not Path(path.split("::")[0]).exists():
            fail(USAGE, f"there are no tests at {path}")
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    total = len(grader.bugs) * grader.trials
    with progress:
        task = progress.add_task("clean runs", total=total)

        def listen(kind: str, bug: "Bug | None", trial: "Trial | None") -> None:
            if kind == "bug" and bug is not None and trial is not None:
                progress.update(task, advance=1, description="planted bugs")
                if trial.status != "killed" and not bug.survives:
                    progress.console.print(f"  {bug.id} {_coloured(trial.status)} (seed {trial.seed})")

        try:
            return grader.grade(listen)
        except GradeError as error:
            progress.stop()
            if error.detail:
                terminal(stderr=True).print(escape(error.detail.rstrip()[-4000:]), soft_wrap=True)
            fail(error.code, f"no verdict: {error}")


def show(console: Console, grade: "Grade") -> None:
    """The verdict for a person: the table, what survives and why it matters, the score."""
    if grade.count:
        console.print(_table(grade))
    for result in grade.results if grade.count else []:
        if result.status != "killed" and not result.bug.survives:
            _show_alive(console, grade, result)
        elif result.status == "killed" and result.bug.survives:
            console.print(
                f"\n[yellow]{result.bug.id}[/yellow] is no bug, yet {escape(', '.join(result.killed_by))} "
                f"objects: {escape(result.bug.title)}. The tests ask for more than the contract says."
            )
    killed = sum(result.status == "killed" for result in grade.counted)
    trials = f" in each of {len(grade.seeds)} trials" if len(grade.seeds) > 1 else ""
    score = f"{killed} of {len(grade.counted)} planted bugs killed{trials}: {grade.score:.0%}"
    verdict = "[bold green]PASS[/bold green]" if grade.code == 0 else "[bold red]FAIL[/bold red]"
    seeds = (
        f"seed {grade.seeds[0]}" if len(grade.seeds) == 1 else f"seeds {grade.seeds[0]} to {grade.seeds[-1]}"
    )
    console.print(f"\n{verdict}  {score}  [dim]({grade.count} tests, {seeds})[/dim]")
    for reason in grade.reasons:
        console.print(f"      {escape(reason)}")


def _table(grade: "Grade") -> Table:
    table = Table(
        "bug", "", "what the code does wrong", "killed by", "s", "examples", box=None, pad_edge=False
    )
    for name in ("s", "examples"):
        table.columns[[c.header for c in table.columns].index(name)].justify = "right"
    many = len(grade.seeds) > 1
    for result in grade.results:
        status = _coloured(
            "as it must" if result.bug.survives and result.status == "survived" else result.status
        )
        if many:
            status += f" {result.kills}/{len(result.trials)}"
        seconds, examples = result.median("seconds"), result.median("examples")
        by = sorted({name.rpartition("::")[2] for name in result.killed_by})
        table.add_row(
            result.bug.id,
            status,
            escape(result.bug.title),
            escape(by[0] + (f" and {len(by) - 1} more" if len(by) > 1 else "")) if by else "",
            "" if seconds is None else f"{seconds:.2f}",
            "" if examples is None else f"{examples:.0f}",
        )
    return table


def _coloured(status: str) -> str:
    colour = {"killed": "green", "as it must": "green", "survived": "red"}.get(status, "yellow")
    words = {"survived": "SURVIVES", "as it must": "survives", "timeout": "TIMEOUT", "invalid": "INVALID"}
    return f"[{colour}]{words.get(status, status)}[/{colour}]"


def _show_alive(console: Console, grade: "Grade", result: "Result") -> None:
    bug = result.bug
    console.print(f"\n[bold]{bug.id}[/bold] {_coloured(result.status)}  {escape(bug.title)}")
    console.print(f"  a user would see: {escape(bug.symptom)}")
    notes = {trial.note for trial in result.trials if trial.note}
    for note in sorted(notes):
        console.print(f"  {escape(note)}")
    if bug.caught_by:
        console.print(f"  the kind of test that catches it: {', '.join(bug.caught_by)}")
    if grade.target.module == "tinyllm.infer.paged":
        name = ":".join([bug.id, *grade.target.aliases])
        console.print(f"  see it: pytest --plant {name} {escape(' '.join(grade.tests))}")
    if result.trials and result.trials[0].outcome.excused:
        first = result.trials[0].outcome.excused[0]
        console.print(f"  no kill: {escape(first.test)}: {escape(first.message)}")
    show_diff(console, bug.diff(grade.target.source, Path(grade.target.path).name))


def show_diff(console: Console, text: str) -> None:
    """A unified diff, in colour where there is colour; as plain text it can be fed to `patch`."""
    if not console.is_terminal:
        print(text, end="")  # noqa: T201
        return
    from rich.syntax import Syntax  # noqa: PLC0415

    console.print(Syntax(text, "diff", theme="ansi_dark", background_color="default"))


def check_writable(*paths: Path) -> None:
    """Exit with a message when a report could not be written: before the work, not after it."""
    for path in paths:
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            why = "it is a folder" if path.is_dir() else "its folder is not there, or not writable"
            fail(USAGE, f"{path} cannot be written: {why}")


def save(json: Path | None, matrix: Path | None, grade: "Grade") -> None:
    """Write the reports that were asked for."""
    from mutants import report  # noqa: PLC0415

    contents = {json: report.as_json(grade), matrix: report.as_matrix(grade)}
    for path, content in contents.items():
        if path is not None:
            write(path, content)


def write(path: Path, content: object) -> None:
    """Write one report; exits with a message when it cannot be."""
    from mutants import report  # noqa: PLC0415

    try:
        report.write(path, content)  # type: ignore[arg-type]
    except OSError as error:
        fail(USAGE, f"{path} cannot be written: {error.strerror}")


def fail(code: int, message: str) -> NoReturn:
    """Say what is wrong on stderr, and exit."""
    terminal(stderr=True).print(f"[red]tinyllm:[/red] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)
