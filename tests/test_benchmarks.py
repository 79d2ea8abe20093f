"""What the benchmarks compare does the same, and a target that is missed fails. No figure is judged."""

import pytest

from benchmarks import harness
from benchmarks.cache import Row
from tinyllm.testing.trace import Op


@pytest.fixture(scope="module")
def programs() -> list[list[Op]]:
    return harness.recorded(seed=1, programs=4)


def test_the_bare_calls_do_what_the_program_does(programs: list[list[Op]]) -> None:
    """Up to the last line but `close`, the bare cache holds what the oracle holds."""
    assert len(programs) >= 4
    for program in programs:
        assert (program[0].name, program[-1].name) == ("new", "close")
        calls = harness.prepared(program)
        assert len(calls) == len(program)
        for end in (len(calls) // 2, len(calls) - 1):
            bare, read = (harness.play(calls[:end], reads=reads) for reads in (False, True))
            live = calls[end - 1].live
            assert bare.stats() == read.stats()
            assert [bare.block_table(seq).tolist() for seq in live] == [
                read.block_table(seq).tolist() for seq in live
            ]
            with pytest.raises(KeyError):
                bare.block_table(max(live, default=0) + 1)


def test_without_its_checks_the_machine_draws_the_same_programs(programs: list[list[Op]]) -> None:
    class Kept(harness.Unchecked):
        def teardown(self) -> None:
            super().teardown()
            if self.run.ops:
                seen.append(list(self.run.ops))

    seen: list[list[Op]] = []
    harness.drawn(Kept, seed=1, programs=4)
    assert seen == programs


def test_every_row_is_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    harness.main(["--quick", "--only", "steps", "startup"])
    out = capsys.readouterr().out
    assert "lines a second" in out
    for what in ("a checked line", "the machine", "tinyllm --help"):
        assert what in out


@pytest.mark.parametrize(("ratio", "code"), [(5.9, 0), (6.1, 1)])
def test_a_target_that_is_missed_fails(ratio: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> list[Row]:
        return [Row("a line", "nothing", 99.0), Row("a line", "a line", ratio, 6)]

    monkeypatch.setitem(harness.PARTS, "steps", (rows, rows))
    assert harness.main(["--only", "steps"]) == code
