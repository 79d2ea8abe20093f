"""Hypothesis profiles `tinyllm-dev`, `tinyllm-ci` and `tinyllm-deep`.

Hypothesis loads this module through its entry point, before any test. Every field is set: under CI Hypothesis
makes its own `ci` profile the parent of whatever leaves a field open, which would take randomness away.
None has a deadline, because a slow machine is not a broken cache.
"""

import os
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

EXAMPLES = {"dev": 100, "ci": 200, "deep": 5000}
STEPS = {"dev": 30, "ci": 40, "deep": 80}
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)


def _database(name: str) -> ExampleDatabase | None:
    """Failing examples are kept where a person will run again; elsewhere a run depends on its seed alone."""
    if name != "dev":
        return None
    return DirectoryBasedExampleDatabase(
        Path(os.environ.get("HYPOTHESIS_STORAGE_DIRECTORY", ".hypothesis"), "examples")
    )


def profile(name: str) -> settings:
    """The settings of profile `dev`, `ci` or `deep`. Raises KeyError for another name."""
    return settings(
        max_examples=EXAMPLES[name],
        stateful_step_count=STEPS[name],
        derandomize=False,
        database=_database(name),
        verbosity=Verbosity.normal,
        phases=PHASES,
        report_multiple_bugs=False,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
        deadline=None,
        print_blob=False,
        backend="hypothesis",
    )


def register() -> None:
    """Register the three; again, when the directory of examples has moved."""
    for name in EXAMPLES:
        settings.register_profile(f"tinyllm-{name}", profile(name))


def current_profile() -> settings:
    """The profile in force if it is one of ours, else `ci`: others may forbid what a machine does."""
    name = settings.get_current_profile_name()
    return settings.get_profile(name if name.startswith("tinyllm-") else "tinyllm-ci")


register()
