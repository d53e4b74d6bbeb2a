"""Gather and its gradient, as compiled: see cuda_gate."""

import sys

from cuda_gate import ARCHITECTURES, POINTERS, Gate, compile_share, errors, missing, over_registers, spills

from opgrad.contract import DTYPES, FLOATS, Spec
from opgrad.contract.signature import prepare
from opgrad.ops import operators


def program(kind):
    op = operators()[kind["op"]]
    pre, size, count, post = (kind[name] for name in ("pre", "size", "count", "post"))
    shapes = {"x": (pre, size, post), "dy": (pre, count, post), "indices": (count,)}
    dtypes = {"x": kind["dtype"], "dy": kind["dtype"], "indices": kind["indices"]}
    specs = [Spec(shapes[name], DTYPES[dtypes[name]]) for name in op.inputs]
    attributes = {"axis": 1, "check": kind["check"]} | ({"shape": shapes["x"]} if "shape" in op.attributes else {})
    return op.kernel("opgrad.cuda")(prepare(op, specs, attributes, any_stride=True).problem)


CHOICE = {
    "op": ("gather", "gather_grad"),
    "post": (1, 33, 256, 4096),  # elements of a slice: 33 are no whole vectors, 4096 more than a tile
    "count": (1, 50, 1000, 20000, (1 << 29) + 5),  # few indices, a run, merged runs, places beyond 32 bits
}
GATE = Gate(
    factors=CHOICE
    | {
        "pre": (1, 3, 64),
        "size": (1, 1000, 50000),
        "dtype": FLOATS,
        "indices": ("int32", "int64"),
        "check": (False, True),
        "pointers": POINTERS,
        "arch": ARCHITECTURES,
    },
    program=program,
    few={"op": ("gather_grad",), "count": CHOICE["count"]},
    full=CHOICE | {"pre": (1, 3, 64), "size": (1, 1000, 50000)},
)


def test_every_kind_compiles(kinds):
    assert errors(kinds) == {}
    assert missing(kinds, **GATE.choice) == []
    assert missing(kinds, op=CHOICE["op"]) == []
    assert missing(kinds, post=CHOICE["post"]) == []


def test_registers(kinds):
    assert over_registers(kinds) == {}


def test_spills(kinds):
    assert spills(kinds) == {}


def test_accesses_are_wide(kinds):
    """Some kernel reads as many bytes at a time as the slices' vectors hold; all results are written like that."""
    for name, each in kinds.items():
        if each.kind["pointers"] == "aligned":
            wide = each.vector * DTYPES[each.kind["dtype"]].itemsize
            assert min(each.widest("loads"), each.widest("stores")) >= wide, name


if __name__ == "__main__":
    compile_share(GATE, int(sys.argv[1]))
