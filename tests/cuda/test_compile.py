"""CUDA kernels of all kinds of calls, as compiled: what the gates compile, and what holds of it (see cuda_gate)."""

import functools
import sys

import numpy as np
import pytest
from cuda_gate import (
    ARCHITECTURES,
    DEVICES,
    FULL,
    POINTERS,
    Gate,
    compile_all,
    compile_share,
    errors,
    missing,
    over_registers,
    spills,
)

from opgrad.call import arrays
from opgrad.contract import BYTES, DTYPES, FLOATS, Spec, arrangement, normalise
from opgrad.contract.signature import prepare
from opgrad.cuda import ALIGNMENT, regimes
from opgrad.ops import graph_operators, loss_operators, operators
from opgrad.ops.reference import post_ops
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import TYPES

# Where a regime is reached: the length of rows (the first of some that belongs to it), and how many rows there are,
# or before and behind the reduced axis: as few as possible (0: none), an odd number, a multiple of 16.
ROWS = {
    "short rows": ((128,), (2, 8191, 8192)),
    "one row, longest": ((32768, 16384, 8192), (0, 301, 304)),
    "cluster": ((1 << 17,), (0, 301, 304)),
    "long rows": ((1 << 20,), (0, 301, 304)),
    "few rows": ((1 << 17,), (1, 3, 64)),
}
COLUMNS = {
    "columns, longest": ((2048, 1024, 512, 256, 128), ((400, 2), (64, 33), (64, 512))),
    "long columns": ((40000,), ((400, 2), (512, 33), (512, 64))),
    "few columns": ((1 << 17,), ((1, 2), (1, 3), (1, 64))),
}
POINTWISE = {
    "pointwise": ((16384,), (1, 301, 4096)),
    "pointwise, short": ((128,), (1, 8191, 8192)),
    "pointwise, columns": ((256,), ((400, 2), (64, 33), (64, 512))),
}
ELEMENTS = {
    "flat": ((1 << 20,), (1, 301, 304)),
    "rows": ((1024,), (1, 301, 304)),
    "rows, short": ((32,), (1, 8191, 8192)),
}
if FULL:  # tiles that hold less than the largest do, by the same kernels
    ROWS |= {"short rows, longer": ((512,), (2, 8191, 8192)), "one row": ((4096, 2048), (1, 301, 304))}
    COLUMNS |= {"columns": ((256,), ((400, 2), (64, 33), (64, 512)))}
SAMPLES = ("fewest", "odd", "whole", "huge")
OWN = "own"  # instead of a dtype: that of the first array
HUGE = (1 << 31) + 15  # elements of a row, or rows
REST = {"whole": 16, "part": 12, "odd": 15, "one": 0, "huge": 0}

# How operands lie: all in C order; rows of all at multiples of 16 elements; those of the first at other distances from
# an aligned address; its elements apart; the last input's all the same; the first's beyond 32 bits; the others' axes
# swapped.
LAYOUTS = ("contiguous", "spaced", "apart", "stepped", "repeated", "wide", "crossed")


def shapes_of(kind, regimes):
    """The shapes that may belong to a kind's regime: rows along axis 1, or along axis 3."""
    lengths, samples = regimes[kind["regime"]]
    huge = kind["samples"] == "huge"
    if huge and kind["layout"] == "wide":
        return  # offsets beyond 64 bits
    chosen = samples[-1] if huge else samples[SAMPLES.index(kind["samples"])]
    before, *others = (chosen,) if isinstance(chosen, int) else chosen
    before = HUGE if huge else before
    for length in {"one": (1,), "huge": () if huge else (HUGE,)}.get(kind["length"], lengths):
        n = length - 16 + REST[kind["length"]] if REST[kind["length"]] else length
        yield (before, n, *others) if len(others) < 2 else (before, *others, n)


