"""Cross-entropy over shards, as compiled: see cuda_gate."""

import sys

import pytest
import triton.language as tl
from cuda_gate import ARCHITECTURES, POINTERS, Gate, compile_share, errors, missing, over_registers, spills
from cuda_gate_rows import OWN

from opgrad.contract import DTYPES, FLOATS, Spec
from opgrad.contract.signature import prepare
from opgrad.ops import graph_operators, loss_operators

NAMES = ("cross_entropy_shard", "cross_entropy_shard_grad")
SHAPES = {"short": (8191, 112), "one": (301, 2048), "long": (64, 131072), "odd": (301, 50257), "long odd": (16, 200001)}


def program(kind):
    op, shape = graph_operators()[kind["op"]], SHAPES[kind["shape"]]
    numbers = "float64" if kind["dtype"] == "float64" else "float32"
    dtypes = {"logits": kind["dtype"], "labels": kind["labels"], "weight": kind["weight"], "factors": numbers}
    attributes = {"first": 1000, "softcap": kind["softcap"], "temperature": 1.0}
    attributes |= {"moment": kind["moment"]} if op.name == NAMES[0] else {}
    specs, shapes = [], {}
    for name, tensor in op.inputs.items():
        dtype = kind["dtype"] if dtypes[name] == OWN else dtypes[name]
        if name == "weight" and not dtype:
            specs.append(None)
            continue
        shapes[name] = tensor.shape(shapes, attributes) if tensor.shape else shape
        specs.append(Spec(shapes[name], DTYPES[dtype]))
    return op.kernel("opgrad.cuda")(prepare(op, specs, attributes, any_stride=True).problem)


FEW = {"op": NAMES, "shape": ("short", "long odd")}
GATE = Gate(
    factors={
        "op": NAMES,
        "shape": tuple(SHAPES),
        "dtype": FLOATS,
        "labels": ("int64", "int32"),
        "weight": ("", OWN, "float32"),
        "softcap": (0.0, 30.0),
        "moment": (False, True),
        "pointers": POINTERS,
        "arch": ARCHITECTURES,
    },
    program=program,
    few=FEW,
    full={"op": NAMES, "shape": tuple(SHAPES), "dtype": FLOATS, "softcap": (0.0, 30.0)},
)


def test_every_kind_compiles(kinds):
    assert errors(kinds) == {}
    assert missing(kinds, **GATE.choice) == []
    assert missing(kinds, dtype=FLOATS) == []


def test_registers(kinds):
    assert over_registers(kinds) == {}


def test_spills(kinds):
    assert spills(kinds) == {}


if __name__ == "__main__":
    compile_share(GATE, int(sys.argv[1]))


@pytest.mark.parametrize("name", [*NAMES, "sample_losses", "sample_losses_and_grad"])
def test_options_are_numbers_that_kernels_are_given(name):
    """Declared as float64: Triton would take a float for a float32, and would compile anew for each constant."""
    op = {**graph_operators(), **loss_operators()}[name]
    found = []
    for temperature in (1.5, 0.7):
        shapes, specs = {}, []
        for each, tensor in op.inputs.items():
            if each in op.optional:
                specs.append(None)
                continue
            shapes[each] = tensor.shape(shapes, dict(op.attributes)) if tensor.shape else (64, 300)
            specs.append(Spec(shapes[each], DTYPES["int64" if each == "labels" else "float64"]))
        given = {"first": 10} if "first" in op.attributes else {"label_smoothing": 0.1 * temperature}
        given |= {"softcap": 0.3 * temperature, "temperature": temperature}
        problem = prepare(op, specs, {**op.attributes, **given}, any_stride=True).problem
        for launch in op.kernel("opgrad.cuda")(problem).launches:
            annotations = launch.kernel.fn.__annotations__
            floats = [each for each, value in launch.arguments.items() if isinstance(value, float)]
            assert floats
            assert [annotations.get(each) for each in floats] == [tl.float64] * len(floats)
            constants = {each for each in launch.kernel.arg_names if annotations.get(each) is tl.constexpr}
            assert "CAPPED" in constants
            found.append({each: launch.arguments[each] for each in constants & launch.arguments.keys()})
    assert found[: len(found) // 2] == found[len(found) // 2 :]
