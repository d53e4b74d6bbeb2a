"""What is said of models that cannot be trained as they are: what stands in the way, and what can be done."""

import logging

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_models import build, normal
from typer.testing import CliRunner

from opgrad.cli.app import app
from opgrad.cli.inspection import inspect
from opgrad.training import ArtifactSet, Trainer
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

CE = LossType.CrossEntropyLoss


def told(model, folder):
    """What inspect finds out, and what the command prints."""
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    done = CliRunner().invoke(app, ["inspect", str(folder / "model.onnx")], env={"COLUMNS": "400"})
    return inspect(folder / "model.onnx").training, done.output


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


def branching(condition):
    model = build(
        f"""g (float[batch, words, 4] x, float[batch, 4] z) => (float[batch, 3] scores) {{
            {condition}
            t = MatMul(x, w)
            p = If (c) <then_branch = a () => (float[batch, 3] u) {{ u = my.Mean(t) }},
                        else_branch = b () => (float[batch, 3] v) {{ v = ReduceMax<axes = [1], keepdims = 0>(t) }}>
            scores = Relu(p)
        }}""",
        {**normal(w=(4, 3)), "one": np.array(1), "first": np.array(0), "limit": np.array(0.5, np.float32)},
    )
    model.opset_import.append(onnx.helper.make_opsetid("my", 1))
    return model


def test_a_branch_says_which_size_decides(tmp_path):
    model = branching("s = Shape(x)  n = Gather(s, one)  c = Equal(n, one)")
    found, text = told(model, tmp_path)
    wanted = "depends on the size of the input's axis 1 (words) of 'x': fix it, python -m onnxruntime.tools."
    assert wanted in found.problems[0]
    assert wanted in " ".join(text.split())
    with pytest.raises(NotImplementedError, match=r"axis 1 \(words\) of 'x'"):
        generate_artifacts(model, loss=CE, artifact_directory=tmp_path)


# --- quantized models ---


def test_a_quantized_model_says_what_can_be_done(tmp_path):
    text = """g (float[n, 4] x) => (float[n, 3] y) {
        w = DequantizeLinear(q, scale, zero)  y = MatMul(x, w)
    }"""
    model = build(text)
    arrays = {"q": np.ones((4, 3), np.int8), "scale": np.array(0.1, np.float32), "zero": np.array(0, np.int8)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
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