def program_of(op, kind, attributes, dtypes):
    """The program of a kind whose rows lie along axis 1, or None if no shape leads to its regime.

    dtypes: of those arguments and results that are there.
    """
    for shape in shapes_of(kind, ROWS | COLUMNS | POINTWISE | ELEMENTS):
        specs = specs_of(op, shape, attributes, dtypes, kind["layout"])
        inputs, out = ([specs.get(name) for name in names] for names in (op.inputs, op.results))
        program = planned(op, inputs, attributes, out)
        if program.launches and program.regime == kind["regime"].partition(",")[0]:
            return program
    return None


def specs_of(op, shape, attributes, dtypes, how):
    """Specs of arguments and results: arrays that have an entry for each element lie as is said, others in C order."""
    tensors, known = {**op.inputs, **op.results}, dict(op.attributes) | dict(attributes)
    normalise(op, known, {"": shape})
    elements = [name for name in dtypes if tensors[name].role == "element"]
    last = [name for name in elements if name in op.inputs][-1]
    shapes = dict.fromkeys(op.inputs, ())
    specs = {}
    for name in (*dtypes, *dtypes):  # twice: the shape of dy is that of labels, which come behind it
        own, size = tensors[name].shape, DTYPES[dtypes[name]].itemsize
        shapes[name] = own(shapes, known) if own else shape
        strides = arrangement.contiguous(shapes[name], tuple(range(len(shapes[name]))), 1)
        if name in elements:
            strides = laid_out(shape, how, name == elements[0], name == last)
        specs[name] = Spec(shapes[name], DTYPES[dtypes[name]], tuple(size * stride for stride in strides))
    return specs


