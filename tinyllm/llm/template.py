"""The chat template of a model file, a program of somebody else's; needs the extra `model`.

Jinja's sandbox keeps a template from the machine, but not from taking all memory, or from running for ever.
So it runs in a process of its own (`rendering`), whose memory and time are bounded. The process starts with
the first conversation, waits for the next one, and ends with its standard input, whoever asks is gone or not.
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
"""Of the conversations that are given at once; the start of the process counts."""
MEGABYTES = 512
"""Of the process; where the system knows no such bound (Windows, macOS), `LETTERS` is the only one."""
LETTERS = 1 << 20
"""Of what a template makes, beside four times the letters of the messages."""


class Template:
    """A chat template.

    Args:
        file: the name of the model file, for messages.
        source: the template.
        names: what it may speak of beside the conversation, such as `eos_token`.
    """

    def __init__(self, file: str, source: str, names: Mapping[str, str]) -> None:
        self.source = source
        self._file = file
        self._names = dict(names)
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, conversations: Sequence[Messages], *, ask: bool = True) -> list[str | ModelError]:
        """The text of each conversation, or why the template fails on it.

        Args:
            conversations: messages with "role" and "content", oldest first.
            ask: whether an answer is to follow.

        Raises:
            ModelError: the template takes more time or memory, or makes more text, than it may.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
            weakref.finalize(self, _end, self._process)
        request = {"source": self.source, "names": self._names, "ask": ask}
        request |= {"conversations": [[dict(m) for m in messages] for messages in conversations]}
        # The process ends itself soon after, should this one be killed meanwhile.
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

    # -P: what lies in the user's folder is not imported.
    command = [sys.executable, "-P", "-c", f"from {rendering.__name__} import serve; serve()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=environment)


def _ask(process: Process, request: str) -> tuple[bytes, bool]:
    """The answer, empty if the process ended, and whether it was in time."""
    late = Timer(SECONDS, process.kill)
    late.start()
    try:
        assert process.stdin and process.stdout  # noqa: S101 - they are pipes
        process.stdin.write(request.encode() + b"\n")
        process.stdin.flush()
        return process.stdout.readline(), late.is_alive()
    except BrokenPipeError:
        return b"", late.is_alive()
    except BaseException:  # Ctrl-C: the answer must not be taken for that to another request
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
