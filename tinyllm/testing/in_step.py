"""A program for a cache that lacks what the program was written for: its twin, derived line by line.

Where layers move together, an append to one is a step of all. What must be refused is derived anew, since a
twin holds more, and a cache may refuse at will; what a cache cannot be asked for is not asked.
"""

from collections.abc import Iterable, Iterator

from tinyllm.testing.contract import Capability, Factory
from tinyllm.testing.operations import OPERATIONS, READS_BEYOND
from tinyllm.testing.run import Run, replay
from tinyllm.testing.subject import Subject
from tinyllm.testing.trace import Op, program

READS = frozenset({"table", "stats"}) | READS_BEYOND
OTHER = frozenset({Capability.FORK, Capability.CONTENTS, Capability.EXACT_ERRORS})
"""What a twin cannot make up for, or need not."""


def follow(factory: Factory, text: str) -> None:
    """Run a program, or its twin. Raises LawBroken, NotOffered."""
    subject = Subject.of(factory)
    if subject.capabilities | OTHER >= frozenset(Capability):
        replay(subject, text)
        return
    run = Run(subject)
    for step in steps(program(text)):
        take(run, step)
    run.finish()


def steps(ops: Iterable[Op]) -> Iterator[list[Op]]:
    """The lines; appends to different layers of one sequence that follow each other are one step."""
    step: list[Op] = []
    for op in ops:
        if step and not _together(step, op):
            yield step
            step = []
        step.append(op)
    if step:
        yield step


def take(run: Run, step: list[Op]) -> None:
    """Run a step as the cache can take it: line by line, or all layers, by the longest of its lines."""
    if not _is_step(step[0]) or Capability.INDEPENDENT_LAYERS in run.offers:
        for op in step:
            _draw(run, op)
        return
    longest = max(step, key=lambda op: op.args[2])
    by_layer = {op.args[1]: op for op in step if op.args[2] == longest.args[2]}
    for layer in range(run.config.n_layers):
        op = by_layer.get(layer, longest)
        _draw(run, op._replace(args=(op.args[0], layer, op.args[2]), quiet=step[-1].quiet))
        if run.refused:
            break


def _draw(run: Run, op: Op) -> None:
    needs = OPERATIONS[op.name].needs
    if op.name not in READS or not needs or needs in run.offers:
        run.draw(op._replace(refusal=""))
        run.hold()


def _is_step(op: Op) -> bool:
    """Whether the line appends, as far as its arguments are concerned."""
    return op.name == "append" and op.refusal in {"", "OutOfBlocks"}


def _together(step: list[Op], op: Op) -> bool:
    first = step[0]
    return (
        _is_step(first)
        and _is_step(op)
        and not (first.refusal or op.refusal)
        and first.args[0] == op.args[0]
        and op.args[1] not in {one.args[1] for one in step}
    )
