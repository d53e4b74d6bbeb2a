"""Models of float16 and bfloat16: a step computes in float32, with float32 parameters; exports have the old types."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from command import succeeds
from halved_models import KINDS, halved
from onnx import TensorProto, numpy_helper
from small_models import build, images, normal, set_of
from training_sets import load

from opgrad.training import Dataset, Trainer, read_checkpoint, write_checkpoint
from opgrad.training.api import CheckpointState
from opgrad.training.artifacts import OptimType
from opgrad.training.engine.trainer import FACTOR, LossScale

RANDOM = np.random.default_rng(5)
X, LABELS = RANDOM.standard_normal((8, 4)).astype(np.float32), RANDOM.integers(0, 3, 8)
STEPS = 6
TEXT = """g (float[n, 4] x) => (float[n, 3] y) {
    a = Gemm(x, w, b)  h = Gelu<approximate = "tanh">(a)  l = LayerNormalization(h, scale)  y = MatMul(l, v)
}"""


def small():
    weights = {**normal(w=(4, 6), b=(6,), v=(6, 3)), "scale": np.linspace(0.7, 1.3, 6).astype(np.float32)}
    return build(TEXT, weights, 20)


def made(model, folder, **more):
    return set_of(model, folder, **{"optimizer": OptimType.AdamW, **more})


def batch(artifacts, x=X, labels=LABELS):
    return {artifacts.inputs[0].name: x.astype(artifacts.inputs[0].dtype), artifacts.inputs[1].name: labels}


def losses(trainer, given, steps=STEPS):
    return [trainer.step(given) for _ in range(steps)]


@pytest.mark.parametrize("precision", ["float32", "model"])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_the_float32_model_with_the_same_weights(kind, precision, tmp_path):
    """Constants of a training model in halves, such as the 0.044715 of Gelu, are rounded when it is made."""
    x = X.astype(KINDS[kind]).astype(np.float32)
    artifacts = made(halved(small(), kind), tmp_path / "half", precision=precision)
    trainer = Trainer(artifacts, learning_rate=0.01)
    assert {each.dtype for each in (*trainer.parameters.values(), *trainer.gradients.values())} == {np.dtype("float32")}
    wide = Trainer(made(halved(small(), kind, back=True), tmp_path / "float"), learning_rate=0.01)
    rtol = 1e-5 if precision == "float32" else float(ml_dtypes.finfo(KINDS[kind]).eps)
    np.testing.assert_allclose(losses(trainer, batch(artifacts)), losses(wide, batch(wide.artifacts, x)), rtol=rtol)
    near = Trainer(made(small(), tmp_path / "near"), learning_rate=0.01)
    eps = float(ml_dtypes.finfo(KINDS[kind]).eps)  # weights and data are rounded, and summed over 4 + 6 + 6 numbers
    found = trainer.evaluate(Dataset(batch(artifacts), artifacts.axes)).loss
    losses(near, batch(near.artifacts))
    expected = near.evaluate(Dataset(batch(near.artifacts), near.artifacts.axes)).loss
    assert abs(found - expected) < 16 * eps * expected


@pytest.mark.parametrize("kind", KINDS)
def test_exports_have_the_types_of_the_model_and_rounded_masters(kind, tmp_path):
    artifacts = made(halved(small(), kind), tmp_path / "set", frozen_params=["scale"])
    trainer, given = Trainer(artifacts, learning_rate=0.01), batch(artifacts)
    assert trainer.parameters["scale"].dtype == KINDS[kind]
    losses(trainer, given)
    trainer.check_export()
    trainer.export(tmp_path / "out.onnx")
    model = onnx.load(tmp_path / "out.onnx")
    assert {each.data_type for each in model.graph.initializer} == {kind}
    assert {each.type.tensor_type.elem_type for each in (*model.graph.input, *model.graph.output)} == {kind}
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).view(KINDS[kind]) if kind == 16 else numpy_helper.to_array(tensor)
        np.testing.assert_array_equal(array, trainer.parameters[tensor.name].astype(KINDS[kind]))
    data = Dataset(given, artifacts.axes)
    assert trainer.evaluator.exported_accuracy(tmp_path / "out.onnx", data) == trainer.evaluate(data).accuracy
    if kind == TensorProto.FLOAT16:
        session = onnxruntime.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
        assert session.run(None, {"x": given["x"]})[0].dtype == np.float16
        trainer.parameters["w"][0, 0] = 1e5
        with pytest.raises(ValueError, match="the parameter 'w' has 100000, which float16 cannot hold"):
            trainer.export(tmp_path / "out.onnx")


@pytest.mark.parametrize("precision", ["float32", "model"])
@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_are_kept_in_float32(kind, precision, tmp_path):
    """Beside a float32 model with the same weights; the statistics of halves would stop at a few thousandths."""
    x = RANDOM.standard_normal((4, 2, 6, 6)).astype(KINDS[kind]).astype(np.float32)
    artifacts = made(halved(images(training=True), kind), tmp_path / "half", precision=precision)
    wide = made(halved(images(training=True), kind, back=True), tmp_path / "float")
    trainers = [Trainer(each, learning_rate=0.01) for each in (artifacts, wide)]
    found = [losses(each, batch(each.artifacts, x, LABELS[:4])) for each in trainers]
    rtol = 1e-4 if precision == "float32" else 4 * float(ml_dtypes.finfo(KINDS[kind]).eps)
    np.testing.assert_allclose(*found, rtol=rtol)
    for name in ("mean", "var"):
        assert trainers[0].parameters[name].dtype == np.float32
        np.testing.assert_allclose(trainers[0].parameters[name], trainers[1].parameters[name], rtol=rtol, atol=rtol)
    data = [Dataset(batch(each, x, LABELS[:4]), each.axes) for each in (artifacts, wide)]
    evaluated = [each.evaluate(*given).loss for each, given in zip(trainers, zip(data), strict=True)]
    np.testing.assert_allclose(*evaluated, rtol=rtol)


@pytest.mark.parametrize("precision", ["float32", "model"])
@pytest.mark.parametrize("kind", KINDS)
def test_module_and_optimizer(kind, precision, tmp_path):
    artifacts = made(halved(small(), kind), tmp_path, precision=precision)
    given, trainer = batch(artifacts), Trainer(artifacts, learning_rate=0.01)
    state, module, optimizer = load(tmp_path)
    optimizer.set_learning_rate(0.01)
    for expected in losses(trainer, given, 3):
        module.lazy_reset_grad()
        assert float(module(*given.values())) == pytest.approx(expected, rel=1e-6)
        optimizer.step()
    assert state.parameters["w"].data.dtype == np.float32
    CheckpointState.save_checkpoint(state, tmp_path / "last", True)
    again, other, other_optimizer = load(tmp_path, tmp_path / "last")
    for each, step in ((module, optimizer), (other, other_optimizer)):
        each.lazy_reset_grad()
        each(*given.values())
        step.step()
    for name, parameter in again.parameters:
        np.testing.assert_array_equal(parameter.data, state.parameters[name].data)
    assert float(module.eval()(*given.values())) == float(other.eval()(*given.values()))
    module.export_model_for_inferencing(tmp_path / "out.onnx", ["y"])
    assert {each.data_type for each in onnx.load(tmp_path / "out.onnx").graph.initializer} == {kind}


# --- float16 as it is, with a scaled loss ---


def scaled(tmp_path, loss_scale, **more):
    artifacts = made(halved(small(), TensorProto.FLOAT16), tmp_path, precision="model")
    return Trainer(artifacts, learning_rate=0.01, loss_scale=loss_scale, **more), batch(artifacts)


@pytest.mark.parametrize("loss_scale", [8.0, "dynamic"])
def test_gradients_are_those_of_the_loss_itself(loss_scale, tmp_path):
    trainer, given = scaled(tmp_path, loss_scale)
    wide = Trainer(trainer.artifacts, learning_rate=0.01)
    for each in (trainer, wide):
        each.compute_gradients(given)
    eps = float(np.finfo(np.float16).eps)
    for name, gradient in trainer.gradients.items():
        np.testing.assert_allclose(gradient, wide.gradients[name], atol=16 * eps * np.abs(wide.gradients[name]).max())
    np.testing.assert_allclose(losses(trainer, given), losses(wide, given), rtol=16 * eps)
    assert trainer.loss_scale.skipped == 0


def test_steps_whose_gradients_overflow_are_skipped(tmp_path, monkeypatch):
    trainer, given = scaled(tmp_path, 2.0**20)
    before = trainer.parameters["w"].copy()
    assert len(set(losses(trainer, given, 2))) == 1
    assert (trainer.loss_scale.skipped, trainer.loss_scale.factor) == (2, 2.0**20)
    np.testing.assert_array_equal(trainer.parameters["w"], before)
    assert trainer.optimizer.steps == 0
    # So many in a row are no matter of the factor.
    monkeypatch.setattr("opgrad.training.engine.trainer.MOST_SKIPPED", 2)
    trainer.step(given)
    assert not np.isfinite(trainer.parameters["w"]).all()


def test_a_dynamic_factor_is_halved_and_doubled(monkeypatch):
    monkeypatch.setattr("opgrad.training.engine.trainer.PATIENCE", 2)
    scale, factors = LossScale("dynamic"), []
    for finite in (False, False, True, True, False, True, True, True, True, True, True):
        assert scale.takes(finite) == finite
        factors.append(np.log2(scale.factor))
    assert factors == [14, 13, 13, 14, 13, 13, 14, 14, 15, 15, 15]
    assert scale.skipped == 3


def test_checkpoints_keep_the_factor(tmp_path):
    trainer, given = scaled(tmp_path, "dynamic")
    trainer.loss_scale.restore([2.0**18, 5, 0, 0])
    losses(trainer, given, 4)
    assert trainer.loss_scale.skipped > 5
    write_checkpoint(trainer.checkpoint({"mine": 3}), tmp_path / "last")
    saved = read_checkpoint(tmp_path / "last")
    assert saved.properties["mine"] == 3
    text = trainer.loss_scale.to_text()
    after = losses(trainer, given, 2)
    assert trainer.loss_scale.to_text() != text
    trainer.restore(saved)
    saved.properties[FACTOR] = "[1.0, 2]"
    with pytest.raises(ValueError, match=r"the checkpoint's opgrad.loss_scale is '\[1.0, 2\]', expected the state of"):
        trainer.restore(saved)
    assert (trainer.loss_scale.to_text(), losses(trainer, given, 2)) == (text, after)


@pytest.mark.parametrize("given", [0, -1.0, 2.0**30, "static", True, float("nan")])
def test_other_factors_are_refused(given):
    with pytest.raises(ValueError, match=r"loss_scale is .*, expected 'dynamic' or a number from"):
        LossScale(given)


def test_graphs_without_float16_are_refused(tmp_path):
    for place, model in enumerate((small(), halved(small(), TensorProto.BFLOAT16))):
        artifacts = made(model, tmp_path / str(place), precision="model")
        with pytest.raises(ValueError, match="loss_scale is for graphs that compute in float16"):
            Trainer(artifacts, loss_scale="dynamic")
    with pytest.raises(ValueError, match="precision is 'half', expected 'float32' or 'model'"):
        made(small(), tmp_path / "other", precision="half")


# --- commands ---


@pytest.mark.parametrize(
    ("kind", "options"), [(TensorProto.BFLOAT16, []), (TensorProto.FLOAT16, ["--loss-scale", "dynamic"])]
)
def test_a_run_that_goes_on_is_exact(kind, options, tmp_path):
    onnx.save(halved(small(), kind), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=np.tile(X, (3, 1)), labels=np.tile(LABELS, 3))

    def run(output, epochs, *more):
        words = ["train", tmp_path / "model.onnx", "--data", tmp_path / "data.npz", "--loss", "cross-entropy"]
        words += ["--batch-size", 4, "--epochs", epochs, "--output", tmp_path / output, *more]
        return succeeds(*words)

    text = run("whole", 2, *options, "--export", tmp_path / "export.onnx")
    assert ("none skipped" in text) == bool(options)
    run("part", 1, *options)
    run("part", 2, "--resume", tmp_path / "part/last.checkpoint")
    whole, part = (read_checkpoint(tmp_path / name / "last.checkpoint").trainable for name in ("whole", "part"))
    for name, array in whole.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(part[name], array)
    files = [tmp_path / name / "model.onnx" for name in ("whole", "part")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert {each.data_type for each in onnx.load(tmp_path / "export.onnx").graph.initializer} == {kind}
