"""Adapters beside products of every kind, and dropout: how they begin, what they learn, and what is written."""

import numpy as np
import onnx
import onnxruntime
import pytest
from language_models import make_folder
from onnx import helper, numpy_helper
from runtime_cases_packed import packed

from opgrad.graph.messages import keep
from opgrad.training import Tuner
from opgrad.training.engine.optimizer import AdamWRule
from opgrad.training.engine.trainer import Trainer
from opgrad.training.language import ends_of_layers, read
from opgrad.training.tune.setting import prepare

TOKENS = np.random.default_rng(0).integers(0, 25, (2, 6))
BATCH = {"input_ids": TOKENS, "labels": np.roll(TOKENS, -1, 1)}


class Rewriter:
    """Writes products of a model's file as other operators; the new nodes have the names of the old ones."""

    def __init__(self, path):
        self.path, self.model, self.nodes = path, onnx.load(path), []
        self.weights = {each.name: numpy_helper.to_array(each) for each in self.model.graph.initializer}

    def constant(self, name, value):
        self.weights[name] = np.asarray(value)
        return name

    def node(self, op, inputs, output, name=None, **given):
        self.nodes.append(helper.make_node(op, inputs, [output], name or f"{output}/{op}", **given))
        return output

    def write(self, op, write, *arguments):
        """Let `write` write each node of an operator that has a weight, and save the model."""
        for node in self.model.graph.node:
            if node.op_type == op and self.weights.keys() & set(node.input):
                write(self, node, *arguments)
            else:
                self.nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
        keep(self.model.graph.node, self.nodes)
        keep(self.model.graph.initializer, [numpy_helper.from_array(*each[::-1]) for each in self.weights.items()])
        onnx.save(self.model, self.path)


def as_gemm(to, node, transposed, alpha):
    """Gemm with a bias; the tokens of all rows are its rows."""
    (x, weight), y = node.input, node.output[0]
    inputs, columns = to.weights[weight].shape
    if transposed:
        to.weights[weight] = np.ascontiguousarray(to.weights[weight].T)
    bias = to.constant(f"{weight}.bias", np.linspace(-1, 1, columns, dtype=np.float32))
    flat = to.node("Reshape", [x, to.constant(f"{y}.flat_sizes", [-1, inputs])], f"{y}.flat_x")
    given = {"transB": int(transposed), "alpha": alpha}
    flat = to.node("Gemm", [flat, weight, bias], f"{y}.flat", node.name, **given)
    batch = to.node("Shape", [x], f"{y}.batch", end=2)
    sizes = to.node("Concat", [batch, to.constant(f"{y}.columns", [columns])], f"{y}.sizes", axis=0)
    to.node("Reshape", [flat, sizes], y)


def as_conv(to, node):
    """Conv of a single point, with a bias; the tokens of a row are its places."""
    (x, weight), y = node.input, node.output[0]
    to.weights[weight] = np.ascontiguousarray(to.weights[weight].T)[:, :, None, None]
    columns = len(to.weights[weight])
    bias = to.constant(f"{weight}.bias", np.linspace(-1, 1, columns, dtype=np.float32))
    places = to.node("Transpose", [x], f"{y}.places", perm=[0, 2, 1])
    axis = to.constant("axis", [3])
    image = to.node("Unsqueeze", [places, axis], f"{y}.image_x")
    image = to.node("Conv", [image, weight, bias], f"{y}.image", node.name, kernel_shape=[1, 1])
    to.node("Transpose", [to.node("Squeeze", [image, axis], f"{y}.turned")], y, perm=[0, 2, 1])


