"""Softmax, log-softmax and their gradients without attributes, as compiled: see cuda_gate."""

import sys

import pytest
from cuda_gate import (
    ARCHITECTURES,
    DEVICES,
    POINTERS,
    Gate,
    compile_all,
    compile_share,
    errors,
    missing,
    over_registers,
    spills,
)
from cuda_gate_rows import (
    COLUMNS,
    LAYOUTS,
    REST,
    ROWS,
    SAMPLES,
    clusters,
    is_wide,
    program_of,
)

from opgrad.contract import DTYPES, FLOATS, operators


def program(kind):
    op = operators()[kind["op"]]
    return program_of(op, kind, {"axis": 1}, dict.fromkeys((*op.inputs, *op.results), kind["dtype"]))


CHOICE = {
    "op": ("softmax", "log_softmax", "softmax_grad", "log_softmax_grad"),
    "regime": (*ROWS, *COLUMNS),
}
GATE = Gate(
    factors=CHOICE
    | {
        "length": tuple(REST),
        "dtype": FLOATS,
        "layout": LAYOUTS,
        "samples": SAMPLES,
        "pointers": POINTERS,
        "arch": ARCHITECTURES,
    },
    program=program,
    together=CHOICE | {"length": ("whole", "odd")},
    full=CHOICE | {"length": tuple(REST), "dtype": FLOATS},
)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    pytest.importorskip("triton", reason="needs Triton")
    return compile_all(__file__, tmp_path_factory.mktemp("compiled"))


def test_every_kind_compiles(kinds):
    assert errors(kinds) == {}
    lengths = ("whole", "odd")
    regimes = [regime for regime in (*ROWS, *COLUMNS) if regime != "cluster" or clusters()]
    assert missing(kinds, op=CHOICE["op"], regime=regimes, length=lengths) == []
    assert missing(kinds, regime=regimes, dtype=FLOATS) == []


def test_registers(kinds):
    assert over_registers(kinds) == {}


def test_spills(kinds):
    assert spills(kinds) == {}


def test_accesses_are_wide(kinds):
    """Some kernel reads and writes as many bytes at a time as the rows' vectors hold."""
    for name, each in kinds.items():
        if is_wide(each.kind):
            widths = [each.widest(way) for way in ("loads", "stores")]
            assert min(widths) >= each.vector * DTYPES[each.kind["dtype"]].itemsize, name


@pytest.mark.xfail(strict=True, reason="rows that are not read in vectors are not fetched ahead into shared memory")
def test_long_rows_leave_no_room_for_a_second_program(kinds):
    """So that the rows in work at a time are few enough to stay in the L2 cache."""
    for name, each in kinds.items():
        if each.kind["regime"] == "long rows" and is_wide(each.kind):
            (loop,) = [kernel for kernel in each.kernels if kernel["name"].endswith("_loop")]
            _, memory, _ = DEVICES[each.kind["arch"]]
            assert memory / 2 < loop["shared"] <= memory, name


if __name__ == "__main__":
    compile_share(GATE, int(sys.argv[1]))
