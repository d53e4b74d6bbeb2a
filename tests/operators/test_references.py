"""Every gradient's reference against central differences of its forward function, in float64."""

from functools import partial

import numpy as np
import pytest
from accuracy import differences
from samples import reference, sample

from opgrad.ops import operators

pytestmark = pytest.mark.any_cpu

STEP = 1e-5
SHAPES = [(3, 4), (2, 5, 3)]
GRADIENTS = [op for op in operators().values() if op.forward]


def changed(forward, arguments, variable, value):
    return reference(forward, arguments | {variable: value})[0]


def attribute_choices(op):
    if "axis" in op.attributes:
        yield from ({"axis": 0}, {"axis": 1}, {"axis": -1})
        if op.kind == "rows":
            yield {"axis": (0, 1)}
    elif "reduction" in op.attributes:
        for reduction in ("none", "mean", "sum"):
            yield {"reduction": reduction}
            yield {"reduction": reduction, "ignore_index": 1}
    elif "alpha" in op.attributes:
        yield from ({}, {"alpha": 0.3})
    else:
        yield {}


@pytest.mark.parametrize("optional", [True, False], ids=["optional", "required"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda op: op.name)
def test_is_the_slope_of_the_forward_function(gradient, shape, optional, rng):
    forward = operators()[gradient.forward]
    variable = forward.arrays[0]
    for attributes in attribute_choices(gradient):
        given = sample(forward, shape, "float64", rng, optional=optional, **attributes)
        # relu has no slope at 0: stay out of the step's reach.
        given[variable][np.abs(given[variable]) < 10 * STEP] = 0.5
        results = dict(zip(forward.results, reference(forward, given), strict=True))
        main = np.asarray(next(iter(results.values())))
        dy = rng.normal(size=main.shape) if "dy" in gradient.inputs else np.ones(main.shape)
        known = given | results | {"dy": dy, "shape": given[variable].shape}
        if optional and "bias" in gradient.inputs:
            known["bias"] = rng.normal(size=shape)
        names = [name for name in (*gradient.inputs, *gradient.attributes) if name in known]
        found = reference(gradient, {name: known[name] for name in names})[-1]
        expected = differences(partial(changed, forward, given, variable), given[variable], dy, STEP)
        expected = expected + known.get("bias", 0)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8, err_msg=str(attributes))
