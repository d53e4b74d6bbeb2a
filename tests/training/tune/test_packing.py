"""Examples that lie behind each other in one row: losses and gradients are those of rows with padding."""

import numpy as np
import onnx
import pytest
from language_models import make_folder, write_lines
from onnx import helper

pytest.importorskip("tokenizers")

from opgrad.training.engine.trainer import Trainer
from opgrad.tune import Tuner

TEXTS = ["the cat sees a red tree .", "hello", "what is small ?", "i am a bird . you are the dog .", "who are you"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("data") / "data.jsonl", [{"text": text} for text in TEXTS])


def multi_head(folder):
    """Let MultiHeadAttention stand in the place of Attention, whose heads of keys are as many as those of queries."""
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        if node.op_type == "Attention":
            other = helper.make_node("MultiHeadAttention", node.input, node.output, node.name, domain="com.microsoft",
                                     num_heads=2, unidirectional=1)  # fmt: skip
            node.CopyFrom(other)
    onnx.save(model, folder / "model.onnx")


@pytest.mark.parametrize("form", ["Attention", "MultiHeadAttention", "GroupQueryAttention"])
def test_losses_and_gradients(tmp_path, data, form):
    folder = make_folder(tmp_path, layers=1, cached=form[0] == "G", width=64, shared=2 if form[0] == "M" else 1)
    if form[0] == "M":
        multi_head(folder)
    losses, gradients, shapes = [], [], []
    for pack in (False, True):
        tuner = Tuner(folder, lora="rank=4, target=all-linear", pack=pack, seed=1)
        generator = np.random.default_rng(0)
        for name, array in tuner.values.items():
            tuner.values[name] = generator.normal(size=array.shape).astype(np.float32) / 10
        rows = tuner.adapted.task.rows(tuner.adapted, tuner.adapted.examples(data), 5)
        batch = rows.take(rows.order(generator)).arrays
        trainer = Trainer(tuner.adapted.setting(*batch["input_ids"].shape).artifacts, 0.1)
        losses.append(trainer.compute_gradients(batch))
        gradients.append({name: np.array(each) for name, each in trainer.gradients.items()})
        shapes.append((batch["input_ids"].shape, rows.shape()[1]))
    assert shapes == [((5, 16), 16), ((1, 32), 32)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    most = max(np.abs(each).max() for each in gradients[0].values())
    for name, array in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], array, rtol=1e-4, atol=1e-5 * most)


def test_whole_run(tmp_path, data):
    run = Tuner(make_folder(tmp_path / "model", layers=1), pack=True).fit(
        data, tmp_path / "out", epochs=3, batch_size=2, learning_rate=0.05, validation=2, accumulate=2
    )
    losses = [each.train_loss for each in run.state.history]
    assert losses[2] < losses[0]
    assert run.perplexities()[0] is not None


def test_models_whose_tokens_act_on_each_other_otherwise(tmp_path, data):
    folder = make_folder(tmp_path)
    model = onnx.load(folder / "model.onnx")
    node = next(node for node in model.graph.node if node.op_type == "Sigmoid")
    node.op_type = "Softmax"
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(NotImplementedError, match=r"Softmax .node .*mlp/sigmoid.* lets the tokens of a row"):
        Tuner(folder, pack=True).fit(data, tmp_path / "out")
    model = onnx.load(make_folder(tmp_path) / "model.onnx")
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    next(each for each in node.attribute if each.name == "is_causal").i = 0
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(NotImplementedError, match="examples cannot be packed: Attention is not causal, or has a mask"):
        Tuner(folder, pack=True).fit(data, tmp_path / "out")
