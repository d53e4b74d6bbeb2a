"""Softmax cross-entropy and its gradients, as compiled: see cuda_gate."""

import sys

from cuda_gate import ARCHITECTURES, POINTERS, Gate, compile_share, errors, missing, over_registers, spills
from cuda_gate_rows import (
    COLUMNS,
    LAYOUTS,
    OWN,
    POINTWISE,
    REST,
    ROWS,
    SAMPLES,
    is_wide,
    program_of,
    reachable,
)

from opgrad.contract import DTYPES, FLOATS
from opgrad.ops import operators

LOSS_GRAD = "softmax_cross_entropy_loss_grad"
LOSSES = ("softmax_cross_entropy_loss", "softmax_cross_entropy_loss_only", "softmax_cross_entropy_loss_and_grad")


def program(kind):
    op = operators()[kind["op"]]
    if (op.name == LOSS_GRAD) != (kind["regime"] in POINTWISE) or (kind["bias"] and "bias" not in op.inputs):
        return None
    given = {name: kind[name] for name in ("labels", "weight", "bias", "dy") if name in kind}
    given = {name: given.get(name, OWN) for name in op.inputs} | dict.fromkeys(op.results, kind["results"])
    dtypes = {name: kind["dtype"] if dtype == OWN else dtype for name, dtype in given.items() if dtype}
    attributes = {"reduction": kind["reduction"], "ignore_index": kind["ignore"]}
    if kind["results"] != OWN:
        attributes["out_dtype"] = kind["results"]
    return program_of(op, kind, attributes, dtypes)


CHOICE = {"op": (*LOSSES, LOSS_GRAD), "regime": (*ROWS, *COLUMNS, *POINTWISE)}
# The gradient has the longest formula, and odd rows the code for their ends beside that for the rest.
FEW = {"op": (LOSSES[-1], LOSS_GRAD), "regime": CHOICE["regime"], "length": ("odd",)}
GATE = Gate(
    factors=CHOICE
    | {
        "length": tuple(REST),
        "dtype": FLOATS,
        "layout": LAYOUTS,
        "samples": SAMPLES,
        "labels": ("int64", "int64", "int64", "int32"),
        "weight": ("", "", "", OWN, "float64"),
        "bias": ("", "", OWN, "float64"),
        "ignore": (None, None, None, 1, -100),
        "reduction": ("none", "none", "none", "mean", "sum"),
        "results": (OWN, OWN, OWN, "float32", "float64"),
        "check": (False, False, False, True),
        "pointers": POINTERS,
        "arch": ARCHITECTURES,
    },
    program=program,
    few=FEW,
    full=CHOICE | {"length": tuple(REST), "dtype": FLOATS},
)


def test_every_kind_compiles(kinds):
    assert errors(kinds) == {}
    choice = reachable(GATE.choice)
    losses, regimes = [name for name in choice["op"] if name != LOSS_GRAD], [*choice["regime"][: -len(POINTWISE)]]
    assert missing(kinds, **choice | {"op": losses, "regime": regimes}) == []
    assert missing(kinds, **choice | {"op": [LOSS_GRAD], "regime": POINTWISE}) == []
    assert missing(kinds, op=CHOICE["op"]) == []
    assert missing(kinds, dtype=FLOATS) == []


def test_registers(kinds):
    assert over_registers(kinds) == {}


def test_spills(kinds):
    assert spills(kinds) == {}


def test_accesses_are_wide(kinds):
    """Some kernel reads as many bytes at a time as the rows' vectors hold."""
    for name, each in kinds.items():
        if is_wide(each.kind) and each.kind["results"] == OWN:
            assert each.widest("loads") >= each.vector * DTYPES[each.kind["dtype"]].itemsize, name


if __name__ == "__main__":
    compile_share(GATE, int(sys.argv[1]))
