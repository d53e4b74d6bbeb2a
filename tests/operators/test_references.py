"""References by central differences in float64, the examples of the documentation, and ONNX's own node tests."""

import importlib
import itertools
import pkgutil

import numpy as np
import packed
import pytest
from accuracy import check_slopes
from onnx import helper
from onnx.backend.test.case import node as nodes
from samples import reference, sample, several

import opgrad
from opgrad.cli.examples import examples
from opgrad.ops import operators, public_operators

SHAPES = [(3, 4), (2, 5, 3)]
GRADIENTS = [op for op in public_operators().values() if op.forward]
SAVED = {"mean": "saved_mean", "inv_std": "saved_inv_std"}  # as batch_norm_internal calls them


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


def small_calls(op, rng):
    """Arguments of a forward operator: samples with each attribute, or the small examples of a training graph's."""
    if op.name in operators():
        for shape, optional, attributes in itertools.product(SHAPES, (True, False), attribute_choices(op)):
            given = sample(op, shape, "float64", rng, optional=optional, **attributes)
            # relu has no slope at 0: stay out of a step's reach.
            given[op.arrays[0]][np.abs(given[op.arrays[0]]) < 1e-3] = 0.5
            yield given
        return
    for example in examples(op, "float64"):
        given = dict(example.arguments)
        is_small = given[op.arrays[0]].size > 0 and sum(map(np.size, given.values())) < 3000
        if is_small and given.get("training_mode", True):
            yield given


@pytest.mark.any_cpu
@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda op: op.name)
def test_gradients_are_slopes(gradient, rng):
    """Of the sum of a result times a random array."""
    forward, count = public_operators()[gradient.forward], 0
    for given in small_calls(forward, rng):
        results = dict(zip(forward.results, reference(forward, given), strict=True))
        main = np.asarray(next(iter(results.values())))
        dy = rng.normal(size=main.shape) if "dy" in gradient.inputs else np.ones(main.shape)
        known = given | results | {"dy": dy, "shape": np.shape(given[forward.arrays[0]])}
        known |= {name: results[other] for name, other in SAVED.items() if other in results}
        names = [name for name in (*gradient.inputs, *gradient.attributes) if name in known]
        found = several(gradient.reference(**{name: known[name] for name in names}))
        found = dict(zip(gradient.results, found, strict=True))
        arrays = {name: given[name] for name in given if f"d{name}" in found}

        def total(given=given, dy=dy, **arrays):
            return np.sum(dy * reference(forward, given | arrays)[0])

        check_slopes(total, arrays, {name: found[f"d{name}"] for name in arrays}, rng)
        count += bool(arrays)
    assert count > 1


@pytest.mark.parametrize("name", public_operators())
def test_the_example_gives_what_it_shows(name):
    assert packed.shows_its_result(public_operators()[name])


FUNCTIONS = {
    "Softmax": opgrad.softmax,
    "LogSoftmax": opgrad.log_softmax,
    "SoftmaxCrossEntropyLoss": opgrad.softmax_cross_entropy_loss,
    "Gather": opgrad.gather,
    "Relu": opgrad.relu,
    "Sigmoid": opgrad.sigmoid,
    "Tanh": opgrad.tanh,
    "LeakyRelu": opgrad.leaky_relu,
}


def cases():
    """The tests whose model is one node of an operator that we have; a module of onnx computes its tests on import."""
    for _, name, _ in pkgutil.iter_modules(nodes.__path__):
        if any(op.lower().startswith(name.replace("_", "")) for op in FUNCTIONS):
            importlib.import_module(f"{nodes.__name__}.{name}")
    known = [(case, case.model.graph.node) for case in nodes._NodeTestCases if case.model is not None]
    return [
        pytest.param(found[0], *case.data_sets[0], id=case.name)
        for case, found in known
        if len(found) == 1 and found[0].op_type in FUNCTIONS
    ]


CASES = cases()


@pytest.mark.parametrize(("node", "inputs", "outputs"), CASES)
def test_node(node, inputs, outputs):
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    if "reduction" in attributes:
        attributes["reduction"] = attributes["reduction"].decode()
    results = several(FUNCTIONS[node.op_type](*inputs, **attributes))
    assert len(results) >= len(outputs)
    for result, expected in zip(results, map(np.asarray, outputs), strict=False):
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-7)


def test_every_operator_has_cases():
    assert {case.values[0].op_type for case in CASES} == set(FUNCTIONS)
