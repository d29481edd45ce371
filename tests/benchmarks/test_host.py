"""The table of host times has a row for each size and a figure for each part."""

from __future__ import annotations

from click.testing import CliRunner

from benchmarks.host import PARTS, main


def test_every_part_of_a_step_is_timed() -> None:
    done = CliRunner().invoke(main, ["--requests", "1", "--requests", "3", "--pages", "16"])
    assert done.exit_code == 0, done.output
    head, *rows = (line.split() for line in done.output.splitlines())
    assert head == ["requests", "pages", *PARTS, "all", "in", "µs"]
    assert [row[:2] for row in rows] == [["1", "16"], ["3", "16"]]
    for _, _, *parts, total in ([int(cell.replace(",", "")) for cell in row] for row in rows):
        assert min(parts) > 0
        assert abs(sum(parts) - total) <= len(parts), "each is rounded"
