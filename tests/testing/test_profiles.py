"""Profiles hold every field, whatever CI says, and leave the bare names to others."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Verbosity, settings

from tinyllm.testing.profiles import EXAMPLES, PHASES, STEPS, current_profile, profile

SHOW = """
import json
import sys
from hypothesis import settings
from hypothesis._settings import all_settings

def fields(name):
    one = settings.get_profile(name)
    return {field: repr(getattr(one, field)) for field in all_settings}

bare = {}
for name in ("default", "ci", "dev", "deep"):
    try:
        bare[name] = fields(name)
    except Exception as error:
        bare[name] = type(error).__name__
print(json.dumps([{name: fields(name) for name in sys.argv[1:]}, bare, settings.get_current_profile_name()]))
"""


def shown(with_kit: bool, **env: str) -> Any:
    """All fields of all profiles in a fresh interpreter; CI is set, or not, before Hypothesis loads."""
    clean = {key: value for key, value in os.environ.items() if key not in {"CI", "TF_BUILD"}}
    clean = {key: value for key, value in clean.items() if not key.startswith(("GITHUB_", "HYPOTHESIS_"))}
    names = [f"tinyllm-{name}" for name in EXAMPLES] if with_kit else []
    plugins = {} if with_kit else {"HYPOTHESIS_NO_PLUGINS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW, *names],
        env={**clean, **env, **plugins},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def here() -> Any:
    return shown(True)


@pytest.fixture(scope="module")
def in_ci() -> Any:
    return shown(True, CI="1")


def test_every_field_is_the_same_under_ci(here: Any, in_ci: Any) -> None:
    assert here[0] == in_ci[0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_field_is_what_the_profile_says(name: str, here: Any) -> None:
    expected = {
        "max_examples": EXAMPLES[name],
        "stateful_step_count": STEPS[name],
        "derandomize": False,
        "verbosity": Verbosity.normal,
        "phases": PHASES,
        "report_multiple_bugs": False,
        "suppress_health_check": (HealthCheck.too_slow, HealthCheck.data_too_large),
        "deadline": None,
        "print_blob": False,
        "backend": "hypothesis",
    }
    found = dict(here[0][f"tinyllm-{name}"])
    database = found.pop("database")
    assert found == {field: repr(value) for field, value in expected.items()}
    assert ("DirectoryBased" in database) == (name == "dev")
    assert (database == "None") == (name != "dev")


@pytest.mark.parametrize("ci", [{}, {"CI": "1"}], ids=["here", "in CI"])
def test_the_bare_names_are_as_hypothesis_left_them(ci: dict[str, str]) -> None:
    found, untouched = shown(True, **ci), shown(False, **ci)
    assert found[1:] == untouched[1:]
    assert found[1]["dev"] == "InvalidArgument"


def test_examples_are_kept_where_hypothesis_keeps_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HYPOTHESIS_STORAGE_DIRECTORY", str(tmp_path))
    assert str(tmp_path / "examples") in repr(profile("dev").database)
    monkeypatch.delenv("HYPOTHESIS_STORAGE_DIRECTORY")
    assert str(Path(".hypothesis", "examples")) in repr(profile("dev").database)


def test_an_unknown_profile_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        profile("nightly")


@pytest.mark.parametrize(("name", "used"), [("tinyllm-deep", "deep"), ("default", "ci")])
def test_our_profile_in_force_is_used_and_no_other(name: str, used: str) -> None:
    before = settings.get_current_profile_name()
    settings.load_profile(name)
    try:
        assert current_profile().max_examples == EXAMPLES[used]
    finally:
        settings.load_profile(before)
