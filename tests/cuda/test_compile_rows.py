"""Softmax, log-softmax and their gradients without attributes, as compiled: see cuda_gate."""

import sys

from cuda_gate import (
    ARCHITECTURES,
    DEVICES,
    POINTERS,
    Gate,
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
    is_wide,
    program_of,
    reachable,
)

from opgrad.contract import DTYPES, FLOATS
from opgrad.cuda.regimes import LOOPS
from opgrad.ops import operators

COPIED = 4  # bytes: the fewest of an asynchronous copy to shared memory
STEP = 2048  # elements, of one array: the shortest, where two lie far apart


def program(kind):
    op = operators()[kind["op"]]
    return program_of(op, kind, {"axis": 1}, dict.fromkeys((*op.inputs, *op.results), kind["dtype"]))


CHOICE = {"op": ("softmax", "log_softmax", "softmax_grad", "log_softmax_grad"), "regime": (*ROWS, *COLUMNS)}
# log_softmax and log_softmax_grad have the longer formulas, and odd rows the code for their ends beside that for the
# rest; with the attributes these take what is shortest.
FEW = {"op": ("log_softmax", "log_softmax_grad"), "regime": (*ROWS, *COLUMNS), "length": ("odd",)}
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
    few=FEW,
    full=CHOICE | {"length": tuple(REST), "dtype": FLOATS},
)


def test_every_kind_compiles(kinds):
    assert errors(kinds) == {}
    assert missing(kinds, **reachable(GATE.choice)) == []
    assert missing(kinds, op=CHOICE["op"]) == []
    assert missing(kinds, dtype=FLOATS) == []


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


def test_steps_of_long_rows_are_on_their_way_to_shared_memory(kinds):
    """As many as the regime says. The hardware copies 4, 8 or 16 bytes of a thread there (cp.async); float16 at odd
    distances has accesses of 2 bytes, which go to registers instead.
    """
    for name, each in kinds.items():
        item = DTYPES[each.kind["dtype"]].itemsize
        if each.kind["regime"] == "long rows" and is_wide(each.kind) and each.vector * item >= COPIED:
            (loop,) = [kernel for kernel in each.kernels if kernel["name"].endswith("_rows")]
            _, memory, _ = DEVICES[each.kind["arch"]]
            streams = 1 + name.partition("-")[0].endswith("_grad")
            _, ahead = LOOPS.get((streams, item), (1, 1))
            assert ahead * streams * item * STEP <= loop["shared"] <= memory, name


if __name__ == "__main__":
    compile_share(GATE, int(sys.argv[1]))
