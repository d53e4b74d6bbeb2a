"""What is lost beside another process: every contestant has a row with both times."""

from bench import load
from bench.cells import select


def test_a_row_has_the_times_without_and_with_the_load():
    (cell,) = select(["relu"], ["float32"], ["16777216"], False, groups=("plain",))
    (row,) = load.rows(cell, [], 0.02)
    assert row[:4] == ["relu", "16777216", "float32", "opgrad"]
    assert len(row) == len(load.COLUMNS)
    assert row[-1].endswith("%")