def laid_out(shape, how, first, last):
    """Strides in elements of an operand of this shape, whose rows lie along axis 1."""
    lengths, step, order = list(shape), 1, list(range(len(shape)))
    if how == "spaced":
        lengths[-1] = -(-lengths[-1] // 16) * 16 + 16
    elif how == "apart" and first:
        lengths[-1] += 1
    elif how == "stepped" and first:
        step = 2
    elif how == "wide" and first and len(shape) == 2:
        step = -(-(1 << 31) // shape[1])
    elif how == "wide" and first:
        lengths[2] = -(-(1 << 31) // shape[1])
    elif how == "crossed" and not first:
        order = [*order[:-2], order[-1], order[-2]]
    strides = [0] * len(shape)
    for each in reversed(order):
        strides[each], step = step, step * lengths[each]
    if how == "repeated" and last:
        strides[1] = 0
    return tuple(strides)


def is_wide(kind):
    """Whether rows can be read in vectors: they are contiguous, and arrays begin at aligned addresses."""
    return kind["pointers"] == "aligned" and kind["layout"] in ("contiguous", "spaced", "apart")


def reachable(levels):
    """Levels without the regimes that this Triton does not have: some reduce across a cluster."""
    return {name: [each for each in of if each != "cluster" or regimes.clusters()] for name, of in levels.items()}


POINTS = {"pointers": POINTERS, "arch": ARCHITECTURES}
PLACES = {"length": tuple(REST), "dtype": FLOATS, "layout": LAYOUTS, "samples": SAMPLES}


def planned(op, specs, attributes, out=None):
    return op.kernel("opgrad.cuda")(prepare(op, specs, attributes, out, any_stride=True))


# --- operators on single elements -------------------------------------------------------------------------------------

ALPHAS = {"default": {}, "one": {"alpha": 1}, "other": {"alpha": -3.25}}


def elements_program(kind):
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


def elements_are_accessed_widely(kinds):
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


ELEMENTWISE = tuple(op.name for op in operators().values() if op.kind == "elements")
ELEMENTS_GATE = Gate(
    factors={
        "op": ELEMENTWISE,
        "regime": tuple(ELEMENTS),
        **PLACES,
        "second": (OWN, "float16", "float64", "int32"),
        "alpha": tuple(ALPHAS),
        "flag": (False, True),
        **POINTS,
    },
    program=elements_program,
    few={"op": ELEMENTWISE},
    full=("op", "regime", "length", "dtype"),
    there=("regime", "dtype"),
    holds=(elements_are_accessed_widely,),
    registers=64,
)

# --- softmax, log-softmax and their gradients without attributes ------------------------------------------------------

COPIED = 4  # bytes: the fewest of an asynchronous copy to shared memory
STEP = 2048  # elements, of one array: the shortest, where two lie far apart


def rows_program(kind):
    op = operators()[kind["op"]]
    return program_of(op, kind, {"axis": 1}, dict.fromkeys((*op.inputs, *op.results), kind["dtype"]))


def rows_are_accessed_widely(kinds):
    """Some kernel reads and writes as many bytes at a time as the rows' vectors hold."""
    for name, each in kinds.items():
        if is_wide(each.kind):
            widths = [each.widest(way) for way in ("loads", "stores")]
            assert min(widths) >= each.vector * DTYPES[each.kind["dtype"]].itemsize, name


def steps_of_long_rows_are_on_their_way_to_shared_memory(kinds):
    """As many as the regime says. The hardware copies 4, 8 or 16 bytes of a thread there (cp.async); float16 at odd
    distances has accesses of 2 bytes, which go to registers instead.
    """
    for name, each in kinds.items():
        item = DTYPES[each.kind["dtype"]].itemsize
        if each.kind["regime"] == "long rows" and is_wide(each.kind) and each.vector * item >= COPIED:
            (loop,) = [kernel for kernel in each.kernels if kernel["name"].endswith("_rows")]
            _, memory, _ = DEVICES[each.kind["arch"]]
            streams = 1 + name.partition("-")[0].endswith("_grad")
            _, ahead = regimes.LOOPS.get((streams, item), (1, 1))
            assert ahead * streams * item * STEP <= loop["shared"] <= memory, name


SOFTMAX = ("softmax", "log_softmax", "softmax_grad", "log_softmax_grad")
# log_softmax and log_softmax_grad have the longer formulas, and odd rows the code for their ends beside that for the
# rest; with the attributes these take what is shortest.
ROWS_FEW = {"op": ("log_softmax", "log_softmax_grad"), "regime": (*ROWS, *COLUMNS), "length": ("odd",)}
ROWS_GATE = Gate(
    factors={"op": SOFTMAX, "regime": (*ROWS, *COLUMNS), **PLACES, **POINTS},
    program=rows_program,
    few=ROWS_FEW,
    full=("op", "regime", "length", "dtype"),
    there=("op", "dtype"),
    holds=(rows_are_accessed_widely, steps_of_long_rows_are_on_their_way_to_shared_memory),
)

# --- cross-entropy and its gradients ----------------------------------------------------------------------------------

LOSS_GRAD = "softmax_cross_entropy_loss_grad"
LOSSES = ("softmax_cross_entropy_loss", "softmax_cross_entropy_loss_only", "softmax_cross_entropy_loss_and_grad")


def losses_program(kind):
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


def losses_are_read_widely(kinds):
    """Some kernel reads as many bytes at a time as the rows' vectors hold."""
    for name, each in kinds.items():
        if is_wide(each.kind) and each.kind["results"] == OWN:
            assert each.widest("loads") >= each.vector * DTYPES[each.kind["dtype"]].itemsize, name


LOSSES_REGIMES = (*ROWS, *COLUMNS, *POINTWISE)
# The gradient has the longest formula, and odd rows the code for their ends beside that for the rest.
LOSSES_FEW = {"op": (LOSSES[-1], LOSS_GRAD), "regime": LOSSES_REGIMES, "length": ("odd",)}


def losses_choice(choice):
    """The gradient has regimes of its own."""
    losses, rows = [name for name in choice["op"] if name != LOSS_GRAD], [*choice["regime"][: -len(POINTWISE)]]
    return [choice | {"op": losses, "regime": rows}, choice | {"op": [LOSS_GRAD], "regime": POINTWISE}]


LOSSES_GATE = Gate(
    factors={
        "op": (*LOSSES, LOSS_GRAD),
        "regime": LOSSES_REGIMES,
        **PLACES,
        "labels": ("int64", "int64", "int64", "int32"),
        "weight": ("", "", "", OWN, "float64"),
        "bias": ("", "", OWN, "float64"),
        "ignore": (None, None, None, 1, -100),
        "reduction": ("none", "none", "none", "mean", "sum"),
        "results": (OWN, OWN, OWN, "float32", "float64"),
        "check": (False, False, False, True),
        **POINTS,
    },
    program=losses_program,
    few=LOSSES_FEW,
    full=("op", "regime", "length", "dtype"),
    there=("op", "dtype"),
    holds=(losses_are_read_widely,),
    chosen=losses_choice,
)

# --- gather and its gradient ------------------------------------------------------------------------------------------


def slices_program(kind):
    op = operators()[kind["op"]]
    pre, size, count, post = (kind[name] for name in ("pre", "size", "count", "post"))
    shapes = {"x": (pre, size, post), "dy": (pre, count, post), "indices": (count,)}
    dtypes = {"x": kind["dtype"], "dy": kind["dtype"], "indices": kind["indices"]}
    specs = [Spec(shapes[name], DTYPES[dtypes[name]]) for name in op.inputs]
    attributes = {"axis": 1, "check": kind["check"]} | ({"shape": shapes["x"]} if "shape" in op.attributes else {})
    return planned(op, specs, attributes)


def slices_are_accessed_widely(kinds):
    """Some kernel reads as many bytes at a time as the slices' vectors hold; all results are written like that."""
    for name, each in kinds.items():
        if each.kind["pointers"] == "aligned":
            wide = each.vector * DTYPES[each.kind["dtype"]].itemsize
            assert min(each.widest("loads"), each.widest("stores")) >= wide, name


COUNTS = (1, 50, 1000, 20000, (1 << 29) + 5)  # few indices, a run, merged runs, places beyond 32 bits
SLICES_GATE = Gate(
    factors={
        "op": ("gather", "gather_grad"),
        "post": (1, 33, 256, 4096),  # elements of a slice: 33 are no whole vectors, 4096 more than a tile
        "count": COUNTS,
        "pre": (1, 3, 64),
        "size": (1, 1000, 50000),
        "dtype": FLOATS,
        "indices": ("int32", "int64"),
        "check": (False, True),
        **POINTS,
    },
    program=slices_program,
    few={"op": ("gather_grad",), "count": COUNTS},
    full=("op", "post", "count", "pre", "size"),
    there=("op", "post"),
    holds=(slices_are_accessed_widely,),
)

# --- cross-entropy over shards ----------------------------------------------------------------------------------------

SHARDS = ("cross_entropy_shard", "cross_entropy_shard_grad")
SHARD_SHAPES = {
    "short": (8191, 112),
    "one": (301, 2048),
    "long": (64, 131072),
    "odd": (301, 50257),
    "long odd": (16, 200001),
}


def shards_program(kind):
    op, shape = graph_operators()[kind["op"]], SHARD_SHAPES[kind["shape"]]
    numbers = "float64" if kind["dtype"] == "float64" else "float32"
    dtypes = {"logits": kind["dtype"], "labels": kind["labels"], "weight": kind["weight"], "factors": numbers}
    attributes = {"first": 1000, "softcap": kind["softcap"], "temperature": 1.0}
    attributes |= {"moment": kind["moment"]} if op.name == SHARDS[0] else {}
    specs, shapes = [], {}
    for name, tensor in op.inputs.items():
        dtype = kind["dtype"] if dtypes[name] == OWN else dtypes[name]
        if name == "weight" and not dtype:
            specs.append(None)
            continue
        shapes[name] = tensor.shape(shapes, attributes) if tensor.shape else shape
        specs.append(Spec(shapes[name], DTYPES[dtype]))
    return planned(op, specs, attributes)


SHARDS_GATE = Gate(
    factors={
        "op": SHARDS,
        "shape": tuple(SHARD_SHAPES),
        "dtype": FLOATS,
        "labels": ("int64", "int32"),
        "weight": ("", OWN, "float32"),
        "softcap": (0.0, 30.0),
        "moment": (False, True),
        **POINTS,
    },
    program=shards_program,
    few={"op": SHARDS, "shape": ("short", "long odd")},
    full=("op", "shape", "dtype", "softcap"),
    there=("dtype",),
)

# --- softmax and its gradients with attributes ------------------------------------------------------------------------

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


def attributes_program(kind):
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
        found = planned(general, specs, known)
        if general is not op and found.regime == kind["regime"].partition(",")[0]:
            return found
    return None


def whatever_is_asked_for_is_one_kernel(kinds):
    assert {len(each.kernels) for each in kinds.values()} == {1}


def attributes_are_read_widely(kinds):
    """Those of rows of whole vectors: registers that a chain of post-ops needs leave a thread less than a vector."""
    for name, each in kinds.items():
        kind = each.kind
        if kind["pointers"] == "aligned" and kind["layout"] == "contiguous" and not kind["chain"]:
            size = DTYPES[kind["dtype"]].itemsize
            assert each.widest("loads") >= min(each.vector * size, ALIGNMENT), name


ATTRIBUTES_GATE = Gate(
    factors={
        "op": SOFTMAX,
        "regime": tuple(REGIMES),
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
        **POINTS,
    },
    program=attributes_program,
    few={"op": ("log_softmax", "softmax_grad"), "regime": tuple(REGIMES)},
    full=("op", "regime", "length", "dtype"),
    there=("op", "dtype", "chain"),
    holds=(whatever_is_asked_for_is_one_kernel, attributes_are_read_widely),
)

# --- the tests --------------------------------------------------------------------------------------------------------

GATES = {
    "elements": ELEMENTS_GATE,
    "rows": ROWS_GATE,
    "losses": LOSSES_GATE,
    "slices": SLICES_GATE,
    "shards": SHARDS_GATE,
    "attributes": ATTRIBUTES_GATE,
}


@pytest.fixture(scope="module", params=GATES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def kinds(name, request, tmp_path_factory):
    """The kinds of calls of a gate, compiled."""
    pytest.importorskip("triton", reason="needs Triton")
    return compile_all(str(request.path), name, tmp_path_factory.mktemp("compiled"))


@pytest.mark.one_case
def test_every_kind_compiles(name, kinds):
    gate = GATES[name]
    assert errors(kinds) == {}
    for levels in (*gate.chosen(reachable(gate.choice)), *(gate.levels([name]) for name in gate.there)):
        assert missing(kinds, **levels) == []


@pytest.mark.one_case
def test_registers_and_spills(name, kinds):
    assert over_registers(kinds, GATES[name].registers) == {}
    assert spills(kinds) == {}


@pytest.mark.one_case
def test_what_else_holds(name, kinds):
    for holds in GATES[name].holds:
        holds(kinds)


@pytest.mark.parametrize("option", [*SHARDS, "sample_losses", "sample_losses_and_grad"])
def test_options_are_numbers_that_kernels_are_given(option):
    """Declared as float64: Triton would take a float for a float32, and would compile anew for each constant."""
    import triton.language as tl

    op = {**graph_operators(), **loss_operators()}[option]
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
        for launch in planned(op, specs, {**op.attributes, **given}).launches:
            annotations = launch.kernel.fn.__annotations__
            floats = [each for each, value in launch.arguments.items() if isinstance(value, float)]
            assert floats
            assert [annotations.get(each) for each in floats] == [tl.float64] * len(floats)
            constants = {each for each in launch.kernel.arg_names if annotations.get(each) is tl.constexpr}
            assert "CAPPED" in constants
            found.append({each: launch.arguments[each] for each in constants & launch.arguments.keys()})
    assert found[: len(found) // 2] == found[len(found) // 2 :]


if __name__ == "__main__":
    compile_share(GATES[sys.argv[1]], int(sys.argv[2]))
