"""Grade a suite from the command line: what `grade` and `check` share."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from tinyllm.cli.ci_reports import Gate
from tinyllm.cli.executor import Pool, pool
from tinyllm.cli.outputs import write
from tinyllm.cli.screen import fail, progress_bar, terminal
from tinyllm.cli.verdict import coloured
from tinyllm.exit_codes import LOST, USAGE

if TYPE_CHECKING:
    from tinyllm.grading.bugs import Bug
    from tinyllm.grading.grade import Grader
    from tinyllm.grading.plant import Target
    from tinyllm.grading.verdict import Grade, Trial
    from tinyllm.grading.worker import Job

SO_FAR = Path("tinyllm-grade-so-far.json")  # unless --json names a file


def choose(
    ids: Sequence[str], bug_set: str, file: Path | None, module: str | None
) -> "tuple[Target, list[Bug]]":
    """The module and the bugs that the options name; exits with a message if there are none."""
    from tinyllm.grading import bugs, plant  # noqa: PLC0415

    if (file is None) != (module is None):
        fail(USAGE, "--bugs FILE and --module NAME go together")
    if bug_set not in {*bugs.SETS, "all"}:
        fail(USAGE, f"--set {bug_set}: expected one of {', '.join(bugs.SETS)}, all")
    try:
        target = plant.find(module) if module else bugs.reference()
        known = {bug.id: bug for bug in (bugs.load(file) if file else bugs.load_set(bug_set))}
    except (plant.PlantError, bugs.BugError) as error:
        fail(USAGE, str(error))
    if unknown := [name for name in ids if name not in known]:
        where = f" in {file}" if file else "" if bug_set == "all" else f" in --set {bug_set}"
        fail(USAGE, f"there is no bug {', '.join(unknown)}{where}; expected one of {', '.join(known)}")
    return target, [known[name] for name in dict.fromkeys(ids)] if ids else list(known.values())


@contextlib.contextmanager
def suite_pool(executor: str | None, jobs: int | None, grader: "Grader") -> Iterator[Pool]:
    """The executor for the grader's suite; exits with a message if the suite or the cluster is missing."""
    from tinyllm.jobs import bundle  # noqa: PLC0415

    for path in grader.tests:
        if not Path(path.split("::")[0]).exists():
            fail(USAGE, f"there are no tests at {path}")

    def packed() -> bundle.Bundle:
        return bundle.of_suite(grader.tests, grader.target.module, Path(grader.target.path))

    with pool(executor, jobs, packed) as workers:
        yield workers


def run_grader(
    console: Console, grader: "Grader", gate: Gate, workers: Pool, so_far: Path = SO_FAR
) -> "Grade":
    """Grade with a progress bar, and hand the grade to the gate; exits with a message without a verdict.

    If the workers are lost, the results so far are written to `so_far`.
    """
    from tinyllm.grading import report  # noqa: PLC0415
    from tinyllm.grading.verdict import GradeError  # noqa: PLC0415

    grader.place = workers.place
    if workers.away:
        _same_tests(grader, gate, workers)
    progress = progress_bar(console)
    total = 2 * len(grader.bugs) * grader.trials  # a first run, and what confirms it
    with progress:
        task = progress.add_task("clean runs", total=total)

        def listen(kind: str, bug: "Bug | None", trial: "Trial | None") -> None:
            if kind == "run":
                progress.update(task, advance=1, description="planted bugs")
            elif bug is not None and trial is not None:
                progress.update(task, advance=1)
                if (trial.status == "killed") == bug.survives:  # not as it must be
                    status = "objected" if bug.survives else trial.status
                    progress.console.print(f"  {bug.id} {coloured(status)} (seed {trial.seed})")

        try:
            gate.grade = grader.grade(listen, workers.executor)
        except GradeError as error:
            progress.stop()
            if error.so_far:
                write(so_far, report.as_json(error.so_far))
                console.print(f"The results so far are in {escape(str(so_far))}.", soft_wrap=True)
            if error.detail:
                terminal(stderr=True).print(escape(error.detail.rstrip()[-4000:]), soft_wrap=True)
            gate.refuse(error.code, f"no verdict: {error}", error.detail)
    if not gate.grade.count and all(map(_without_a_test, grader.tests)):
        gate.grade = None
        gate.refuse(USAGE, f"there is no test file in {', '.join(grader.tests)}")
    return gate.grade


def _same_tests(grader: "Grader", gate: Gate, workers: Pool) -> None:
    """Exit with a message, before any run, if the cluster collects other numbers of tests than this machine.

    The clean runs report tests that cannot be collected.
    """
    from tinyllm.grading.worker import Job  # noqa: PLC0415
    from tinyllm.jobs.cluster import ClusterError  # noqa: PLC0415

    def job(place: Callable[[str], str]) -> Job:
        target = replace(grader.target, path=place(grader.target.path))
        tests = tuple(map(place, grader.tests))
        return Job(tests, target, grader.seed, options=(*grader.options, "--collect-only"))

    away = workers.executor.submit(collected, job(workers.place))
    here = collected(job(str))
    try:
        there = away.result()
    except ClusterError as error:
        gate.refuse(LOST, f"no verdict: {error}")
    if None not in {here, there} and here != there:
        gate.refuse(
            USAGE,
            f"{here} tests are collected here, but {there} on the cluster: some of their files are not among "
            "those sent there (the files of the tests, and the Python files of the project)",
        )


def collected(job: "Job") -> int | None:
    """The number of tests; None if they cannot be collected."""
    from tinyllm.grading.grade import BASELINE_TIMEOUT  # noqa: PLC0415 - heavy
    from tinyllm.grading.worker import run  # noqa: PLC0415
    from tinyllm.jobs.process import call  # noqa: PLC0415

    ended = call(run, job, timeout=BASELINE_TIMEOUT)
    return ended.value.tests if ended.how == "done" and not ended.value.broken else None


def _without_a_test(path: str) -> bool:
    """Whether a folder has no test file, by pytest's default names."""
    folder = Path(path)
    return folder.is_dir() and not any(
        one.match(pattern) for one in folder.rglob("*.py") for pattern in ("test_*.py", "*_test.py")
    )
