"""The chat template of a model file, a foreign program; needs the extra `model`.

Jinja's sandbox protects the machine, but limits neither memory nor time. So a template runs in a process of
its own (`rendering`) with limits. The process starts with the first conversation, and ends when its standard
input closes, also when its parent dies.
"""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Timer

from tinyllm.llm.gguf_file import ModelError
from tinyllm.llm.marks import Messages

SECONDS = 10.0
"""Time limit of one call of `render`, with the start of the process."""
MEGABYTES = 512
"""Memory limit of the process; Windows and macOS have none, and only `LETTERS` limits it there."""
LETTERS = 1 << 20
"""Limit on the output of a template, besides four times the letters of the messages."""


class Template:
    """A chat template.

    Args:
        file: the name of the model file, for messages.
        source: the template.
        names: variables besides the conversation, such as `eos_token`.
    """

    def __init__(self, file: str, source: str, names: Mapping[str, str]) -> None:
        self.source = source
        self._file = file
        self._names = dict(names)
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, conversations: Sequence[Messages], *, ask: bool = True) -> list[str | ModelError]:
        """The text of each conversation, or the error of the template.

        Args:
            conversations: messages with "role" and "content", oldest first.
            ask: whether to end with the start of an answer.

        Raises:
            ModelError: the template exceeds the limits of time, memory or output.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
            weakref.finalize(self, _end, self._process)
        request = {"source": self.source, "names": self._names, "ask": ask}
        request |= {"conversations": [[dict(m) for m in messages] for messages in conversations]}
        # The process ends itself soon after, even if this one is killed.
        request |= {"seconds": SECONDS + 1, "megabytes": MEGABYTES, "letters": LETTERS}
        line, in_time = _ask(self._process, json.dumps(request))
        if not line:
            _end(self._process)
            late = f"takes more than {SECONDS:g} seconds"
            raise self._error(f"ends its process, which has {MEGABYTES} MB of memory" if in_time else late)
        answer = json.loads(line)
        if isinstance(answer, str):
            raise self._error(answer)
        return [text if error is None else self._error(f"fails: {error}") for text, error in answer]

    def _error(self, why: str) -> ModelError:
        return ModelError(f"{self._file} has a chat template that {why}")


Process = subprocess.Popen[bytes]


def _start() -> Process:
    from tinyllm.llm import rendering  # noqa: PLC0415 - for its name

    # -P: nothing in the user's folder is imported.
    command = [sys.executable, "-P", "-c", f"from {rendering.__name__} import serve; serve()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=environment)


def _ask(process: Process, request: str) -> tuple[bytes, bool]:
    """The answer, empty if the process ended, and whether it came in time."""
    late = Timer(SECONDS, process.kill)
    late.start()
    try:
        assert process.stdin and process.stdout  # noqa: S101 - they are pipes
        process.stdin.write(request.encode() + b"\n")
        process.stdin.flush()
        return process.stdout.readline(), late.is_alive()
    except BrokenPipeError:
        return b"", late.is_alive()
    except BaseException:  # Ctrl-C: the answer must not be read as one to the next request
        process.kill()
        _end(process)
        raise
    finally:
        late.cancel()


def _end(process: Process) -> None:
    for pipe in filter(None, (process.stdin, process.stdout)):
        with suppress(BrokenPipeError):
            pipe.close()
    process.wait()
