"""Softmax and its gradients with attributes, as compiled: see cuda_gate."""

import functools
import sys

import numpy as np
from cuda_gate import (
    ARCHITECTURES,
    FULL,
    POINTERS,
    Gate,
    compile_share,
    errors,
    missing,
    over_registers,
    spills,
)
from cuda_gate_rows import LAYOUTS, OWN, REST, SAMPLES, laid_out, shapes_of

from opgrad.call import arrays
from opgrad.contract import BYTES, DTYPES, Spec
from opgrad.contract.signature import prepare
from opgrad.cuda import ALIGNMENT
from opgrad.ops import operators
from opgrad.ops.reference import post_ops
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import TYPES

REGIMES = {
    "short rows, heads": ((128,), ((1, 1, 2), (7, 9, 31), (8, 16, 64))),
    "one row, longest": ((16384, 8192, 4096, 2048, 1024), (1, 301, 304)),
    "long rows": ((1 << 17,), (1, 301, 304)),
    "columns": ((256, 64), ((400, 2), (64, 33), (64, 512))),
    "long columns": ((40000,), ((400, 2), (512, 33), (512, 64))),
}
if FULL:  # tiles that hold less than the largest do, and rows of one loop, by the same kernels
    REGIMES |= {"short rows": ((128,), (2, 8191, 8192)), "one row": ((4096, 1024), (1, 301, 304))}
DROPOUTS = {"": None, "drops": Dropout(0.1, 1, 2), "mask": Dropout(0.1, 1, 2, mask=True)}
# Shapes of what is broadcast to the rows: all of it, a number for each element of a row, for each row, one.
OPERANDS = ("full", "along", "across", "single")
SCALES = {"logit_scale": 0.1, "result_scale": 3.0, "out_scale": 0.5}
ELTWISE = (
    post_ops.abs(), post_ops.clip(0, 1), post_ops.clip_v2(0, 1), post_ops.elu(0.3), post_ops.exp(),
    post_ops.gelu_erf(), post_ops.gelu_tanh(), post_ops.hardsigmoid(0.1, 0.2), post_ops.hardswish(),
    post_ops.linear(2, 3), post_ops.log(), post_ops.logistic(), post_ops.mish(), post_ops.pow(2, 3),
    post_ops.relu(0.1), post_ops.soft_relu(2), post_ops.sqrt(), post_ops.square(), post_ops.swish(), post_ops.tanh(),
    post_ops.round(),
)  # fmt: skip


# Each post-op is in one of these chains; those that have no gradient are among themselves.
SMOOTH = [each.name for each in ELTWISE if post_ops.has_gradient(each.name)]
STEPS = [name for name in (*post_ops.BINARY, "round") if not post_ops.has_gradient(name)]
CHAINS = {
    "": (),
    "eltwise": SMOOTH[:7],
    "more eltwise": SMOOTH[7:14],
    "most eltwise": SMOOTH[14:],
    "binary": [name for name in post_ops.BINARY if post_ops.has_gradient(name)],
    "steps": STEPS[::2],
    "more steps": STEPS[1::2],
}


def array_of(shape, dtype, strides=None):
    """An array of which there is but one element: what a compiler needs to know of it."""
    kind = DTYPES[dtype]
    if strides is None:
        strides = laid_out(shape, "contiguous", True, False)
    memory = np.zeros(1, f"u{kind.itemsize}")
    strides = tuple(kind.itemsize * each for each in strides)
    return np.lib.stride_tricks.as_strided(memory, shape, strides).view(kind)


def axis_of(shape):
    return 3 if len(shape) == 4 else 1


def broadcast(shape, how, dtype):
    """An array that is broadcast to rows of this shape; of several axes before them, one has all its elements."""
    axis = axis_of(shape)
    along = [size if each == axis or (each == 0 and axis == 3) else 1 for each, size in enumerate(shape)]
    across = [1 if each == axis or (each == 1 and axis == 3) else size for each, size in enumerate(shape)]
    return array_of(tuple({"full": shape, "along": along, "across": across, "single": ()}[how]), dtype)


def post_op(name, operand):
    if name == "select":
        return post_ops.select(operand("bool"), operand("float32"))
    if name in post_ops.BINARY:
        return getattr(post_ops, name)(operand(None))
    return next(each for each in ELTWISE if each.name == name)


