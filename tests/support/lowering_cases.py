"""Nodes to lower: of each operator with an ONNX name those of its examples, of the others a formula of references."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from operator_nodes import OVERLOADS, attributes_of, feeds_of, placed, shapes_of
from samples import sample

from opgrad.cli.examples import examples, expected
from opgrad.contract import reference
from opgrad.ops import operators, public_operators


class Case(NamedTuple):
    """A node: its inputs in order, None for one that is left out, and what its outputs are in float64.

    shape: that of the output, where the graph must tell it. terms: the length of the longest sum.
    """

    inputs: list[Any]
    exact: list[Any]
    attributes: Mapping[str, Any] = {}
    domain: str = "com.microsoft"
    shape: tuple[int, ...] | None = None
    terms: int = 100


# onnxruntime has the operators of the body for float32 alone.
SINGLE = {"AveragePoolGrad", "BiasGelu", "BiasGeluGrad_dX", "ConvGrad", "ConvTransposeGrad", "Gelu", "GeluGrad"}
SINGLE |= {"ResizeGrad", "SimplifiedLayerNormalization"}
LABELS = ({"integer": "int32"}, {"ignore_index": 1}, {"reduction": "sum", "ignore_index": 1, "optional": False})
LABELS += ({"reduction": "none", "ignore_index": -1}, {"ignore_index": 2**32, "integer": "int32"})
# Of the operators that every front end has: shapes with what else belongs to them.
SHAPES = {
    "elements": [((3, 5), {}), ((), {"alpha": -2.0}), ((0, 3), {}), ((2, 4), {"scale_down": True, "overwrite": True})],
    "rows": [*(((2, 3, 4), {"axis": axis}) for axis in (-1, 0, 1, -2)), ((0, 3), {"axis": 0}), ((5,), {"axis": 0})],
    "classes": [(shape, given) for shape in ((3, 4), (2, 4, 3), (2, 4, 3, 1)) for given in LABELS],
    "slices": [
        ((5, 3), {"indices": (2, 2)}), ((5, 3), {"indices": (3,), "axis": 1}), ((4,), {"indices": (3,)}),
        ((2, 5, 3), {"indices": (1, 3), "axis": 1, "integer": "int32"}), ((2, 5, 3), {"indices": (2, 2), "axis": -1}),
        ((2, 5, 3), {"indices": (2,), "axis": -2}), ((2, 5, 3), {"indices": (), "axis": 1}),
        ((5, 3), {"indices": (0,)}),
    ],
}  # fmt: skip


def arguments_of(op, dtype, rng):
    """The arguments of calls of an operator, with the length of their longest sum."""
    if op.name not in operators():
        for example in examples(op, dtype):
            given = dict(example.arguments)
            if has_form(op, given, dtype):
                yield fitting(given), example.terms
        return
    for shape, options in SHAPES[op.kind]:
        given = sample(op, shape, dtype, rng, **options)
        if options.get("ignore_index", 2**32) < 2**32:
            given["labels"].flat[::2] = options["ignore_index"]
        yield given, 100
    if op.kind == "classes":  # nothing that counts
        yield given | {"labels": np.full_like(given["labels"], 9), "ignore_index": 9}, 100
    if op.name in ("relu_grad", "leaky_relu_grad"):
        edges = np.array([[0.0, -0.0, np.nan, 1], [-1, np.inf, -np.inf, 1e-30]], dtype)
        yield sample(op, (2, 4), dtype, rng) | {op.arrays[1]: edges}, 1


def has_form(op, given, dtype):
    """Whether a form computes what an operator does: a dropout draws other numbers."""
    if given.get("shape") == () or given.get("dropout"):
        return False
    return given.get("out_dtype", dtype) == dtype


def fitting(given):
    """Masks as the ratio draws them, and numbers of an activation that are not all in its tail."""
    if "mask" in given and given.get("ratio") in (0.0, 1.0):
        given["mask"] = np.full_like(given["mask"], given["ratio"] == 0)
    if {*given} in ({"dy", "x"}, {"dy", "x", "bias"}):
        given["x"] = given["x"] / 4
    return given


def declared(op, onnx, dtype, rng):
    """The cases of an operator's node. Attributes that have the original's default are left out."""
    known = {name.rstrip("?*") for name in onnx.inputs} | {*op.attributes, "needs", "out_dtype"}
    for given, terms in arguments_of(op, dtype, rng):
        if onnx.until_13 and not given["dy"].size:
            continue
        given = {name: value for name, value in given.items() if name in known}
        exact = expected(op, given | over_the_rest(onnx, given))
        attributes = attributes_of(op, onnx, given)
        attributes = {
            name: value
            for name, value in attributes.items()
            if value != onnx.attributes[name] or (name == "axis" and "arrays" in given)
        }
        if op.family == "convolution":
            attributes["kernel_shape"] = given["w"].shape[2:]
        inputs = [None if port is None else port[2] for port in feeds_of(op, onnx, given)]
        if op.name == "resize_grad":
            inputs = [*inputs[:2], *(each if each.size else None for each in inputs[2:])]  # regions and scales
        results = placed(op, onnx, given, exact)
        results = [np.array([True]), *results] if onnx.outputs[0] == "updated" else results
        shape = next(iter(shapes_of(op, onnx, given).values()), None)
        yield Case(inputs, results, attributes, onnx.origin, shape, max(terms, 100))


def over_the_rest(onnx, given):
    """The axes of an operator that takes its axis with all behind it."""
    if not onnx.until_13:
        return {}
    rank = given["dy"].ndim
    return {"axis": tuple(range(given["axis"] % rank, rank))}


ONNX_NAMES = {onnx.name: (op, onnx) for op in public_operators().values() for onnx in op.onnx if onnx.name in OVERLOADS}


def by_formula(rng) -> dict[str, Callable[[], list[Case]]]:
    """Cases of the nodes that no operator declares."""

    def case(arrays, results, attributes=None, **more):
        results = results if isinstance(results, tuple) else (results,)
        return Case(arrays, [*results], attributes or {}, **more)

    def gelu(*arrays, name="gelu"):
        return case([*arrays], reference(name)(sum(arrays)))

    def product(a, b, exact, **attributes):
        return case([a, b], exact(a, b), attributes)

    def ratio_of_nothing(x, bias):
        y = reference("softmax")(x + bias)
        return case([x, bias, np.array(0.0)], (y, np.ones(y.shape, bool), y))

    def from_result(dy, normalized, scale, bias, inv_std):
        y = normalized * scale + bias
        exact = reference("layer_normalization_grad")(dy, normalized / inv_std, scale, np.zeros((4, 1)), inv_std)
        return case([dy, y, scale, bias, inv_std], exact)

    def normalized(axis, *shape):
        x, scale = rng.normal(size=(2, 3, 4)), rng.normal(size=shape)
        y, inv_std = reference("simplified_layer_normalization")(x, scale, axis)
        return case([x, scale], (y, inv_std), {"axis": axis}, domain="")

    def n(*shape):
        return rng.normal(size=shape)

    return {
        "Gelu": [gelu(n(3, 5))],
        "BiasGelu": [gelu(n(3, 5), n(5))],
        "FastGelu": [gelu(n(3, 5), name="fast_gelu"), gelu(n(3, 5), n(5), name="fast_gelu")],
        "BiasSoftmaxDropout": [ratio_of_nothing(n(3, 4), n(3, 4))],
        "InvertibleLayerNormalizationGrad": [
            from_result(n(4, 6), n(4, 6), rng.random(6) + 0.5, n(6), rng.random((4, 1)))
        ],
        "FusedMatMul": [
            product(n(2, 3, 4), n(2, 4, 5), lambda a, b: 0.5 * (a @ b), alpha=0.5),
            product(n(4, 3), n(5, 4), lambda a, b: a.T @ b.T, transA=1, transB=1),
            product(
                n(3, 2, 4), n(2, 5, 4), lambda a, b: a.transpose(1, 0, 2) @ b.swapaxes(1, 2), transBatchA=1, transB=1
            ),
        ],
        "SimplifiedLayerNormalization": [normalized(-1, 4), normalized(1, 3, 4)],
    }


def cases(name, dtype, rng):
    """The cases of an ONNX operator."""
    return declared(*ONNX_NAMES[name], dtype, rng) if name in ONNX_NAMES else by_formula(rng)[name]
