"""What the commands exit with."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The verdict, as an exit code."""

    PASS = 0
    WEAK = 1
    USAGE = 2
    BASELINE = 3
    INVALID = 4
    TIMEOUT = 5
    LOST = 6
    INTERRUPTED = 130
    UNREAD = 141


PASS, WEAK, USAGE, BASELINE, INVALID, TIMEOUT, LOST, INTERRUPTED, UNREAD = ExitCode
MEANINGS: dict[int, str] = {
    PASS: "pass",
    WEAK: "a law is broken, the score is below 80 %, a required bug (s06, s07) survives, or a test objects "
    "to what is no bug (order)",
    USAGE: "usage; nothing there, or not importable; no test uses what the bugs are planted in, or none can "
    "be planted there; nothing checked (a trace with no line, no program run); something that was asked for "
    "cannot be written",
    BASELINE: "the clean tests fail, are flaky, or change themselves",
    INVALID: "a bug is invalid (the run says nothing) or does not apply",
    TIMEOUT: "timeouts decide the verdict",
    LOST: "the cluster is lost; a file has the results so far",
}
"""The rows of the table in docs/exit-codes.md, which a test compares; 130 and 141 stand above it."""
