"""Rows for the gate of compiled kernels: how many and how long, to reach a regime, and how they lie in memory."""

from cuda_gate import FULL

from opgrad.contract import DTYPES, Spec, arrangement, normalise
from opgrad.contract.signature import prepare

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
    before, *others = _numbers(samples[-1] if huge else samples[SAMPLES.index(kind["samples"])])
    before = HUGE if huge else before
    for length in {"one": (1,), "huge": () if huge else (HUGE,)}.get(kind["length"], lengths):
        n = length - 16 + REST[kind["length"]] if REST[kind["length"]] else length
        yield (before, n, *others) if len(others) < 2 else (before, *others, n)


def _numbers(samples):
    return (samples,) if isinstance(samples, int) else samples


def program_of(op, kind, attributes, dtypes):
    """The program of a kind whose rows lie along axis 1, or None if no shape leads to its regime.

    dtypes: of those arguments and results that are there.
    """
    for shape in shapes_of(kind, ROWS | COLUMNS | POINTWISE | ELEMENTS):
        specs = specs_of(op, shape, attributes, dtypes, kind["layout"])
        inputs, out = ([specs.get(name) for name in names] for names in (op.inputs, op.results))
        program = op.kernel("opgrad.cuda")(prepare(op, inputs, attributes, out, any_stride=True))
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
    """Levels without the regimes that this Triton does not have."""
    return {name: [each for each in of if each != "cluster" or clusters()] for name, of in levels.items()}


def clusters():
    """Whether this Triton reduces across a cluster."""
    from opgrad.cuda import regimes

    return regimes.clusters()
