"""What `opgrad train` says of scores before it trains, exports after it, and keeps when that fails."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import write_linear_set
from small_models import build, normal
from typer.testing import CliRunner

from opgrad.cli import app
from opgrad.training import Trainer, read_checkpoint


def cli(*given):
    """Exit status and everything printed."""
    result = CliRunner().invoke(app, [str(word) for word in given], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def rows(path, **shapes):
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((40, *shape)).astype(np.float32) for name, shape in shapes.items()}
    np.savez(path, **arrays)
    return path


def trained(text, folder, **shapes):
    """What the command says of a model with its own loss, and the folder of the run."""
    onnx.save(build(text, normal(v=(4, 3), w=(3, 4))), folder / "model.onnx")
    data = rows(folder / "data.npz", **shapes)
    options = ("--epochs", 2, "--output", folder / "out", "--export", folder / "exported.onnx")
    status, told = cli("train", folder / "model.onnx", "--data", data, *options)
    assert status == 0, told
    return told, folder / "out"


def outputs(path):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [each.name for each in session.get_inputs()], [each.name for each in session.get_outputs()]


def test_a_model_without_scores_reports_the_loss_alone(tmp_path):
    text = """g (float[batch, 4] a, float[batch, 4] b, float[batch, 1] t) => (float loss) {
        e = MatMul(a, v)  f = MatMul(b, v)  et = Mul(e, t)  ft = Mul(f, t)  d = Sub(et, ft)  q = Mul(d, d)
        loss = ReduceMean<keepdims = 0>(q)
    }"""
    told, out = trained(text, tmp_path, a=(4,), b=(4,), t=(1,))
    assert "no scores found that loss compares with a label: only the loss is reported" in told
    assert json.loads((out / "metrics.json").read_text())["test_accuracy"] is None
    for path in (out / "model.onnx", tmp_path / "exported.onnx"):
        assert outputs(path) == (["a", "b", "t"], ["loss"])


def test_a_model_without_a_label(tmp_path):
    """An autoencoder with its loss inside has one input; its other outputs are exported."""
    text = """g (float[batch, 4] x) => (float loss, float[batch, 4] decoded, float[batch, 3] code) {
        m = MatMul(x, v)  code = Tanh(m)  decoded = MatMul(code, w)  d = Sub(decoded, x)  q = Mul(d, d)
        loss = ReduceMean<keepdims = 0>(q)
    }"""
    told, out = trained(text, tmp_path, x=(4,))
    assert "no scores found" in told
    for path in (out / "model.onnx", tmp_path / "exported.onnx"):
        assert outputs(path) == (["x"], ["decoded", "code"])


def test_an_error_after_the_training_names_the_checkpoint(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    write_linear_set(tmp_path)
    data = rows(tmp_path / "data.npz", x=(2,), y=(1,))
    monkeypatch.setattr(Trainer, "export", full)
    status, told = cli("train", tmp_path, "--data", data, "--epochs", 2, "--output", tmp_path / "out")
    assert (status, told.count("opgrad: ")) == (1, 1), told
    assert f"its parameters are in {tmp_path / 'out' / 'last.checkpoint'}, but: [Errno 28] No space left" in told
    assert read_checkpoint(tmp_path / "out" / "last.checkpoint").trainable["w"].any()


@pytest.mark.parametrize("damage", ["score", "loss"])
def test_what_cannot_be_exported_is_told_before_the_training(tmp_path, damage):
    """An eval graph that lacks what the loss compares."""
    write_linear_set(tmp_path)
    model = onnx.load(tmp_path / "eval_model.onnx")
    if damage == "score":
        model.graph.node[2].input[0] = "nowhere"
    else:
        del model.graph.node[-1]
    onnx.save(model, tmp_path / "eval_model.onnx")
    data = rows(tmp_path / "data.npz", x=(2,), y=(1,))
    status, told = cli("train", tmp_path, "--data", data, "--output", tmp_path / "out")
    assert (status, (tmp_path / "out").exists()) == (1, False), told
    assert "eval_model.onnx" in told
