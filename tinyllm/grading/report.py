"""Reports of a grade: a mutation-testing-report (Stryker's schema, version 2), a CSV matrix, a badge."""

import contextlib
import csv
import io
import json
import os
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tinyllm.exit_codes import PASS, WEAK
from tinyllm.grading.bugs import Bug
from tinyllm.grading.verdict import THRESHOLD, Grade, Result

STATUS = {"killed": "Killed", "survived": "Survived", "timeout": "Timeout", "invalid": "RuntimeError"}


def as_json(grade: Grade) -> dict[str, Any]:
    """The grade as a mutation-testing-report: a mutant a bug, `Killed` if every trial killed it.

    Each text that bugs are edits of is a file. The change that is no bug is `Ignored`, killed or not, so that
    the score of any reader is ours. A kill of it is named in `statusReason`, `killedBy` and the `reasons` of
    `config`.
    """
    return {
        "schemaVersion": "2",
        "thresholds": {"high": 100, "low": round(THRESHOLD * 100)},
        "files": _files(grade),
        "testFiles": {"": {"tests": [{"id": name, "name": name} for name in grade.killers]}},
        "framework": {
            "name": "tinyllm",
            "version": version("tinyllm-paged"),
            "branding": {"homepageUrl": ""},
            "dependencies": {name: version(name) for name in ("pytest", "hypothesis", "numpy")},
        },
        "system": {
            "ci": bool(os.environ.get("CI")),
            "os": {"platform": platform.system(), "version": platform.release()},
            "cpu": {"logicalCores": os.cpu_count() or 1},
        },
        "config": {
            "module": grade.target.module,
            "tests": list(grade.tests),
            "seeds": grade.seeds,
            "score": grade.score,
            "exitCode": grade.code,
            "reasons": grade.reasons,
            "missed": list(grade.missed),
            "python": platform.python_version(),
        },
    }


def _files(grade: Grade) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for result in grade.results:
        clean = result.bug.clean(grade.target)
        new = {"language": "python", "source": clean.source, "mutants": []}
        files.setdefault(_name(clean.path), new)["mutants"].append(_mutant(result, clean.source))
    return files


def _mutant(result: Result, source: str) -> dict[str, Any]:
    bug = result.bug
    status = "Ignored" if result.label in {"as it must", "objected"} else STATUS[result.status]
    killed = f"killed in {result.kills} of {len(result.trials)} trials"
    reason = f"no bug, yet {killed}" if result.objected else next(iter(result.notes), killed)
    mutant: dict[str, Any] = {
        "id": bug.id,
        "mutatorName": "planted",
        "description": f"{bug.title}: {bug.symptom}",
        "replacement": "\n...\n".join(edit.replace for edit in bug.edits),
        "location": _location(bug, source),
        "status": status,
        "statusReason": reason,
        "killedBy": result.killed_by,
        "testsCompleted": sum(trial.outcome.tests for trial in result.trials),
    }
    if (seconds := result.median("seconds")) is not None:
        mutant["duration"] = round(seconds * 1000)
    return mutant


def _location(bug: Bug, source: str) -> dict[str, dict[str, int]]:
    """The location of the first edit: lines and columns from 1, the end exclusive."""
    start = source.index(bug.edits[0].find)
    end = start + len(bug.edits[0].find)
    return {name: _position(source, at) for name, at in (("start", start), ("end", end))}


def _position(source: str, at: int) -> dict[str, int]:
    line_start = source.rfind("\n", 0, at) + 1
    return {"line": source.count("\n", 0, at) + 1, "column": at - line_start + 1}


def _name(path: str) -> str:
    """The path relative to the current folder, with slashes; outside of it, the file name."""
    full = Path(path)
    return full.relative_to(Path.cwd()).as_posix() if full.is_relative_to(Path.cwd()) else full.name


def as_matrix(grade: Grade) -> str:
    """Bugs by tests as CSV: the number of trials in which each test killed each bug."""
    tests = grade.killers
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["bug", "status", *tests])
    for result in grade.results:
        kills = [{kill.test for kill in trial.outcome.kills} for trial in result.trials]
        writer.writerow([result.bug.id, result.status, *(sum(name in by for by in kills) for name in tests)])
    return text.getvalue()


def as_badge(grade: Grade) -> dict[str, Any]:
    """The score as a badge, in the JSON of a shields.io endpoint (schema version 1)."""
    also = f", and {', '.join(one.bug.id for one in grade.objections)}, no bug" if grade.objections else ""
    return badge("planted bugs", f"{grade.killed} of {len(grade.counted)} killed{also}", grade.code)


def badge(label: str, message: str, code: int) -> dict[str, Any]:
    """A badge coloured by the exit code."""
    colours: dict[int, str] = {PASS: "brightgreen", WEAK: "red"}
    return {"schemaVersion": 1, "label": label, "message": message, "color": colours.get(code, "lightgrey")}


def write(path: Path, content: str | dict[str, Any]) -> None:
    """Write a report atomically: to a temporary file, then renamed. Raises OSError that names the path."""
    text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
    try:
        _write(path, _encode(text))
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _write(path: Path, data: bytes) -> None:
    if path.exists() and not path.is_file():  # a device or a pipe must not be replaced by a file
        path.write_bytes(data)
        return
    path = path.resolve()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".tinyllm-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a power failure must not leave the name without the contents
            file.close()
            Path(file.name).chmod(0o666 & ~_umask())
            Path(file.name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()  # which may fail to write the rest
            Path(file.name).unlink(missing_ok=True)
            raise


def append(path: Path, text: str) -> None:
    """Append to a file, all or nothing; it is created if missing. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        before, rest = path.stat().st_size, memoryview(_encode(text))
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            if path.is_file():
                file.truncate(before)
            raise


def _encode(text: str) -> bytes:
    """The text as UTF-8; lone surrogates, as in file names that are not UTF-8, become escapes."""
    return text.encode("utf-8", "backslashreplace")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
