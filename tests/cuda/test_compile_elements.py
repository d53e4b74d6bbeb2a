"""Operators on single elements, as compiled: see cuda_gate."""

import sys

from cuda_gate import ARCHITECTURES, POINTERS, Gate, compile_share, errors, missing, over_registers, spills
from cuda_gate_rows import ELEMENTS, LAYOUTS, OWN, REST, SAMPLES, program_of

from opgrad.contract import DTYPES, FLOATS
from opgrad.cuda import ALIGNMENT
from opgrad.ops import operators

ALPHAS = {"default": {}, "one": {"alpha": 1}, "other": {"alpha": -3.25}}


def program(kind):
    op = operators()[kind["op"]]
    second = list(op.inputs)[1:]
    other = kind["second"] if op.name in ("in_place_accumulator", "scale") else OWN
    if kind["second"] != other or (other == "int32" and op.name != "scale"):
        return None
    if kind["alpha"] != "default" and "alpha" not in op.attributes:
        return None
    attributes = {name: True for name in op.attributes if kind["flag"] and name != "alpha"} | ALPHAS[kind["alpha"]]
    dtypes = dict.fromkeys((*op.inputs, *op.results), kind["dtype"]) | dict.fromkeys(second, other)
    dtypes = {name: kind["dtype"] if dtype == OWN else dtype for name, dtype in dtypes.items()}
    return program_of(op, kind, attributes, dtypes)


CHOICE = {"op": tuple(op.name for op in operators().values() if op.kind == "elements"), "regime": tuple(ELEMENTS)}
GATE = Gate(
    factors=CHOICE
    | {
        "length": tuple(REST),
        "dtype": FLOATS,
        "layout": LAYOUTS,
        "samples": SAMPLES,
        "second": (OWN, "float16", "float64", "int32"),
        "alpha": tuple(ALPHAS),
        "flag": (False, True),
        "pointers": POINTERS,
        "arch": ARCHITECTURES,
    },
    program=program,
    few={"op": CHOICE["op"]},
    full=CHOICE | {"length": tuple(REST), "dtype": FLOATS},
)


def test_every_kind_compiles(kinds):
    assert errors(kinds) == {}
    assert missing(kinds, **GATE.choice) == []
    assert missing(kinds, regime=ELEMENTS) == []
    assert missing(kinds, dtype=FLOATS) == []


def test_registers(kinds):
    assert over_registers(kinds, most=64) == {}


def test_spills(kinds):
    assert spills(kinds) == {}


def test_accesses_are_wide(kinds):
    """Those of whole vectors are all as wide as can be, but for the number that scale multiplies by."""
    for name, each in kinds.items():
        kind = each.kind
        if kind["pointers"] == "aligned" and kind["layout"] == "contiguous" and kind["length"] == "whole":
            (kernel,) = each.kernels
            sizes = {DTYPES[kind["dtype"] if dtype == OWN else dtype].itemsize for dtype in (OWN, kind["second"])}
            widths = {str(each.vector * size) for size in sizes}
            assert set(kernel["stores"]) <= widths, name
            assert set(kernel["loads"]) <= widths | ({"2", "4", "8"} if kind["op"] == "scale" else set()), name
            assert str(ALIGNMENT) in {*kernel["loads"], *kernel["stores"]}, name


if __name__ == "__main__":
    compile_share(GATE, int(sys.argv[1]))
