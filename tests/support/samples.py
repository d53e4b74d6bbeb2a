"""Valid arguments for any declared operator, its reference, and the call itself."""

import numpy as np
import pytest

import opgrad
from opgrad.call import arrays
from opgrad.cli.examples.arguments import arguments
from opgrad.contract import DTYPES, FLOATS, REDUCTIONS
from opgrad.cpu import plans
from opgrad.ops import operators
from opgrad.ops.reference import primitive


def for_operators(wanted):
    """Run a test for the operators of which `wanted` holds alone."""
    chosen = [op for op in operators().values() if wanted(op)]
    return pytest.mark.parametrize("op", chosen, ids=[op.name for op in chosen])


# Every operator, with each reduction that it has.
with_reductions = pytest.mark.parametrize(
    ("op", "reduction"),
    [
        pytest.param(op, reduction, id=f"{op.name}-{reduction}")
        for op in operators().values()
        for reduction in (REDUCTIONS if "reduction" in op.attributes else ("mean",))
    ],
)


# The last operator of each kind, for what does not depend on formulas.
OF_KINDS = list({op.kind: op for op in operators().values()}.values())
each_kind = for_operators(OF_KINDS.__contains__)


class Drawn:
    """Random NumPy arrays from a generator: labels and indices of type `integer`, numbers that spread by `size`.

    negative: what indices name may also be counted from the end.
    """

    def __init__(self, rng, integer, size, negative):
        self.rng, self.integer, self.size, self.negative = rng, integer, size, negative

    def integers(self, high, shape):
        return self.rng.integers(-high if self.negative else 0, max(high, 1), shape).astype(self.integer)

    def normal(self, shape, dtype):
        return cast(self.rng.normal(0, self.size, shape), dtype)

    def factors(self, shape, dtype):
        return cast(self.rng.uniform(0.5, 2, shape), dtype)


def sample(op, shape, dtype, rng, *, optional=True, integer="int64", indices=(5,), size=1.0, **attributes):
    """Keyword arguments of `op` for a first forward array of `shape`, as `arguments` of opgrad.testing makes them.

    Labels and indices are in range; what a gradient takes from its forward operator comes from that one's reference.
    `size` is the spread of the numbers, `indices` the shape of indices; attributes that the operator does not have are
    left out.
    """
    attributes = {name: value for name, value in attributes.items() if name in op.attributes}
    slices = op.kind == "slices"
    if slices and not shape[attributes.get("axis", 0)]:
        indices = (0,)
    drawn = Drawn(rng, integer, size, slices)
    options = {"indices": indices, "optional": optional, "source": lambda seed: drawn}

    def forward(op, given):
        return [cast(result, dtype) for result in reference(op, given)]

    return arguments(op, tuple(shape), str(dtype), forward=forward, **options, **attributes)


def cast(values, dtype):
    """The values in this dtype; what is too large becomes infinite."""
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(DTYPES[str(dtype)])


def reference(op, arguments):
    """The results of the float64 reference, as a tuple."""
    exact = {
        name: value.astype(np.float64) if is_float(value) else value
        for name, value in arguments.items()
        if name not in ("out", "out_dtype")
    }
    with np.errstate(all="ignore"):
        return several(op.reference(**exact))


def is_float(value):
    return isinstance(value, np.ndarray) and value.dtype.name in FLOATS


def call(op, arguments, **more):
    """The results of the public function, as a tuple."""
    return several(getattr(opgrad, op.name)(**arguments, **more))


def fails(error, message, function, *args, **kwargs):
    """The call raises exactly this message."""
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert str(caught.value) == message


def refused(error, match, function, *args, **kwargs):
    """The call raises what this pattern matches."""
    with pytest.raises(error, match=match):
        function(*args, **kwargs)


def several(results):
    return results if isinstance(results, tuple) else (results,)


def accepted(op, name):
    """The dtypes that an argument may have, those of the general form included."""
    if op.general is None or name not in ("x", "dy", "y"):
        return op.inputs[name].dtypes
    return primitive.GRADIENT_TYPES if op.forward else primitive.TYPES


def elements(op, arguments):
    """The names of the arrays that have an entry for each element."""
    return [name for name, tensor in op.inputs.items() if tensor.role == "element" and is_float(arguments.get(name))]


def bits(array):
    """The array's bytes, in the order of its elements."""
    return np.ascontiguousarray(array).tobytes()


def losses_and_gradients(op, results):
    """The loss, or None; the gradient, or None."""
    found = dict(zip(op.results, results, strict=True))
    return found.get("loss"), found.get("dlogits")


def positive_zeros(array):
    values = array.astype(np.float64)
    return bool((values == 0).all() and not np.signbit(values).any())


def axis_choices(op, rank):
    """Every axis by both names, and tuples of adjacent ones where the operator takes them."""
    if "axis" not in op.attributes:
        return [{}]
    axes = list(range(-rank, rank))
    if op.kind == "rows":
        axes += [(0,), (-1,), (0, 1), (1, 2), (0, 1, 2), (-2, -1), (2, 1)] if rank == 3 else []
    return [{"axis": axis} for axis in axes]


def dispatcher(op):
    """A public function of the operator that knows no plan."""
    plans.PLANS.values.clear()
    return arrays.dispatcher(op)


def packed(outputs):
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def in_place_pairs(op, arguments):
    """Each result with each argument whose memory it may take."""
    for result, names in op.in_place.items():
        yield from ((result, name) for name in names if name in arguments)


def in_place_calls(op, arguments, expected):
    """For each such pair the argument's name, arguments with a copy of it, and results of which one is that copy."""
    for result, name in in_place_pairs(op, arguments):
        own = arguments | {name: arguments[name].copy()}
        made = zip(op.results, expected, strict=True)
        yield name, own, [own[name] if each == result else np.empty_like(array) for each, array in made]
