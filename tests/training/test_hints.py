"""What is said of models that cannot be trained as they are; models that other tools do not take, but are trained."""

import json
import logging

import numpy as np
import onnx
import pytest
from command import cli, succeeds
from differences import computed
from onnx import helper, numpy_helper
from small_models import build, normal, perceptron, set_of
from training_sets import load

from opgrad.cli.inspection import inspect
from opgrad.training import ArtifactSet, Dataset, Trainer
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts
from opgrad.training.files.dataset import load_file

CE = LossType.CrossEntropyLoss


def told(model, folder):
    """What inspect finds out, and what the command prints."""
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return inspect(folder / "model.onnx").training, cli("inspect", folder / "model.onnx", columns=400)[1]


def test_float64_is_refused_at_once(tmp_path, caplog):
    model = build("g (double[n, 4] x) => (double[n, 3] y) { h = MatMul(x, w) y = Add(h, b) }",
                  normal(dtype=np.float64, w=(4, 3), b=(3,)))  # fmt: skip
    found, text = told(model, tmp_path)
    assert "parameters in double are not trained here" in text
    assert any("convert the model to float32 first" in each for each in found.problems)
    with caplog.at_level(logging.WARNING):
        made = generate_artifacts(model, loss=CE, optimizer=OptimType.SGD, artifact_directory=tmp_path)
    assert "note: parameters in double are not trained here" in str(made)
    assert "double" in caplog.text
    assert "double" in str(inspect(tmp_path).problem)
    with pytest.raises(NotImplementedError, match="float64, expected float32"):
        Trainer(ArtifactSet.load(tmp_path))


# --- branches ---


def test_a_branch_says_which_size_decides(tmp_path):
    text = """g (float[batch, words, 4] x, float[batch, 4] z) => (float[batch, 3] scores) {
        s = Shape(x)  n = Gather(s, one)  c = Equal(n, one)  t = MatMul(x, w)
        p = If (c) <then_branch = a () => (float[batch, 3] u) { u = my.Mean(t) },
                    else_branch = b () => (float[batch, 3] v) { v = ReduceMax<axes = [1], keepdims = 0>(t) }>
        scores = Relu(p)
    }"""
    model = build(text, {**normal(w=(4, 3)), "one": np.array(1)}, domains=', "my": 1')
    found, text = told(model, tmp_path)
    wanted = "depends on the size of the input's axis 1 (words) of 'x': fix it, python -m onnxruntime.tools."
    assert wanted in found.problems[0]
    assert wanted in " ".join(text.split())
    with pytest.raises(NotImplementedError, match=r"axis 1 \(words\) of 'x'"):
        generate_artifacts(model, loss=CE, artifact_directory=tmp_path)


# --- quantized models ---


def test_a_quantized_model_says_what_can_be_done(tmp_path):
    text = "g (float[n, 4] x) => (float[n, 3] y) { w = DequantizeLinear(q, scale, zero)  y = MatMul(x, w) }"
    arrays = {"q": np.ones((4, 3), np.int8), "scale": np.array(0.1, np.float32), "zero": np.array(0, np.int8)}
    model = build(text, arrays)
    found, _ = told(model, tmp_path)
    assert "those of 1 node such as DequantizeLinear are quantized" in found.problems[0]
    with pytest.raises(ValueError, match="train the float model that this was made of, and quantize the result"):
        generate_artifacts(model, loss=CE, artifact_directory=tmp_path)


# --- a softmax of several nodes ---