def as_quantized_table(to, node):
    """GatherBlockQuantized of 4 bits in blocks of 16."""
    table, tokens = node.input
    rows, width = to.weights.pop(table).shape
    random = np.random.default_rng(0)
    stored = packed(random.integers(0, 16, (rows, width // 16, 16)), 4).reshape(rows, -1)
    scales = random.uniform(0.05, 0.2, (rows, width // 16)).astype(np.float32)
    inputs = [to.constant(f"{table}_Q4", stored), tokens, to.constant(f"{table}_scales", scales)]
    given = {"bits": 4, "block_size": 16, "quantize_axis": 1, "gather_axis": 0, "domain": "com.microsoft"}
    to.node("GatherBlockQuantized", inputs, node.output[0], node.name, **given)


CASES = {
    "Gemm": ("MatMul", as_gemm, False, 1.0),
    "Gemm, transposed": ("MatMul", as_gemm, True, 1.0),
    "Gemm, alpha": ("MatMul", as_gemm, True, 0.5),
    "Conv": ("MatMul", as_conv),
    "GatherBlockQuantized": ("Gather", as_quantized_table),
}
TARGETS = {"GatherBlockQuantized": "embed_tokens|q"}


def scores(model, values=None):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"input_ids": TOKENS, **(values or {})})[0]


def loss_of(logits):
    """The mean cross-entropy of the batch in float64."""
    logits = logits.astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(logs, BATCH["labels"][..., None], -1).mean()


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """A folder with such a model, the target of adapters, and the operator beside which they are."""
    folder = make_folder(tmp_path / "model")
    op, write, *arguments = CASES[request.param]
    Rewriter(folder / "model.onnx").write(op, write, *arguments)
    return folder, TARGETS.get(request.param, "all-linear and lm_head"), request.param.partition(",")[0]


def test_all_kinds_of_products(tmp_path, case):
    """They begin as the base, learn, and compute the same deployed and merged as in training."""
    folder, target, operator = case
    tuner = Tuner(folder, lora=[f"rank=4, target={each}" for each in target.split(" and ")], seed=1)
    assert operator in {each.product.op for each in tuner.adapters}
    plain = scores(folder / "model.onnx")
    trainer = Trainer(tuner.setting(*TOKENS.shape).artifacts, learning_rate=0.01)
    losses = [trainer.step(BATCH) for _ in range(4)]
    assert losses[0] == pytest.approx(loss_of(plain), rel=1e-5)
    assert losses[3] < losses[0]
    learned = {name: np.array(each) for name, each in trainer.parameters.items()}
    tuner.use(learned)
    tuner.save(tmp_path / "tuned")
    tuner.merge(tmp_path / "merged")
    np.testing.assert_allclose(scores(tmp_path / "tuned/model.onnx"), plain, rtol=1e-5, atol=1e-5)
    merged = scores(tmp_path / "merged/model.onnx")
    assert loss_of(merged) == pytest.approx(trainer.step(BATCH), rel=1e-4)
    adapter, run = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(tmp_path / "tuned/adapter.onnx_adapter"))
    run.add_active_adapter(adapter)
    session = onnxruntime.InferenceSession(tmp_path / "tuned/model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["logits"], {"input_ids": TOKENS}, run)[0], merged, rtol=1e-4, atol=1e-4)
    again = Tuner(folder, adapter=tmp_path / "tuned")
    assert [each.name for each in again.adapters] == [each.name for each in tuner.adapters]
    for name, array in learned.items():
        np.testing.assert_array_equal(again.values[name], array)


def test_kernels_of_several_points_are_no_products(tmp_path):
    """Neither are operands that are transposed on the way: x times A would be another product."""
    folder = make_folder(tmp_path)
    Rewriter(folder / "model.onnx").write("MatMul", as_conv)
    model = onnx.load(folder / "model.onnx")
    first = next(node for node in model.graph.node if node.op_type == "Conv")
    weight = next(each for each in model.graph.initializer if each.name == first.input[1])
    weight.CopyFrom(numpy_helper.from_array(np.ones((32, 32, 3, 1), np.float32), weight.name))
    first.attribute[0].ints[:] = [3, 1]
    first.attribute.append(helper.make_attribute("pads", [1, 0, 1, 0]))
    onnx.save(model, folder / "model.onnx")
    assert first.name not in {each.node for each in read(folder / "model.onnx", "test").products}


def steps(folder, options, seed=3, count=3):
    """The losses of some steps, and the parameters behind them."""
    trainer = Trainer(Tuner(folder, lora=options, seed=seed).setting(*TOKENS.shape).artifacts, learning_rate=0.02)
    return [trainer.step(BATCH) for _ in range(count)], trainer.parameters


def test_dropout(tmp_path):
    """The same seed gives the same bits; the first loss is the base's, whatever is dropped, as B is 0."""
    folder = make_folder(tmp_path)
    options = "rank=4, target=all-linear, dropout=0.4"
    (first, values), (second, again) = steps(folder, options), steps(folder, options)
    assert first == second
    for name, array in values.items():
        assert array.tobytes() == again[name].tobytes()
    without, _ = steps(folder, options.replace("0.4", "0"))
    assert first[0] == without[0] == pytest.approx(loss_of(scores(folder / "model.onnx")), rel=1e-5)
    assert first[2] != without[2]
    other, _ = steps(folder, options, seed=4)
    assert other[0] == first[0]
    assert other[2] != first[2]


def test_no_token_is_dropped(tmp_path):
    """Dropout beside a table changes nothing: its operand are numbers of rows."""
    folder = make_folder(tmp_path)
    found = [steps(folder, f"target=embed_tokens, dropout={ratio}")[0] for ratio in (0.5, 0)]
    assert found[0] == found[1]


def test_dropout_with_layers_that_are_computed_again(tmp_path):
    """The backward part sees what was dropped in the forward part."""
    folder = make_folder(tmp_path)
    tuner = Tuner(folder, lora="dropout=0.5, target=all-linear", seed=3)
    given = (tuner.base, tuner.adapters, tuner.values, (), folder, AdamWRule())
    settings = [prepare(*given, segments, 3) for segments in (None, ends_of_layers(tuner.base.products)[:1])]
    sizes = [len(each.artifacts.training_model.graph.node) for each in settings]
    assert sizes[1] > sizes[0]
    trainers = [Trainer(each.artifacts, learning_rate=0.02) for each in settings]
    losses = [[each.step(BATCH) for _ in range(4)] for each in trainers]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


def test_what_is_dropped_differs_between_adapters_and_seeds(tmp_path):
    folder = make_folder(tmp_path)
    seeds = []
    for seed in (0, 1):
        model = Tuner(folder, lora="dropout=0.1", seed=seed).setting().artifacts.training_model
        found = [each.i for node in model.graph.node if node.op_type == "Dropout" for each in node.attribute]
        assert len(found) == 8
        seeds += found
    assert len(set(seeds)) == 16


def test_validation_drops_nothing(tmp_path):
    folder = make_folder(tmp_path)
    setting = Tuner(folder, lora="dropout=0.5").setting()
    found = [node for node in setting.artifacts.eval_model.graph.node if node.op_type == "Dropout"]
    assert not any(node.input[2] for node in found)  # it is not in training mode
    assert "Dropout" not in {node.op_type for node in setting.scores.graph.node}
