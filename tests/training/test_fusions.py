"""Nodes that become one or others: what is replaced, what stays, and that results are the same."""

import numpy as np
import pytest
from artifact_sets import EXAMPLES
from differences import build
from onnx import helper, numpy_helper

from opgrad.cli.inspection import inspect
from opgrad.onnx.passes.patterns import use_internal_losses
from opgrad.onnxruntime import InferenceSession
from opgrad.training import ArtifactSet, Trainer
from opgrad.training.api import CheckpointState, Module
from opgrad.training.engine.training_graph import fuse_nodes

SIZES = {"x": (5, 4), "labels": (5,), "w": (4,), "dy": (5, 4), "row": (4,)}


def model(body, outputs, kind="float", one=1.0):
    """A graph with what the nodes of these tests read; all results are declared."""
    kinds = {name: "int64" if name == "labels" else kind for name in SIZES}
    inputs = ", ".join(f"{kinds[name]}[{', '.join(map(str, size))}] {name}" for name, size in SIZES.items())
    made, real = ", ".join(f"{kind}[] {name}" for name in outputs), np.float32 if kind == "float" else np.float64
    return build(f"g ({inputs}) => ({made}) {{ {body} }}", 17, {"one": real(one), "zero": real(0), "two": real(2)})


def losses(attributes="", of_gradient=None, weight="", outputs=(), extra="", **others):
    """A loss and its gradient."""
    backward = attributes if of_gradient is None else of_gradient
    body = f"""loss, p = SoftmaxCrossEntropyLoss {attributes} (x, labels{weight})
        dx = com.microsoft.SoftmaxCrossEntropyLossGrad {backward} (one, p, labels{weight}) {extra}"""
    return model(body, ("loss", "dx", *outputs), **others)


def choices(inputs, equal="x, row", **others):
    """Where, behind the comparison that makes its mask."""
    return model(f"mask = Less ({equal}) dx = Where ({inputs})", ("dx",), **others)


def run(given):
    random = np.random.default_rng(0)
    feeds = {}
    for value in given.graph.input:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        size = SIZES[value.name]
        feeds[value.name] = np.array(random.integers(-1, 4, size) if kind == np.int64 else random.random(size), kind)
    use_internal_losses(given)
    return InferenceSession(given.SerializeToString()).run(None, feeds)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"attributes": '<reduction = "sum", ignore_index = 2>'},
        {"weight": ", w", "of_gradient": "<ignore_index = -1>"},
        {"kind": "double"},
    ],
)
def test_a_loss_and_its_gradient_become_one_node(changed):
    changed_model, plain = losses(**changed), losses(**changed)
    if "ignore_index" in changed.get("attributes", {}):
        labels = np.array([0, 1, 2, 3, 2])
        for each in (changed_model, plain):
            each.graph.input.remove(next(value for value in each.graph.input if value.name == "labels"))
            each.graph.initializer.append(numpy_helper.from_array(labels, "labels"))
    assert [each.by for each in fuse_nodes(changed_model)] == ["SoftmaxCrossEntropyLossAndGrad"]
    assert [node.op_type for node in changed_model.graph.node] == ["SoftmaxCrossEntropyLossAndGrad"]
    for ours, theirs in zip(run(changed_model), run(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changed",
    [
        {"outputs": ("p",)},
        {"outputs": ("z",), "extra": "z = Exp (p)"},
        {"one": 2.0},
        {"attributes": '<reduction = "none">', "of_gradient": '<reduction = "mean">'},
        {"of_gradient": "<ignore_index = 2>"},
    ],
)
def test_a_loss_stays_whose_gradient_is_another_or_whose_logarithms_are_read(changed):
    changed_model, plain = losses(**changed), losses(**changed)
    assert fuse_nodes(changed_model) == []
    assert changed_model == plain


def test_a_choice_between_values_and_0_becomes_a_gradient_behind_a_mask():
    changed_model, plain = choices("mask, dy, zero"), choices("mask, dy, zero")
    assert [each.by for each in fuse_nodes(changed_model)] == ["FakeQuantGrad"]
    (ours,), (theirs,) = run(changed_model), run(plain)
    np.testing.assert_array_equal(ours, theirs)
    assert 0 < np.count_nonzero(ours) < ours.size


@pytest.mark.parametrize(
    ("inputs", "changed"),
    [
        ("mask, dy, two", {}),
        ("mask, zero, dy", {}),
        ("mask, dy, x", {}),
        ("mask, row, zero", {}),
        ("mask, dy, zero", {"equal": "row, w"}),
        ("mask, dy, zero", {"kind": "double"}),
    ],
)
def test_other_choices_stay(inputs, changed):
    changed_model, plain = choices(inputs, **changed), choices(inputs, **changed)
    assert fuse_nodes(changed_model) == []
    assert changed_model == plain


def test_training_steps_are_the_same_with_and_without():
    artifacts = ArtifactSet.load(EXAMPLES / "digits")
    random = np.random.default_rng(0)
    batch = {"x": random.random((7, 64), np.float32), "labels": random.integers(0, 10, 7)}
    batch = dict(zip((spec.name for spec in artifacts.inputs), batch.values(), strict=True))
    trainers = [Trainer(artifacts, fuse=together) for together in (True, False)]
    ours, theirs = ([trainer.step(batch) for _ in range(3)] for trainer in trainers)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    state = CheckpointState.load_checkpoint(artifacts.directory / "checkpoint")
    module = Module(artifacts.directory / "training_model.onnx", state, fuse=False)
    assert float(np.asarray(module(*batch.values()))) == pytest.approx(theirs[0], rel=1e-5)


def test_inspect_tells_what_is_replaced():
    (found,) = inspect(EXAMPLES / "digits").fused
    assert found.operators == ("SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossGrad")
    assert found.by == "SoftmaxCrossEntropyLossAndGrad"
