"""Weights that exporters rename are found by the paths of their modules."""

import fnmatch
import re

import numpy as np
import onnx
import pytest
from small_models import build, normal
from typer.testing import CliRunner

from opgrad.cli.app import app
from opgrad.onnx.graph.nodes import SCOPES, module_path
from opgrad.training import read_checkpoint
from opgrad.training.artifacts import OptimType, generate_artifacts
from opgrad.training.make.selection import Candidates
from opgrad.training.onnxblock.loss import CrossEntropyLoss
from opgrad.training.quantization import KINDS, keep_paths, paths_of, prepare

LOSS = CrossEntropyLoss(class_axis=-1)


def exported(path, dynamo):
    """A model of layers with three axes, whose weights both exporters turn and rename."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))

        def forward(self, tokens):
            x = self.table(tokens)
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.head(x)

    torch.manual_seed(0)
    model, tokens = Model(), torch.zeros(2, 5, dtype=torch.long)
    names = {"input_names": ["tokens"], "output_names": ["scores"]}
    if dynamo:
        pytest.importorskip("onnxscript")
        torch.onnx.export(model.eval(), (tokens,), path, dynamo=True, opset_version=18, verbose=False, **names)
    else:
        torch.onnx.export(model.eval(), (tokens,), path, dynamo=False, opset_version=17, **names)
    return {name: each.detach().numpy() for name, each in model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True])
def test_patterns_take_weights_by_their_modules(dynamo, tmp_path):
    path = tmp_path / "model.onnx"
    parameters = exported(path, dynamo)
    own = {each.name for each in onnx.load(path).graph.initializer}
    assert "layers.0.0.bias" in own
    assert "layers.0.0.weight" not in own
    for pattern in ("layers.0.*", "*.weight", "head.weight"):
        made = generate_artifacts(path, None, [pattern], LOSS, OptimType.SGD, tmp_path)
        # Both exporters store equal tensors once, such as the scales of fresh norms.
        expected = {parameters[name].tobytes() for name in fnmatch.filter(parameters, pattern)}
        frozen = read_checkpoint(tmp_path / "checkpoint").frozen
        turned = {array.T.tobytes() for array in frozen.values()} | {array.tobytes() for array in frozen.values()}
        assert expected <= turned
        assert not any("a pattern takes" in note for note in made.notes)
    trained = generate_artifacts(path, ["head.weight"], None, LOSS, OptimType.SGD, tmp_path).trainable
    assert len(trained) == 1
    told = CliRunner().invoke(app, ["inspect", str(path)], env={"COLUMNS": "200"}).output
    assert f"{trained[0]} (head.weight)" in told


def linear(node="", scopes=None):
    text = "g (float[n, 5, 8] x) => (float[n, 5, 3] y) { h = MatMul(x, val_3) y = Add(h, l.bias) }"
    model = build(text.replace("l.bias", "bias"), normal(val_3=(8, 3), bias=(3,)))
    model.graph.initializer[1].name = model.graph.node[1].input[1] = "l.bias"
    model.graph.node[0].name = node
    if scopes is not None:
        model.graph.node[0].metadata_props.add(key=SCOPES, value=scopes)
    return model


def test_a_bias_without_the_weight_of_its_layer_is_told(tmp_path):
    made = generate_artifacts(linear(), None, ["l.*"], LOSS, artifact_directory=tmp_path)
    assert (made.trainable, made.frozen) == (("val_3",), ("l.bias",))
    assert len(made.notes) == 1
    assert "a pattern takes 'l.bias' and not 'val_3', the weight of the same layer" in made.notes[0]
    assert generate_artifacts(linear("/l/MatMul"), None, ["l.b*"], LOSS, artifact_directory=tmp_path).notes == ()
    assert generate_artifacts(linear(), None, ["l.bias"], LOSS, artifact_directory=tmp_path).notes == ()
    assert generate_artifacts(linear(), ["val*", "l.*"], None, LOSS, artifact_directory=tmp_path).notes == ()


@pytest.mark.parametrize(
    ("node", "scopes", "path"),
    [
        ("/model/layers.0/q/MatMul_1", None, "model.layers.0.q"),
        ("/model/layers.0/layers.0.1/MatMul", None, "model.layers.0.1"),
        ("/MatMul", None, ""),
        ("model/q/MatMul", None, None),
        ("", None, None),
        ("node_MatMul_3", "['', 'model', 'model.q', 'linear_1']", "model.q"),
        ("/other/MatMul", "['', 'linear']", ""),
        ("node_MatMul_3", "['linear']", None),
        ("node_MatMul_3", "[[[", None),
        ("node_MatMul_3", "[1, 2]", None),
        ("node_MatMul_3", "print()", None),
    ],
)
def test_paths_of_modules(node, scopes, path):
    assert module_path(linear(node, scopes).graph.node[0]) == path


def test_names_that_match_nothing_are_told_with_those_of_modules(tmp_path):
    with pytest.raises(ValueError, match=r"'l.weigth', which is no initializer of the model; did you mean 'l.weight'"):
        generate_artifacts(linear("/l/MatMul"), None, ["l.weigth"], LOSS, artifact_directory=tmp_path)


def test_the_weight_of_a_quantized_layer_has_its_module(tmp_path):
    text = """g (float[n, 8] x) => (float[n, 3] y) {
        q = QuantizeLinear(val_3, scale)  d = DequantizeLinear(q, scale)  y = MatMul(x, d)
    }"""
    model = build(text, {**normal(val_3=(8, 3)), "scale": np.float32(0.1)})
    model.graph.node[2].name = "/head/MatMul"
    made = generate_artifacts(model, None, ["scale"], CrossEntropyLoss(), artifact_directory=tmp_path)
    assert made.trainable == ("val_3",)
    assert generate_artifacts(model, ["head.*"], None, CrossEntropyLoss(), artifact_directory=tmp_path).trainable


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_patterns_choose_what_is_quantized(kind, dynamo, tmp_path):
    exported(tmp_path / "model.onnx", dynamo)
    batches = [{"tokens": np.zeros((2, 5), np.int64)}] if kind == "int8" else ()
    names = Candidates(onnx.load(tmp_path / "model.onnx")).modules
    renamed = {named: name for name, several in names.items() for named in several}
    found = []
    for patterns in (None, ["layers.1.*", "head.weight"]):
        graph = prepare(tmp_path / "model.onnx", kind, batches, weights=patterns).graph
        scales = {each.name.removesuffix("_scale.log") for each in graph.initializer if each.name.endswith(".log")}
        found.append(scales & {each.name for each in graph.initializer})
    assert found[1] == {name for name in found[0] if name in (renamed["layers.1.0.weight"], renamed["head.weight"])}
    assert len(found[0]) > len(found[1]) == 2
    for wrong in ("layer.1.*", "layers.1.0.bias"):
        with pytest.raises(ValueError, match=rf"quantization.prepare: weights has '{re.escape(wrong)}', which "):
            prepare(tmp_path / "model.onnx", kind, batches, weights=["head.*", wrong])


def test_a_module_is_told_of_each_reader_of_a_weight():
    text = "g (float[n, 8] x) => (float[n, 8] y) { h = MatMul(x, w) y = MatMul(h, w) }"
    model = build(text, normal(w=(8, 8)))
    for node, path in zip(model.graph.node, ("a", "b"), strict=True):
        node.metadata_props.add(key=SCOPES, value=f"['', '{path}', '']")
    paths = paths_of(model)
    assert paths == {"w": ["a", "b"]}
    fewer = build(text.replace("h = MatMul(x, w) y = MatMul(h, w)", "y = MatMul(x, w)"), normal(w=(8, 8)))
    keep_paths(fewer, paths)
    assert module_path(fewer.graph.node[0]) is None
    keep_paths(model, {"w": ["c", "d"]})
    assert list(map(module_path, model.graph.node)) == ["c", "d"]