def attributes_of(kind, shape, gradient):
    operand = functools.partial(broadcast, shape, kind["operands"])
    names = CHAINS[kind["chain"]]
    chain = [post_op(name, lambda dtype: operand(dtype or kind["operand"])) for name in names]
    given = {"axis": axis_of(shape), "post_ops": chain, "dropout": DROPOUTS[kind["dropout"]]}
    given |= SCALES if kind["scales"] else {}
    given |= {"where": broadcast(shape, kind["where"], "bool")} if kind["where"] else {}
    given |= {} if kind["results"] == OWN else {"out_dtype": kind["results"]}
    if gradient:
        return given | {"post_op_grads": kind["more"]}
    return given | {"stats": kind["more"], "save": kind["more"]}


def program(kind):
    op = operators()[kind["op"]]
    gradient = len(op.inputs) == 2
    if gradient and (set(BYTES) & {kind["dtype"], kind["results"], kind["other"]}):
        return None
    if kind["dropout"] == "mask" if gradient else kind["other"] != OWN:
        return None
    if gradient and not all(post_ops.has_gradient(name) for name in CHAINS[kind["chain"]]):
        return None
    if kind["length"] == "huge" and kind["layout"] == "wide":
        return None  # beyond what NumPy can describe
    for shape in shapes_of(kind, REGIMES):
        given = attributes_of(kind, shape, gradient)
        for name in op.inputs:
            first = name == next(iter(op.inputs))
            dtype = kind["dtype"] if first or kind["other"] == OWN else kind["other"]
            given[name] = array_of(shape, dtype, laid_out(shape, kind["layout"], first, not first))
        general, given = arrays.expanded(op, given)
        specs = [Spec(given[name].shape, given[name].dtype, given[name].strides) for name in general.inputs]
        known = {name: value for name, value in given.items() if name in general.attributes}
        found = general.kernel("opgrad.cuda")(prepare(general, specs, known, any_stride=True).problem)
        if general is not op and found.regime == kind["regime"].partition(",")[0]:
            return found
    return None


CHOICE = {"op": ("softmax", "log_softmax", "softmax_grad", "log_softmax_grad"), "regime": tuple(REGIMES)}
GATE = Gate(
    factors=CHOICE
    | {
        "length": tuple(REST),
        "dtype": TYPES,
        "other": (OWN, "float32", "float64", "float8_e5m2"),
        "results": (OWN, "float32", "float64", "float8_e5m2", "int8"),
        "layout": LAYOUTS,
        "samples": SAMPLES,
        "where": ("", *OPERANDS),
        "dropout": (*DROPOUTS, "", ""),
        "chain": (*CHAINS, "", "", "", ""),
        "operands": OPERANDS,
        "operand": ("float32", "float64", "bfloat16", "float8_e4m3fn", "int8", "int32"),
        "scales": (False, True),
        "more": (False, True),
        "pointers": POINTERS,
        "arch": ARCHITECTURES,
    },
    program=program,
    few={"op": ("log_softmax", "softmax_grad"), "regime": tuple(REGIMES)},
    full=CHOICE | {"length": tuple(REST), "dtype": TYPES},
)


def test_every_kind_compiles(kinds):
    assert errors(kinds) == {}
    assert missing(kinds, **GATE.choice) == []
    assert missing(kinds, op=CHOICE["op"]) == []
    assert missing(kinds, dtype=TYPES) == []
    assert missing(kinds, chain=CHAINS) == []


def test_whatever_is_asked_for_is_one_kernel(kinds):
    assert {len(each.kernels) for each in kinds.values()} == {1}


def test_accesses_are_wide(kinds):
    """Those of rows of whole vectors: registers that a chain of post-ops needs leave a thread less than a vector."""
    for name, each in kinds.items():
        kind = each.kind
        if kind["pointers"] == "aligned" and kind["layout"] == "contiguous" and not kind["chain"]:
            size = DTYPES[kind["dtype"]].itemsize
            assert each.widest("loads") >= min(each.vector * size, ALIGNMENT), name


def test_registers(kinds):
    assert over_registers(kinds) == {}


def test_spills(kinds):
    assert spills(kinds) == {}


if __name__ == "__main__":
    compile_share(GATE, int(sys.argv[1]))
