"""Equal tensors that an exporter stored once: who reads them, and copies for the layers."""

import numpy as np
import onnx
import pytest
from small_models import LABELS, build, normal, run
from typer.testing import CliRunner

from opgrad.cli.app import app
from opgrad.onnx.graph.nodes import SCOPES
from opgrad.training import ArtifactSet, Trainer, read_checkpoint
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts
from opgrad.training.make.selection import untie

CE, SGD = LossType.CrossEntropyLoss, OptimType.SGD
ONES, ZEROS = np.ones(8, np.float32), np.zeros(8, np.float32)
X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)


def norms(names=("/a/Norm", "/b/Norm")):
    """Two fresh normalizations that share scale and bias."""
    text = """g (float[n, 8] x) => (float[n, 3] scores) {
        n = LayerNormalization(x, a.weight, a.bias)  h = MatMul(n, v)  m = LayerNormalization(h, a.weight, a.bias)
        scores = MatMul(m, w)
    }"""
    weights = {"scale": ONES, "bias": ZEROS, **normal(v=(8, 8), w=(8, 3))}
    model = build(text.replace("a.weight", "scale").replace("a.bias", "bias"), weights)
    for node, name in zip((model.graph.node[0], model.graph.node[2]), names, strict=True):
        node.name = name
        node.input[1:] = ["a.weight", "a.bias"]
    model.graph.initializer[0].name, model.graph.initializer[1].name = "a.weight", "a.bias"
    return model


def trained(model, folder, **options):
    made = generate_artifacts(model, None, None, CE, SGD, folder, **options)
    trainer = Trainer(ArtifactSet.load(folder), 0.5)
    for _ in range(3):
        loss = trainer.step({"x": X, "labels": LABELS})
    return made, trainer, loss


def test_layers_that_read_one_tensor_are_told(tmp_path):
    made, _, _ = trained(norms(), tmp_path)
    assert made.trainable == ("a.weight", "a.bias", "v", "w")
    assert made.notes == (
        "2 tensors read by several layers, trained or frozen as one: 'a.weight' by 'a', 'b'; 'a.bias' by 'a', 'b'; "
        "untie them if only their first values are the same",
    )
    onnx.save(norms(("", "")), tmp_path / "model.onnx")
    told = CliRunner().invoke(app, ["inspect", str(tmp_path / "model.onnx")], env={"COLUMNS": "300"}).output
    assert "a.weight by \"LayerNormalization (the node that makes 'n')\"" in told.replace("\n", " ")
    assert "with --untie each its own" in told
    frozen = generate_artifacts(norms(), None, ["b.*"], CE, artifact_directory=tmp_path)
    assert frozen.frozen == ("a.weight", "a.bias")
    assert len(frozen.notes) == 1


@pytest.mark.parametrize("untie", [False, True])
def test_a_node_that_asks_for_a_shape_is_no_layer(untie, tmp_path):
    text = """g (float[n, 8] x) => (float[n, 3] scores) {
        count = Size(w)  sizes = Shape(w)  rows = Gather <axis = 0> (sizes, zero)  a = Cast <to = 1> (count)
        b = Cast <to = 1> (rows)  h = MatMul(x, w)  d = Div(h, a)  scores = Mul(d, b)
    }"""
    model = build(text, {**normal(w=(8, 3)), "zero": np.array(0)})
    made = generate_artifacts(model, None, None, CE, SGD, tmp_path, untie=untie)
    assert (made.trainable, made.notes) == (("w",), ())
    assert "shared" not in CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    onnx.save(model, tmp_path / "model.onnx")
    assert "shared" not in CliRunner().invoke(app, ["inspect", str(tmp_path / "model.onnx")]).output


def test_untied_layers_are_trained_apart(tmp_path):
    made, trainer, _ = trained(norms(), tmp_path, untie=True)
    assert made.trainable == ("a.weight", "a.bias", "v", "w", "b.weight", "b.bias")
    assert made.notes == ()
    assert (trainer.parameters["a.weight"] != trainer.parameters["b.weight"]).any()
    plain = generate_artifacts(norms(("", "")), None, None, CE, SGD, tmp_path, untie=True)
    assert set(plain.trainable) == {"a.weight", "a.bias", "v", "w", "a.weight.copy", "a.bias.copy"}


def test_copies_compute_the_same(tmp_path):
    """Through nodes that several layers share, and through the Identity that the older exporter writes."""
    text = """g (float[n, 8] x) => (float[n, 3] scores) {
        turned = Transpose<perm = [1, 0]>(v)  wide = Cast<to = 1>(turned)
        other = Identity(scale)  h = MatMul(x, wide)  k = MatMul(h, wide)  n = Mul(k, scale)  m = Mul(n, other)
        scores = MatMul(m, w)
    }"""
    model = build(text, {"scale": ONES * 2, **normal(v=(8, 8), w=(8, 3))})
    parted = onnx.ModelProto()
    parted.CopyFrom(model)
    untie(parted, {})
    onnx.checker.check_model(parted, full_check=True)
    assert [each.name for each in parted.graph.initializer] == ["scale", "v", "w", "other", "v.copy"]
    np.testing.assert_array_equal(run(model, {"x": X}), run(parted, {"x": X}))
    made, trainer, _ = trained(model, tmp_path, untie=True)
    assert made.trainable == ("scale", "v", "w", "other", "v.copy")
    assert (trainer.parameters["v"] != trainer.parameters["v.copy"]).any()


def test_a_module_that_is_called_twice_is_one_layer(tmp_path):
    model = norms(("", ""))
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":
            node.metadata_props.add(key=SCOPES, value="['', 'a', 'layer_norm']")
    made = generate_artifacts(model, None, None, CE, SGD, tmp_path, untie=True)
    assert made.trainable == ("a.weight", "a.bias", "v", "w")
    assert generate_artifacts(model, None, None, CE, SGD, tmp_path).notes == ()


@pytest.mark.parametrize("names", [("", ""), ("/a/Norm", "/b/Norm")])
@pytest.mark.parametrize("mode", [0, 1])
def test_statistics_come_apart(mode, names, tmp_path):
    """Scale and variance of a fresh batch normalization are equal, and so are bias and mean."""
    outputs = [", m1, v1", ", m2, v2"] if mode else ["", ""]
    text = f"""g (float[6, 8] x) => (float[6, 3] scores) {{
        n{outputs[0]} = BatchNormalization<training_mode = {mode}>(x, one, zero, zero, one)  h = MatMul(n, v)
        k{outputs[1]} = BatchNormalization<training_mode = {mode}>(h, one, zero, zero, one)  scores = MatMul(k, w)
    }}"""
    model = build(text, {"one": ONES, "zero": ZEROS, **normal(v=(8, 8), w=(8, 3))})
    model.graph.node[0].name, model.graph.node[2].name = names
    made, trainer, loss = trained(model, tmp_path)
    assert {"one", "zero", "v", "w"} <= set(made.trainable)
    assert len(made.frozen) == 4
    if all(names):
        own = {f"{layer}.{name}" for layer in "ab" for name in ("running_mean", "running_var")}
        assert set(made.frozen) == own
    values = read_checkpoint(tmp_path / "checkpoint").parameters
    assert (trainer.parameters["one"] != values["one"]).any()
    onnx.save(model, tmp_path / "model.onnx")
    told = CliRunner().invoke(app, ["inspect", str(tmp_path / "model.onnx")], env={"COLUMNS": "300"}).output
    assert "4 statistics of normalization" in told
    assert loss < 2
