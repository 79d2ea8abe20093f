"""The pytest option `--plant`, and what a process that grades has planted.

Pytest loads this in every project that has tinyllm installed: so nothing heavy is imported, and nothing
happens unless it is asked for.
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
    """Plant a bug, if asked to by `--plant` or, in a process that grades, by the environment.

    Before any conftest is loaded, and ahead of pytest's assertion rewriting, whose hook would otherwise find
    the module on disk.
    """
    named = early_config.known_args_namespace.plant
    if named is None and VARIABLE not in os.environ:
        return
    from tinyllm.grading import handover, plant  # noqa: PLC0415 - not where nobody asks for it

    try:
        if named is not None and VARIABLE not in os.environ:  # a worker of xdist has been handed it
            from tinyllm.grading import by_hand  # noqa: PLC0415

            by_hand.offer_bug(named, early_config.invocation_params.args)
        handover.take()
    except plant.PlantError as error:
        raise pytest.UsageError(f"no bug can be planted: {error}") from error


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A bug that nobody meets has not survived: that is an error of usage."""
    if _unused(session.config) and session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say so, and which processes the bug was not planted in."""
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
