"""Language models of float16 and bfloat16: weights stay as they are, training computes in float32."""

import halved_models
import numpy as np
import onnx
import onnxruntime
import pytest
from halved_models import KINDS
from language_models import WORDS, make_folder
from onnx import TensorProto

from opgrad.training.engine.trainer import Trainer
from opgrad.training.engine.training_graph import session_options
from opgrad.training.files.tensor_values import array_of
from opgrad.tune import Tuner
from opgrad.tune.adapted_model import Writer
from opgrad.tune.language_model import read
from opgrad.tune.trained_set import scoring

SIZE = 5 + len(WORDS)


def halved(folder, kind, back=False):
    """The model of a folder with its floats in halves; back: as float32 again, rounded."""
    return halved_models.halved(onnx.load(folder / "model.onnx"), kind, back)


def scores(model, tokens):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"input_ids": tokens})[0]


@pytest.mark.parametrize("kind", KINDS)
def test_computes_in_float32_with_the_stored_weights(tmp_path, kind):
    folder = make_folder(tmp_path)
    rounded = halved(folder, kind, back=True)
    onnx.save(halved(folder, kind), folder / "model.onnx")
    base = read(folder / "model.onnx")
    tokens = np.random.default_rng(0).integers(0, SIZE, (2, 6))
    np.testing.assert_allclose(scores(base.model, tokens), scores(rounded, tokens), rtol=1e-4, atol=1e-5)
    stored = {each.name: each.data_type for each in base.model.graph.initializer}
    assert stored[base.head.weight] == kind
    assert len([each for each in base.products if each.layer == 1]) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_trained_in_float32(tmp_path, kind):
    """Losses are those of the float32 model with the same rounded weights."""
    losses = []
    for back in (True, False):
        folder = make_folder(tmp_path / str(back))
        onnx.save(halved(folder, kind, back), folder / "model.onnx")
        setting = Tuner(folder, seed=3).adapted.setting(2, 6)
        assert {each.dtype for each in setting.artifacts.trainable.values()} == {np.dtype("float32")}
        assert "LinearCrossEntropyLoss" in {node.op_type for node in setting.artifacts.eval_model.graph.node}
        trainer, tokens = Trainer(setting.artifacts, learning_rate=0.01), np.arange(12).reshape(2, 6)
        losses.append([trainer.step(dict.fromkeys(("input_ids", "labels"), tokens)) for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[0][2] < losses[0][0]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_trained_in_float32(tmp_path, kind):
    """Losses and scores are those of float32 with the same rounded weights; what is saved is rounded again."""
    losses, scores_of_one, tokens = [], [], np.arange(12).reshape(2, 6)
    for back in (True, False):
        folder = make_folder(tmp_path / str(back))
        onnx.save(halved(folder, kind, back), folder / "model.onnx")
        tuner = Tuner(folder, train="*")
        setting = tuner.adapted.setting(2, 6)
        trainer, batch = Trainer(setting.artifacts, learning_rate=0.01), dict.fromkeys(("input_ids", "labels"), tokens)
        losses.append([trainer.step(batch) for _ in range(3)])
        tuner.adapted.use(trainer.parameters)
        model, constants = scoring(tuner.adapted.base, tuner.adapters, tuner.values)
        fixed = {**constants, **tuner.values}
        writer = Writer(model, tuner.adapted.base.tokens, tuner.adapted.base.logits, fixed, session_options(1))
        scores_of_one.append(writer.scores(tokens[0]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(scores_of_one[1], scores_of_one[0], rtol=1e-3, atol=1e-4)
    tuner.save(tmp_path / "tuned")
    saved = {each.name: each for each in onnx.load(tmp_path / "tuned/model.onnx").graph.initializer}
    for name, array in trainer.parameters.items():
        assert saved[name].data_type == kind
        np.testing.assert_array_equal(array_of(saved[name]), array.astype(KINDS[kind]))


def test_what_was_trained_of_a_float16_model_loads_in_onnxruntime(tmp_path):
    folder = make_folder(tmp_path / "base")
    onnx.save(halved(folder, TensorProto.FLOAT16), folder / "model.onnx")
    tuner = Tuner(folder)
    tuner.adapted.values = {name: np.full_like(each, 0.01) for name, each in tuner.values.items()}
    tuner.save(tmp_path / "tuned")
    tokens = np.random.default_rng(0).integers(0, SIZE, (1, 6))
    session = onnxruntime.InferenceSession(tmp_path / "tuned/model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(["logits"], {"input_ids": tokens})[0]
    assert found.dtype == np.float16
    assert np.isfinite(found.astype(np.float32)).all()
