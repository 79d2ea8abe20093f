"""The process that runs chat templates; `template` starts it. It imports nothing of this package."""

import json
import signal
import sys
from functools import lru_cache
from typing import Any

Message = dict[str, str]


class TooLong(Exception):  # noqa: N818 - no fault of ours
    """A template writes more letters than allowed."""


def serve() -> None:
    """Answer each line of JSON with a line of JSON, until stdin closes."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        megabytes, letters = request.pop("megabytes"), request.pop("letters")
        bound(megabytes << 20)
        alarm(request.pop("seconds"))
        try:
            conversations = request.pop("conversations")
            answer: Any = [rendered(messages, letters, **request) for messages in conversations]
        except MemoryError:
            answer = f"takes more than {megabytes} MB of memory"
        except TooLong as error:
            answer = f"makes more than {error.args[0]:,} letters"
        print(json.dumps(answer), flush=True)  # noqa: T201 - to the parent process
        alarm(0)


def bound(size: int) -> None:
    """Limit the address space of this process in bytes, if the system can."""
    try:
        import resource  # noqa: PLC0415 - POSIX only

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (size if hard < 0 else min(size, hard), hard))
    except (ImportError, OSError, ValueError):
        return


def alarm(seconds: float) -> None:
    """End this process after some seconds, if the system can; 0 cancels."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


@lru_cache(1)
def compiled(source: str) -> Any:
    """The compiled template, with the settings and the function that templates expect."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - the extra may be missing

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


def rendered(
    messages: list[Message], letters: int, source: str, names: Message, *, ask: bool
) -> tuple[str, str | None]:
    """The text of a conversation and the error of the template, or None. Raises MemoryError, TooLong."""
    most = letters + 4 * sum(len(text) for message in messages for text in message.values())
    text = ""
    try:
        for piece in compiled(source).generate(messages=messages, add_generation_prompt=ask, **names):
            text += piece
            if len(text) > most:
                break
    except MemoryError:
        raise
    except Exception as error:  # foreign code can raise anything
        return "", str(error) or type(error).__name__
    if len(text) > most:
        raise TooLong(most)
    return text, None