SOFTMAXES = {
    "one node": "y = Softmax<axis = -1>(z)",
    "plain": "e = Exp(z)  t = ReduceSum<keepdims = 1>(e, axes)  y = Div(e, t)",
    "without the maximum": """m = ReduceMax<axes = [-1]>(z)  d = Sub(z, m)  e = Exp(d)
        t = ReduceSum<keepdims = 1>(e, axes)  y = Div(e, t)""",
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_an_exporters_own_softmax_is_named(name, tmp_path):
    text = f"g (float[n, 4] x) => (float[n, 3] y) {{ z = MatMul(x, w)  {SOFTMAXES[name]} }}"
    found, printed = told(build(text, {**normal(w=(4, 3)), "axes": np.array([-1])}), tmp_path)
    (output,) = found.outputs
    assert output.hint == "Softmax makes it; cross-entropy takes what it is made of: --loss-input 'z'"
    assert "cross-entropy" not in output.losses
    assert "--loss-input 'z'" in printed
    (note,) = generate_artifacts(tmp_path / "model.onnx", loss=CE, artifact_directory=tmp_path).notes
    assert note.startswith("'y' are probabilities")
    assert note.endswith("give the loss 'z', of which they are made")
    made = generate_artifacts(tmp_path / "model.onnx", loss=CE, loss_input_names=["z"], artifact_directory=tmp_path)
    assert not made.notes


def test_other_quotients_are_no_softmax(tmp_path):
    text = """g (float[n, 4] x) => (float[n, 3] y) {
        z = MatMul(x, w)  e = Exp(z)  r = Relu(z)  t = ReduceSum<keepdims = 1>(r, axes)  y = Div(e, t)
    }"""
    found, _ = told(build(text, {**normal(w=(4, 3)), "axes": np.array([-1])}), tmp_path)
    assert (found.outputs[0].hint, found.outputs[0].losses[0]) == (None, "cross-entropy")


# --- parameters that are inputs ---


def adapted():
    text = """g (float[n, 4] x, float[4, 2] lora_a, float[2, 3] lora_b) => (float[n, 3] y) {
        h = MatMul(x, w)  a = MatMul(x, lora_a)  d = MatMul(a, lora_b)  y = Add(h, d)
    }"""
    return build(text, normal(w=(4, 3)))


def test_an_adapter_that_is_an_input_is_told_of(tmp_path, caplog):
    found, text = told(adapted(), tmp_path)
    assert found.as_inputs == ["lora_a", "lora_b"]
    assert "lora_a, lora_b: nodes take them for weights; what is trained are initializers" in text
    with pytest.raises(ValueError, match="'lora_a', inputs of the model: parameters are initializers"):
        generate_artifacts(adapted(), ["lora_a"], None, CE, OptimType.SGD, tmp_path)
    made = generate_artifacts(adapted(), ["w", "lora_a"], None, CE, OptimType.SGD, tmp_path)
    assert "make them initializers of the model, with values, to train them" in made.notes[0]
    assert "'lora_a'" in caplog.text
    with pytest.raises(ValueError, match=r"its inputs lora_a, which are no parameters .* initializers of the model"):
        ArtifactSet.load(tmp_path)


X = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
LABELS = np.arange(40) % 3


def state_of_one_row():
    text = """g (float[batch, 4] x, float[1, 1, 5] state) => (float[batch, 3] scores) {
        h = Gemm(x, w0, b0)  row = Squeeze(state, axes)  t = Add(h, row)  a = Tanh(t)  m = MatMul(a, w1)
        scores = Add(m, b1)
    }"""
    arrays = {**normal(w0=(4, 5), b0=(5,), w1=(5, 3), b1=(3,)), "axes": np.array([0])}
    return build(text, arrays), {"state": normal(s=(1, 1, 5))["s"]}


def scalar_input():
    text = """g (float temperature, float[batch, 4] x) => (float[batch, 3] scores) {
        h = Gemm(x, w0, b0)  a = Tanh(h)  m = MatMul(a, w1)  scores = Mul(m, temperature)
    }"""
    return build(text, normal(w0=(4, 5), b0=(5,), w1=(5, 3))), {"temperature": np.array(0.5, np.float32)}


def perceptron_with(change):
    """A perceptron of which one thing is said otherwise."""
    model = perceptron()
    if change == "a size below 0":
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = -1
    elif change == "nodes out of order":
        model.graph.node.reverse()
    elif change == "another shape":
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("scores", 1, ["batch", 7]))
        model.graph.value_info.append(helper.make_tensor_value_info("h", 1, [1, 5]))
    else:
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("scores", 1, ["batch", 1, 3]))
    return model, {}


CASES = {"a state of one row": state_of_one_row, "a scalar": scalar_input}
CHANGES = ("a size below 0", "nodes out of order", "another shape", "another rank")


