"""The pytest option `--plant`, and planting in a process that grades.

Pytest loads this wherever tinyllm is installed: nothing heavy is imported before the option is used.
"""

import os

import pytest

VARIABLE = "TINYLLM_PLANT"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option to the group `tinyllm` of `pytest --help`."""
    parser.getgroup("tinyllm", "paged KV caches").addoption(
        "--plant",
        metavar="ID[:IMPL]",
        help="run the tests with this bug planted in the reference cache, for tests that import it from "
        "tinyllm.infer.paged; or with it in place of IMPL: path/to/paged.py, pkg.module or pkg.module:Class",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Plant the bug that `--plant` names or, in a process that grades, the environment.

    This comes before any conftest and before pytest's assertion rewriting, whose hook would find the module
    on disk.
    """
    named = early_config.known_args_namespace.plant
    if named is None and VARIABLE not in os.environ:
        return
    from tinyllm.grading import handover, plant  # noqa: PLC0415 - only with --plant

    try:
        if named is not None and VARIABLE not in os.environ:  # a worker of xdist inherits it
            from tinyllm.grading import by_hand  # noqa: PLC0415

            by_hand.offer_bug(named, early_config.invocation_params.args)
        handover.take()
    except plant.PlantError as error:
        raise pytest.UsageError(f"no bug can be planted: {error}") from error


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report a usage error if no test used the planted cache."""
    if _unused(session.config) and session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print that error, and the processes without the bug."""
    if config.getoption("--plant") is None:
        return
    from tinyllm.grading import handover  # noqa: PLC0415

    for command in handover.missed():
        terminalreporter.write_line(f"tinyllm: no bug was planted in {command}", yellow=True)
    if _unused(config):
        said = f"tinyllm: no test constructed the cache that {config.getoption('--plant')} is planted in"
        terminalreporter.write_line(said, red=True, bold=True)


def _unused(config: pytest.Config) -> bool:
    if config.getoption("--plant") is None or hasattr(config, "workerinput"):
        return False
    from tinyllm.grading import handover  # noqa: PLC0415

    return not handover.used()
