"""Pages made from code and docstrings; the hooks of mkdocs.yml.

`python docs/hooks.py` writes two pages into this folder: the trace language and the command line. Only the
site has the bugs (from TOML), the interfaces (from docstrings), Getting it (from README.md), and the linked
source files.
"""

import html
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tinyllm import render
from tinyllm.cli.app import app
from tinyllm.grading import bugs
from tinyllm.testing import trace

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SETS = {
    "course": (
        "Course",
        "The bugs that are graded by default. Two are required: a suite that misses them fails.",
    ),
    "wild": ("Wild", "Faults that caches in production really shipped, each with its source."),
    "engine": ("Engine", "Faults in what engines ask beyond the ten methods: laws 16 to 20."),
    "field": (
        "Field",
        "Faults of a second cache, built as engines are; each with why tests tend to miss it.",
    ),
}
INTERFACES = {
    "cache": ("The caches", ("tinyllm.infer.paged", "tinyllm.infer.kvcache", "tinyllm.infer.planning")),
    "kit": (
        "The kit",
        (
            "tinyllm.testing.contract",
            "tinyllm.testing.check",
            "tinyllm.testing.adapters.loading",
            "tinyllm.testing.machine",
            "tinyllm.testing.run",
            "tinyllm.testing.shrink",
            "tinyllm.testing.laws",
            "tinyllm.testing.adapters.subprocess_cache",
            "tinyllm.testing.adapters.block_manager",
            "tinyllm.render",
        ),
    ),
    "grader": (
        "The grader",
        (
            "tinyllm.grading.bugs",
            "tinyllm.grading.grade",
            "tinyllm.grading.verdict",
            "tinyllm.grading.report",
            "tinyllm.grading.junit",
        ),
    ),
    "model": (
        "The model",
        (
            "tinyllm.infer.attention",
            "tinyllm.llm.llama",
            "tinyllm.llm.generate",
            "tinyllm.llm.sampling",
            "tinyllm.llm.beams",
            "tinyllm.llm.batch",
            "tinyllm.llm.tokenizer",
            "tinyllm.llm.weights",
            "tinyllm.llm.model",
        ),
    ),
}
OUTSIDE = re.compile(r"\]\((?:\.\./)+((?!\.\.)[\w./-]+\.\w+(?:#[\w-]+)?)\)")
"""A link from a page to a repository file that is no page."""
SHOWN_BY = {
    "README.md#getting-it": "getting.md",
    "mutants/README.md": "bugs/index.md",
    "tinyllm/testing/contract.py": "api/kit.md",
}
"""Links to files that have a page on the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation."""
    parts = {
        name: pages for entry in config.nav or [] if isinstance(entry, dict) for name, pages in entry.items()
    }
    parts["Reference"] += [{title: f"api/{name}.md"} for name, (title, _) in INTERFACES.items()]
    shown = [
        {title: [f"bugs/{bug.id}.md" for bug in bugs.load_set(name)]} for name, (title, _) in SETS.items()
    ]
    config.nav = [*(config.nav or [])[:-1], {"Bugs": ["bugs/index.md", *shown]}, (config.nav or [])[-1]]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    made = {"getting.md": getting_page(), "bugs/index.md": bugs_page()}
    made |= {f"api/{name}.md": interface_page(*what) for name, what in INTERFACES.items()}
    for bug in bugs.load_set("all"):
        made |= bug_page(bug)
    for path in sorted(linked()):
        made[source_name(path)] = source_page(path)
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
        if name.startswith("sources/"):
            files.src_uris[name].inclusion = files.src_uris[name].inclusion.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Redirect links to repository files to their pages."""
    up = "../" * page.file.src_uri.count("/")
    return OUTSIDE.sub(
        lambda found: f"]({up}{source_name(found[1])})" if outside(found[1]) else found[0], markdown
    )


def linked() -> set[str]:
    """The repository files that pages link to, without a page of their own."""
    pages = [path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")]
    links = {link for text in pages for link in OUTSIDE.findall(text) if outside(link)}
    return {link.partition("#")[0] for link in links - SHOWN_BY.keys()}


def outside(link: str) -> bool:
    """Whether a link leads to a repository file that is no page."""
    path = link.partition("#")[0]
    return (ROOT / path).is_file() and not (DOCS / path).is_file()


def source_name(link: str) -> str:
    """The name of a file's page; MkDocs ignores names with a leading dot."""
    return SHOWN_BY.get(link) or f"sources/{link.partition('#')[0].lstrip('.')}.md"


def source_page(path: str) -> str:
    """A page with the text of a repository file."""
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    return f"# {path}\n\n````{Path(path).suffix[1:]}\n{text}\n````\n"


def getting_page() -> str:
    """The page Getting it, from README.md."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return "# Getting it\n" + readme.partition("\n## Getting it\n")[2].partition("\n## ")[0]


def trace_page() -> str:
    """The page of the trace language, from its module."""
    first, _, rest = (trace.__doc__ or "").partition("\n")
    forms = ", ".join(f"`{name}`" for name in trace.FORMS)
    used = """
