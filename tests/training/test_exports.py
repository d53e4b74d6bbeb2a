"""What `opgrad train` says of scores before it trains, exports after it, and keeps when that fails."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import write_linear_set
from command import cli
from small_models import build, normal

from opgrad.training import Trainer, read_checkpoint


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


def test_an_error_after_the_training_names_the_checkpoint(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    write_linear_set(tmp_path)
    data = rows(tmp_path / "data.npz", x=(2,), y=(1,))
    monkeypatch.setattr(Trainer, "export", full)
    status, told = cli("train", tmp_path, "--data", data, "--epochs", 2, "--output", tmp_path / "out")
    assert (status, told.count("opgrad: ")) == (1, 1), told
    assert f"its parameters are in {tmp_path / 'out' / 'last.checkpoint'}, but: No space left" in told
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


# --- operators of onnxruntime ---

OF_ONNXRUNTIME = {
    "SimplifiedLayerNormalization": "n = SimplifiedLayerNormalization<axis = -1, epsilon = 0.00001>(h, scale)",
    "SkipLayerNormalization": "n = com.microsoft.SkipLayerNormalization(h, h, scale, shift)",
    "QuickGelu": "n = com.microsoft.QuickGelu<alpha = 1.702>(h)",
    "FusedMatMul": "n = com.microsoft.FusedMatMul<alpha = 0.5>(h, square)",
}


@pytest.mark.parametrize("operator", OF_ONNXRUNTIME)
def test_operators_that_onnx_does_not_know_are_exported(operator, tmp_path):
    """As the models of onnxruntime's own tools have them."""
    text = f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[batch, 6, 4] x) => (float[batch, 6, 3] y) {{
            h = MatMul(x, v)  {OF_ONNXRUNTIME[operator]}  y = MatMul(n, w)
        }}"""
    model = onnx.parser.parse_model(text)
    arrays = {**normal(v=(4, 8), square=(8, 8), w=(8, 3)), "scale": np.ones(8, np.float32), "shift": np.zeros(8)}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()
    )
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    data = rows(tmp_path / "data.npz", x=(6, 4), target=(6, 3))
    options = ("--loss", "mse", "--epochs", 2, "--output", tmp_path / "out", "--export", tmp_path / "exported.onnx")
    status, told = cli("train", tmp_path / "model.onnx", "--data", data, *options)
    assert status == 0, told
    for path in (tmp_path / "out" / "model.onnx", tmp_path / "exported.onnx"):
        assert operator in {node.op_type for node in onnx.load(path).graph.node}
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        assert session.run(None, {"x": np.ones((2, 6, 4), np.float32)})[0].shape == (2, 6, 3)


def test_a_model_that_only_opgrad_runs_is_refused_before_the_training(tmp_path):
    write_linear_set(tmp_path)
    model = onnx.load(tmp_path / "eval_model.onnx")
    model.graph.node[0].input[0] = "positive"
    nodes = [onnx.helper.make_node("ReluGrad", ["x", "x"], ["positive"], domain="com.microsoft"), *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, tmp_path / "eval_model.onnx")
    data = rows(tmp_path / "data.npz", x=(2,), y=(1,))
    status, told = cli("train", tmp_path, "--data", data, "--output", tmp_path / "out")
    assert (status, (tmp_path / "out").exists()) == (1, False), told
    assert "the model that would be exported of" in told
    assert "ReluGrad" in told
