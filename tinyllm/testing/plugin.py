"""Pytest options of the kit.

Pytest loads this in every project that has tinyllm installed: so nothing heavy is imported, and nothing
happens unless it is asked for.
"""

import os
import random
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the group `tinyllm` to `pytest --help`."""
    group = parser.getgroup("tinyllm", "paged KV caches")
    group.addoption(
        "--cache-impl",
        metavar="IMPL",
        default=None,
        help="the cache to check with `--pyargs tinyllm.testing`: pkg.module, pkg.module:Class or "
        "path/to/paged.py; a path is given with `=`, or pytest takes its folder's configuration",
    )
    group.addoption(
        "--shards",
        type=int,
        default=1,
        help="how many machines, each drawing other programs (default 1); with -n",
    )
    group.addoption(
        "--shard-seed", type=int, default=None, help="seed of shard 0; shard i adds i (default: drawn)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Settle the seed: given, or from the controller of xdist, or Hypothesis' own, or drawn."""
    _refuse_a_space(shlex.split(os.environ.get("PYTEST_ADDOPTS", "")))
    _refuse_a_space(config.invocation_params.args)
    shards = config.getoption("--shards")
    if shards < 1:
        raise pytest.UsageError(f"--shards is {shards}; it must be at least 1")
    given = config.getoption("--shard-seed")
    if given is None:
        given = getattr(config, "workerinput", {}).get("tinyllm_shard_seed")
    if given is None:
        given = config.getoption("--hypothesis-seed", None)
    config.stash[SEED] = int(given) if str(given).isdigit() else random.getrandbits(32)


def _refuse_a_space(args: Sequence[str | os.PathLike[str]]) -> None:
    """Before it knows our options, pytest takes a path after a space for that of tests."""
    words = [os.fspath(arg) for arg in args]
    for option, given in pairwise(words):
        if option == "--cache-impl" and Path(given.partition("::")[0]).exists():
            raise pytest.UsageError(
                f"--cache-impl {given}: write --cache-impl={given}; after a space pytest takes the path for "
                "one of its arguments, and the configuration of its folder for the one of this run"
            )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a worker of xdist: all must collect the same tests."""
    node.workerinput["tinyllm_shard_seed"] = node.config.stash[SEED]


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the seed, when machines were asked for."""
    asked = [config.getoption(name) is not None for name in ("--cache-impl", "--shard-seed")]
    if any(asked) or config.getoption("--shards") > 1:
        return f"tinyllm: --shard-seed={config.stash[SEED]}"
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `cache_shard` once a shard."""
    if "cache_shard" in metafunc.fixturenames:
        count = metafunc.config.getoption("--shards")
        ids = [f"shard-{i}" for i in range(count)]
        metafunc.parametrize("cache_shard", range(count), ids=ids, indirect=True)


@pytest.fixture
def cache_shard(request: pytest.FixtureRequest) -> int:
    """The seed of this shard: `run_machine(factory, shard(CacheMachine, cache_shard, factory), ...)`."""
    return request.config.stash[SEED] + int(request.param)


@pytest.fixture(scope="session")
def cache_factory(request: pytest.FixtureRequest) -> Any:
    """The cache that `--cache-impl` names; the reference by default."""
    from tinyllm.testing.adapters.loading import DEFAULT, ImplementationError, load  # noqa: PLC0415
    from tinyllm.testing.contract import capabilities  # noqa: PLC0415 - heavy

    try:
        factory = load(request.config.getoption("--cache-impl") or DEFAULT)
        capabilities(factory)
    except (ImplementationError, ValueError) as error:
        if hasattr(request.config, "workerinput"):  # of xdist, which takes an exit for a crash
            pytest.fail(f"--cache-impl: {error}", pytrace=False)
        pytest.exit(f"--cache-impl: {error}", returncode=2)
    return factory
