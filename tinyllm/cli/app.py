"""The command group, and the short commands. Heavy imports wait until a command runs."""

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tinyllm import __version__
from tinyllm.cli import model
from tinyllm.cli.batch import batch
from tinyllm.cli.check import check
from tinyllm.cli.clashes import Exact
from tinyllm.cli.generate import generate
from tinyllm.cli.grade import grade
from tinyllm.cli.power import power
from tinyllm.cli.reach import reach
from tinyllm.cli.replay import replay
from tinyllm.cli.screen import fail, show_diff, terminal
from tinyllm.cli.show import show
from tinyllm.cli.soak import soak
from tinyllm.exit_codes import USAGE

app = typer.Typer(
    name="tinyllm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes of check and grade: 0 pass; 1 a law is broken, or the tests are too weak; 2 nothing "
    "there, or not importable; 3 the clean tests fail or are flaky; 4 a bug is invalid; 5 timeouts decide; 6 "
    "the cluster is lost.",
)
app.command(cls=Exact)(check)
app.command(cls=Exact)(grade)
app.command(cls=Exact)(power)
app.command(cls=Exact)(soak)
app.command(cls=Exact)(reach)
app.command(cls=Exact)(replay)
app.command(cls=Exact)(show)
app.command(cls=Exact)(generate)
app.command(cls=Exact)(batch)
app.add_typer(model.app, name="model")


def _version(asked: bool) -> None:
    if asked:
        print(f"tinyllm {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def tinyllm(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback has seen to it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A paged KV cache, the kit that proves any such cache right, and the bugs that prove any tests good.

    New here? `tinyllm start` writes a stub of your own cache, `tinyllm tests` lists
    what it has to do, `tinyllm check paged.py` says how far you are.
    """
    context.call_on_close(partial(sys.path.__setitem__, slice(None), list(sys.path)))
    with contextlib.suppress(OSError):  # the folder is gone
        # As with pytest and `python -m`, modules in the current folder and in its src can be imported.
        sys.path += [str(Path.cwd()), str(Path.cwd() / "src")]
    if sys.flags.optimize and context.invoked_subcommand in {"check", "grade"}:
        fail(USAGE, "Python ignores assertions here (-O, PYTHONOPTIMIZE), and tests report failures by them")


@app.command()
def laws(
    law: Annotated[int | None, typer.Argument(metavar="[N]", help="One law; such as 8.")] = None,
) -> None:
    """Print the twenty laws in short, or one of them. docs/laws.md has the full text."""
    from tinyllm.testing.laws import LAWS  # noqa: PLC0415

    if law is not None and law not in LAWS:
        fail(USAGE, f"there is no law {law}; expected 1 to {max(LAWS)}")
    console = terminal()
    for number in LAWS if law is None else [law]:
        title, text = LAWS[number]
        console.print(f"[bold]{number:2}  {title:14}[/bold] {escape(text)}", highlight=False)


@app.command()
def bugs(
    bug_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="One bug, whole; such as s06.")] = None,
) -> None:
    """List the planted bugs, or show one: its symptom, its diff, and the shortest program that shows it."""
    from rich.table import Table  # noqa: PLC0415

    from tinyllm.grading import bugs as planted  # noqa: PLC0415

    console = terminal()
    known = {bug.id: bug for bug in planted.load_set("all")}
    if bug_id is None:
        table = Table("id", "what the code does wrong", "what a user would see", box=None, pad_edge=False)
        table.add_column("caught by", overflow="fold")
        for bug in known.values():
            name = f"[bold]{bug.id}[/bold]" + ("\n[red]required[/red]" if bug.required else "")
            table.add_row(name, escape(bug.title), escape(bug.symptom), "\n".join(bug.caught_by))
        console.print(table)
        return
    if bug_id not in known:
        fail(USAGE, f"there is no bug {bug_id!r}; expected one of {', '.join(known)}")
    bug = known[bug_id]
    console.print(
        f"[bold]{bug.id}[/bold]  {escape(bug.title)}{'  [red]required[/red]' if bug.required else ''}"
    )
    facts = {
        "symptom": bug.symptom,
        "why tests miss it": bug.cause,
        "breaks": ", ".join(f"law {law}" for law in bug.laws),
        "caught by": ", ".join(bug.caught_by),
        "source": bug.source,
        "see why it survives": f"pytest --plant {bug.id} YOUR_TESTS",
    }
    for name, text in facts.items():
        if text:
            console.print(f"  {name:20} {escape(text)}", soft_wrap=True)
    if bug.witness:
        console.print("\nThe shortest program that shows it:\n")
        console.print("".join(f"  {line}\n" for line in bug.witness.strip().splitlines()), markup=False)
    show_diff(console, bug.diff(planted.reference()))


@app.command()
def tests() -> None:
    """List the ten tests of the catalogue: what each checks, and why it matters downstream."""
    from rich.padding import Padding  # noqa: PLC0415

    from tinyllm.testing.catalogue import CATALOGUE  # noqa: PLC0415

    console = terminal()
    for entry in CATALOGUE.values():
        laws = ", ".join(map(str, entry.laws))
        console.print(f"[bold]{entry.name}[/bold]  [dim]{entry.kind}, laws {laws}[/dim]")
        console.print(Padding(escape(entry.checks), (0, 0, 0, 4)))
        console.print(Padding(f"[dim]matters for:[/dim] {escape(entry.matters)}", (0, 0, 0, 4)))


@app.command()
def start(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The folder to write to; it is created if missing.")
    ] = Path(),
) -> None:
    """Write a stub of paged.py, a first test, and settings. Files that exist are not changed."""
    from tinyllm.cli import stub  # noqa: PLC0415

    console = terminal()
    try:
        written = 0
        for path, new in stub.write(folder):
            written += new
            console.print(f"  {'wrote' if new else 'left '} {escape(str(path))}")
    except OSError as error:
        fail(USAGE, f"{error.filename or folder} cannot be written: {error.strerror}")
    if not written:
        fail(USAGE, f"all files exist already in {folder}; nothing was written")
    console.print("Now: `tinyllm tests`, then `tinyllm check paged.py`.")


@app.command()
def diff(file: Annotated[Path, typer.Argument(metavar="FILE", help="Your paged.py.")]) -> None:
    """Compare your paged.py with the reference. Best read once yours passes."""
    import difflib  # noqa: PLC0415

    from tinyllm.grading import bugs as planted  # noqa: PLC0415

    try:
        yours = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        fail(USAGE, f"{file} cannot be read: {getattr(error, 'strerror', None) or error}")
    reference = planted.reference().source.splitlines(keepends=True)
    text = "".join(difflib.unified_diff(yours, reference, str(file), "the reference"))
    show_diff(terminal(), text or "The two are the same.\n")
