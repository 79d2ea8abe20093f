"""Pytest's side of planting: `pytest --plant s06 tests/own` lets a person see why a bug survives.

A process that grades names the text in the environment instead, so that processes started by the tests, such
as the workers of xdist, have it too. Planting happens before any conftest is loaded, and ahead of pytest's
assertion rewriting, whose hook would otherwise find the module on disk.
"""

import os
from pathlib import Path

import pytest

VARIABLE = "TINYLLM_PLANT"
"""Names a JSON file with the fields of `plant.Target`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--plant` to the group `tinyllm`."""
    group = parser.getgroup("tinyllm", "paged KV caches")
    group.addoption("--plant", metavar="ID", help="run the tests with this bug planted in the cache")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Plant, if asked to."""
    named = early_config.known_args_namespace.plant
    if named:
        os.environ[VARIABLE] = str(_write(named))
    if VARIABLE in os.environ:
        _install(Path(os.environ[VARIABLE]))


def _write(bug_id: str) -> Path:
    import atexit  # noqa: PLC0415 - all of this only when asked for: the plugin is loaded by every pytest
    import json  # noqa: PLC0415
    import shutil  # noqa: PLC0415
    import tempfile  # noqa: PLC0415
    from dataclasses import asdict  # noqa: PLC0415

    from mutants import bugs, plant  # noqa: PLC0415

    known = {bug.id: bug for bug in bugs.load_set("all")}
    if bug_id not in known:
        raise pytest.UsageError(f"--plant: there is no bug {bug_id!r}; there are {', '.join(known)}")
    target = plant.find(bugs.MODULE)
    folder = tempfile.mkdtemp(prefix="tinyllm-plant-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "target.json")
    planted = target.with_source(known[bug_id].apply(target.source))
    path.write_text(json.dumps(asdict(planted)), encoding="utf-8")
    return path


def _install(path: Path) -> None:
    import json  # noqa: PLC0415

    from mutants import plant  # noqa: PLC0415

    try:
        plant.install(plant.Target(**json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, plant.PlantError) as error:
        raise pytest.UsageError(f"no bug can be planted: {error}") from error