A witness of a planted bug is a trace, and so are a shrunk counterexample and a golden file.
[`tinyllm replay`](commands.md#tinyllm-replay) runs one and checks every law after each line;
[`tinyllm show`](commands.md#tinyllm-show) draws what each line does.
"""
    return f"# The trace\n\n{first}\n{rest.rstrip()}\n\nForms of an append: {forms}.\n{used}"


def bugs_page() -> str:
    """The page with all bugs in tables."""
    parts = ["# The bugs\n", "One at a time is planted in a correct cache. What each of them teaches: "]
    parts[1] += "what a user would see, the law it breaks, and the shortest program that shows it.\n"
    for name, (title, about) in SETS.items():
        parts += [f"## {title}\n\n{about}\n", "| bug | what the code does wrong | what a user would see |"]
        parts.append("|---|---|---|")
        for bug in bugs.load_set(name):
            required = " **required**" if bug.required else ""
            parts.append(f"| [{bug.id}]({bug.id}.md){required} | {cell(bug.title)} | {cell(bug.symptom)} |")
        parts.append("")
    return "\n".join(parts)


def bug_page(bug: bugs.Bug) -> dict[str, str]:
    """The page of a bug, and the picture of its witness."""
    required = " It is required: a suite that misses it fails." if bug.required else ""
    survives = " It is no bug: no good suite may object to it." if bug.survives else ""
    facts = {
        "what a user would see": cell(bug.symptom),
        "why tests miss it": bug.cause,
        "breaks": ", ".join(law_link(law) for law in bug.laws),
        "caught by": ", ".join(f"`{name}`" for name in bug.caught_by),
        "known from": re.sub(r"(https?://[^\s,;)]+)", r"<\1>", bug.source),
    }
    rows = "".join(f"- **{name}**: {text}\n" for name, text in facts.items() if text)
    text = (
        f"# {bug.id}: {bug.title}\n\n{(required + survives).strip()}\n\n{rows}\n"
        f"## What changes\n\n```diff\n{bug.diff(bugs.reference())}```\n"
    )
    pages = {}
    if bug.witness:
        pages[f"bugs/{bug.id}.svg"] = render.svg(
            render.frames(bug.witness), title=f"{bug.id}, on a right cache"
        )
        text += (
            f"\n## The shortest program that shows it\n\n```text\n{bug.witness.strip()}\n```\n\n"
            f"What a right cache does with it:\n\n![The program above on a right cache]({bug.id}.svg)\n"
        )
    text += f"\nTo see why it survives tests of yours: `pytest --plant {bug.id} YOUR_TESTS`.\n"
    return pages | {f"bugs/{bug.id}.md": text}


def law_link(law: int) -> str:
    """A link to a law by its number."""
    heading = re.search(rf"^## ({law}\. .*)$", (DOCS / "laws.md").read_text(encoding="utf-8"), re.MULTILINE)
    if heading is None:
        raise ValueError(f"docs/laws.md has no law {law}")
    slug = re.sub(r"[^\w-]+", "-", heading[1].lower().replace(".", "")).strip("-")
    return f"[law {law}](../laws.md#{slug})"


def commands_page() -> str:
    """The command line: each command, its arguments and options."""
    group: Any = typer.main.get_command(app)
    parts = ["# The command line\n", group.help + "\n", group.epilog + " See [exit codes](exit-codes.md).\n"]
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        parts += [command_part(f"tinyllm {name}", command)]
        parts += [command_part(f"tinyllm {name} {one}", what) for one, what in (inner or {}).items()]
    return "\n".join(parts)


def command_part(name: str, command: Any) -> str:
    """One command of the page."""
    arguments = [one.metavar for one in command.params if one.param_type_name == "argument"]
    inner = ["COMMAND"] if hasattr(command, "commands") else []
    usage = " ".join([name, "[OPTIONS]", *arguments, *inner])
    lines = [
        f"## `{name}`\n",
        f"```text\n{usage}\n```\n",
        f"{command.help or ''}\n",
    ]
    rows = [row(parameter) for parameter in command.params if getattr(parameter, "help", None)]
    if rows:
        lines += ["|  | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def row(parameter: Any) -> str:
    """One argument or option."""
    names = ", ".join(parameter.opts) if parameter.param_type_name == "option" else ""
    shown = html.escape(f"{names} {parameter.metavar or ''}".strip()).replace("|", "&#124;")
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    said = "" if default is None or default is False or callable(default) else f"`{default}`"
    return f"| <code>{shown}</code> | {cell(parameter.help)} | {'' if parameter.required else said} |"


def interface_page(title: str, modules: tuple[str, ...]) -> str:
    """The public names of some modules, by mkdocstrings."""
    return f"# {title}\n\n" + "\n".join(f"::: {name}\n" for name in modules)


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("[", "\\[").replace("<", "&lt;")


WRITTEN = {"trace.md": trace_page, "commands.md": commands_page}
"""The generated pages in this folder, readable without the site."""

if __name__ == "__main__":
    for name, page in WRITTEN.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
