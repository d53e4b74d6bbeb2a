"""The losses over the last axis and their gradients as nodes of stock onnxruntime."""

import numpy as np
import pytest
from graph_cases import check_close
from onnx_models import one_node, run

from opgrad.cli.examples import expected as reference
from opgrad.contract import DTYPES, FLOATS
from opgrad.ops import graph_operators

REDUCTIONS = ("mean", "sum", "none")
OUTPUTS = (["loss"], ["loss", "log_prob"], ["loss"])


def node(op_type, name, feeds, dtype, outputs, reduction):
    """The node's results and the reference's."""
    ports = [(each, dtype if array.dtype.kind not in "iu" else array.dtype.name) for each, array in feeds.items()]
    cast = {each: array if array.dtype.kind in "iu" else array.astype(DTYPES[dtype]) for each, array in feeds.items()}
    model = one_node(op_type, ports, [(each, dtype) for each in outputs], reduction=reduction)
    results = [array.astype(DTYPES[dtype]) for array in run(model, cast)]
    return results, reference(graph_operators()[name], {**cast, "reduction": reduction})[: len(outputs)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("outputs", "reduction"), list(zip(OUTPUTS, REDUCTIONS, strict=True)))
def test_dense(dtype, outputs, reduction, rng):
    labels = np.abs(rng.normal(size=(5, 6, 33)))
    feeds = {"logits": rng.normal(size=labels.shape), "labels": labels / labels.sum(-1, keepdims=True)}
    results, expected = node("SoftmaxCrossEntropy", "softmax_cross_entropy", feeds, dtype, outputs, reduction)
    check_close(results, expected, 33)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_dense_gradient(dtype, reduction, rng):
    labels = np.abs(rng.normal(size=(5, 33)))
    dy = np.asarray(rng.normal(size=5 if reduction == "none" else ()))
    feeds = {"dy": dy, "log_prob": -labels, "labels": labels}
    name = "softmax_cross_entropy_grad"
    results, expected = node("SoftmaxCrossEntropyGrad", name, feeds, dtype, ["dlogits"], reduction)
    check_close(results, expected, 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("labels", "reduction"), list(zip(("int32", "int64", "int64"), REDUCTIONS, strict=True)))
@pytest.mark.parametrize("weighted", [False, True])
def test_sparse(dtype, labels, reduction, weighted, rng):
    feeds = {"logits": rng.normal(size=(5, 6, 33)), "labels": rng.integers(0, 33, (5, 6)).astype(labels)}
    feeds |= {"weight": rng.random((5, 6))} if weighted else {}
    outputs = ["loss", "log_prob"] if weighted else ["loss"]
    name = "sparse_softmax_cross_entropy"
    results, expected = node("SparseSoftmaxCrossEntropy", name, feeds, dtype, outputs, reduction)
    check_close(results, expected, 33)
    dy = np.asarray(rng.normal(size=(5, 6) if reduction == "none" else ()))
    given = {"dy": dy, "log_prob": -np.abs(feeds.pop("logits")), **feeds}
    results, expected = node("SparseSoftmaxCrossEntropyGrad", f"{name}_grad", given, dtype, ["dlogits"], reduction)
    check_close(results, expected, 1)


def test_a_wrong_label():
    feeds = {"logits": np.zeros((2, 3), "f4"), "labels": np.array([0, 3])}
    model = one_node("SparseSoftmaxCrossEntropy", [("logits", "float32"), ("labels", "int64")], [("loss", "float32")])
    with pytest.raises(Exception, match=r"sparse_softmax_cross_entropy: labels\[1\] is 3, expected 0 to 2"):
        run(model, feeds)
