"""Examples that lie behind each other in one row: losses and gradients are those of rows with padding."""

import contextlib

import numpy as np
import onnx
import pytest
from language_models import add_behind_table, make_folder, write_lines
from onnx import helper, numpy_helper

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


def scaled(folder):
    """Let other cosines serve where the mask is longer than 16, as the longest example is not."""
    model = onnx.load(folder / "model.onnx")
    branch = "{name} () => (float[512, 16] {name}c) {{ {name}c = Mul({name}f, cosines) }}"
    parts = [branch.format(name=name) for name in ("then", "else")]
    graph = onnx.parser.parse_graph(f"""g (int64 total) => (float[512, 16] c) {{
        long = Greater(n, most)  c = If (long) <then_branch = {parts[0]}, else_branch = {parts[1]}> }}""")
    place = next(place for place, node in enumerate(model.graph.node) if node.op_type == "GroupQueryAttention")
    graph.node[0].input[0] = next(node.output[0] for node in model.graph.node if node.name == "/model/mask/Gather")
    model.graph.node[place].input[7] = "c"
    for node in reversed(graph.node):
        model.graph.node.insert(place, node)
    constants = {"most": np.array(16), "thenf": np.float32(0.5), "elsef": np.float32(1)}
    model.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in constants.items())
    onnx.save(model, folder / "model.onnx")


@pytest.mark.parametrize("form", ["Attention", "MultiHeadAttention", "GroupQueryAttention", "GroupQuery, scaled"])
def test_losses_and_gradients(tmp_path, data, form):
    folder = make_folder(tmp_path, layers=1, cached=form[0] == "G", width=64, shared=2 if form[0] == "M" else 1)
    if form[0] == "M":
        multi_head(folder)
    if "scaled" in form:
        scaled(folder)
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


def test_models_whose_tokens_act_on_each_other_otherwise(tmp_path, data):
    folder = make_folder(tmp_path)
    model = onnx.load(folder / "model.onnx")
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    next(each for each in node.attribute if each.name == "is_causal").i = 0
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(NotImplementedError, match="examples cannot be packed: Attention is not causal, or has a mask"):
        Tuner(folder, pack=True).fit(data, tmp_path / "out")
    with pytest.raises(NotImplementedError, match="tokens see those behind them, as in encoders"):
        Tuner(folder).fit(data, tmp_path / "out")


OTHERS = "be packed: tokens know their places in a row, or see other"
PLACES = {  # what is computed behind the table, and why examples cannot be packed
    """s = Shape(input_ids)  n = Gather(s, one)  r = Range(zero, n, one)  c = Cast<to = 1>(r)
       u = Unsqueeze(c, ends)  e = Sin(u)""": OTHERS,
    """t = Transpose<perm = [0, 2, 1]>(x)  c = Conv<group = 32, pads = [2, 0]>(t, w)
       e = Transpose<perm = [0, 2, 1]>(c)""": OTHERS,
    "e = CumSum(x, one)": "CumSum .* lets the tokens of a row act on each other",
    "e = Softmax<axis = -1>(x)": "",
}


@pytest.mark.parametrize("nodes", PLACES)
def test_tokens_that_know_their_place_in_a_row_or_see_others(tmp_path, data, nodes):
    model = onnx.load(make_folder(tmp_path) / "model.onnx")
    add_behind_table(model, f"{nodes}  y = Add(x, e)")
    onnx.save(model, tmp_path / "model.onnx")
    Tuner(tmp_path).fit(data, tmp_path / "apart", batch_size=5)
    with pytest.raises(NotImplementedError, match=why) if (why := PLACES[nodes]) else contextlib.nullcontext():
        Tuner(tmp_path, pack=True).fit(data, tmp_path / "out")