@pytest.mark.parametrize("case", [*CASES, *CHANGES])
def test_what_onnxruntime_takes_is_trained(case, tmp_path):
    model, others = CASES[case]() if case in CASES else perceptron_with(case)
    path, folder = tmp_path / "model.onnx", tmp_path / "set"
    path.write_bytes(model.SerializeToString())
    assert computed(model, {"x": X[:6], **others})[0].shape == (6, 3)
    trainer = Trainer(set_of(model, folder), 0.1)
    feeds = {"x": X[:6], **others, "labels": LABELS[:6]}
    losses = [trainer.step(feeds) for _ in range(4)]
    assert losses[-1] < losses[0]
    _, module, _ = load(folder)
    assert module(*(np.asarray(feeds[name]) for name in module.input_names())) == pytest.approx(losses[0], rel=1e-6)
    assert not inspect(path).training.problems


def test_inputs_of_all_examples_are_given_to_every_batch(tmp_path):
    model, others = state_of_one_row()
    artifacts = set_of(model, tmp_path)
    assert artifacts.axes == {"x": 0, "state": None, "labels": 0}
    assert artifacts.batch_rows is None
    np.savez(tmp_path / "data.npz", x=X, labels=LABELS, **others)
    data = load_file(tmp_path / "data.npz", artifacts.inputs)
    assert data.rows == 40
    first, second = data.split(10, 0)
    assert (first.rows, second.rows) == (30, 10)
    np.testing.assert_array_equal(second.arrays["state"], others["state"])
    batches = [Trainer(artifacts, 0.0).evaluate(Dataset(data.arrays), size).loss for size in (7, 40)]
    assert batches[0] == pytest.approx(batches[1], rel=1e-6)


ZIPPED = """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]>
    g (float[n, 4] x) => (int64[n] label, seq(map(int64, float)) maps) {
        scores = MatMul(x, w)  probabilities = Softmax(scores)  label = ArgMax <axis = 1, keepdims = 0> (scores)
        maps = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 2]> (probabilities) }"""
CUT = "ZipMap, which makes maps for the output 'maps', is cut off; 'probabilities' is the output that is trained"


def zipped():
    model = onnx.parser.parse_model(ZIPPED)
    model.graph.initializer.append(numpy_helper.from_array(normal(w=(4, 3))["w"], "w"))
    return model


def test_maps_are_cut_off(tmp_path):
    """As converters put them behind a classifier: a loss takes the tensor in front of them."""
    model = zipped()
    made = generate_artifacts(model, loss=LossType.MSELoss, optimizer=OptimType.SGD, artifact_directory=tmp_path)
    assert (made.trainable, made.notes) == (("w",), (CUT,))
    assert model == zipped()
    artifacts = ArtifactSet.load(tmp_path)
    assert artifacts.objective.outputs == ("probabilities",)
    onnx.save(model, tmp_path / "model.onnx")
    found = inspect(tmp_path / "model.onnx").training
    assert (found.cut, found.problems) == ({"maps": "probabilities"}, [])
    assert [each.name for each in found.outputs] == ["probabilities"]


@pytest.mark.parametrize("command", ["inspect", "artifacts", "train"])
def test_commands_say_that_maps_are_cut_off(command, tmp_path):
    onnx.save(zipped(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=X, labels=LABELS)
    options = {
        "inspect": [],
        "artifacts": ["--loss", "cross-entropy", "--loss-input", "scores", "--output", tmp_path / "set"],
        "train": ["--loss", "cross-entropy", "--loss-input", "scores", "--epochs", "1", "--data",
                  tmp_path / "data.npz", "--output", tmp_path / "out", "--export", tmp_path / "all.onnx"],
    }  # fmt: skip
    text = succeeds(command, tmp_path / "model.onnx", *options[command])
    assert CUT in " ".join(text.split())
    if command == "train":
        assert json.loads((tmp_path / "out" / "metrics.json").read_text())["exported_accuracy"] is not None
        graphs = [onnx.load(tmp_path / file).graph for file in ("out/model.onnx", "all.onnx")]
        assert [[each.name for each in graph.output] for graph in graphs] == [["scores"], ["label", "probabilities"]]
