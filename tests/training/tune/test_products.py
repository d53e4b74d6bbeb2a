"""Adapters beside products of every kind, and dropout: how they begin, what they learn, and what is written."""

import numpy as np
import onnx
import onnxruntime
import pytest
from language_models import make_folder
from onnx import helper, numpy_helper
from runtime_cases_packed import packed

from opgrad.onnx.graph.messages import keep
from opgrad.training.engine.trainer import Trainer
from opgrad.training.files import tensor_values
from opgrad.training.files.artifact_set import AdamWRule
from opgrad.tune import Tuner
from opgrad.tune.language_model import read
from opgrad.tune.trained_set import ends_of_layers, prepare, scoring

TOKENS = np.random.default_rng(0).integers(0, 25, (2, 6))
BATCH = {"input_ids": TOKENS, "draw": np.ones(1, np.int64), "labels": np.roll(TOKENS, -1, 1)}


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


def as_packed(to, node):
    """MatMulNBits of 4 bits in blocks of 16, with packed zero points and a bias."""
    (x, weight), random = node.input, np.random.default_rng(len(to.nodes))
    rows, columns = to.weights.pop(weight).shape
    stored = packed(random.integers(0, 16, (columns, rows // 16, 16)), 4)
    scales = random.uniform(-0.05, 0.05, (columns, rows // 16)).astype(np.float32)
    zeros, bias = packed(random.integers(6, 10, scales.shape), 4), random.normal(size=columns).astype(np.float32)
    parts = {"Q4": stored, "scales": scales, "zeros": zeros, "bias": bias}
    names = [to.constant(f"{weight}_{what}", each) for what, each in parts.items()]
    given = {"K": rows, "N": columns, "bits": 4, "block_size": 16, "domain": "com.microsoft"}
    to.node("MatMulNBits", [x, *names[:3], "", names[3]], node.output[0], node.name, **given)


CASES = {
    "MatMulNBits": ("MatMul", as_packed),
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


WITH_DORA = [name for name in CASES if name.startswith(("MatMul", "Gemm"))]


@pytest.fixture(params=[*CASES, *(f"{name}, DoRA" for name in WITH_DORA)])
def case(request, tmp_path):
    """A folder with such a model, the targets of adapters, and the operator beside which they are."""
    folder, (name, dora, _) = make_folder(tmp_path / "model"), request.param.partition(", DoRA")
    op, write, *arguments = CASES[name]
    Rewriter(folder / "model.onnx").write(op, write, *arguments)
    targets = TARGETS.get(name, "all-linear and lm_head").split(" and ")
    more = ", dora=true" if dora else ""
    return folder, [f"rank=4, target={each}{more}" for each in targets], name.partition(",")[0]


def test_all_kinds_of_products(tmp_path, case):
    """They begin as the base, learn, and compute the same deployed and merged as in training."""
    folder, loras, operator = case
    tuner = Tuner(folder, lora=loras, seed=1)
    assert operator in {each.product.op for each in tuner.adapters}
    plain = scores(folder / "model.onnx")
    trainer = Trainer(tuner.adapted.setting(*TOKENS.shape).artifacts, learning_rate=0.01)
    losses = [trainer.step(BATCH) for _ in range(4)]
    assert losses[0] == pytest.approx(loss_of(plain), rel=1e-5)
    assert losses[3] < losses[0]
    learned = {name: np.array(each) for name, each in trainer.parameters.items()}
    tuner.adapted.use(learned)
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


def test_packed_weights_in_a_file(tmp_path, monkeypatch):
    """They stay there: opgrad's operator multiplies with them, and the losses are those with onnxruntime's own."""
    losses, operators, folder = [], [], make_folder(tmp_path)
    Rewriter(folder / "model.onnx").write("MatMul", as_packed)
    onnx.save(onnx.load(folder / "model.onnx"), folder / "model.onnx", save_as_external_data=True, size_threshold=0)
    for huge in (tensor_values.HUGE, 0):
        monkeypatch.setattr(tensor_values, "HUGE", huge)
        setting = Tuner(folder, lora="rank=4", seed=1).adapted.setting(*TOKENS.shape)
        operators.append({node.op_type for node in setting.artifacts.eval_model.graph.node})
        trainer = Trainer(setting.artifacts, learning_rate=0.01)
        losses.append([trainer.step(BATCH) for _ in range(3)])
    assert "MatMulNBits" in operators[0]
    assert "MatMulNBits" not in operators[1]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


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
    assert first.name not in {each.node for each in read(folder / "model.onnx").products}


def steps(folder, options, seed=3, count=3):
    """The losses of some steps, and the parameters behind them."""
    trainer = Trainer(
        Tuner(folder, lora=options, seed=seed).adapted.setting(*TOKENS.shape).artifacts, learning_rate=0.02
    )
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
    given = (tuner.adapted.base, tuner.adapters, tuner.values, (), folder, AdamWRule())
    settings = [
        prepare(*given, segments, seed=3) for segments in (None, ends_of_layers(tuner.adapted.base.products)[:1])
    ]
    sizes = [len(each.artifacts.training_model.graph.node) for each in settings]
    assert sizes[1] > sizes[0]
    trainers = [Trainer(each.artifacts, learning_rate=0.02) for each in settings]
    losses = [[each.step(BATCH) for _ in range(4)] for each in trainers]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


def test_what_is_dropped_differs(tmp_path):
    """Between adapters and seeds by numbers of their own, between batches by that of the batch."""
    folder, own = make_folder(tmp_path), set()
    for seed in (0, 1):
        setting = Tuner(folder, lora="dropout=0.5, rank=4", seed=seed).adapted.setting(*TOKENS.shape)
        graph = setting.artifacts.training_model.graph
        held = {each.name: each for each in graph.initializer}
        own |= {int(numpy_helper.to_array(held[node.input[1]])[0]) for node in graph.node if "draw" in node.input}
    assert len(own) == 16
    trainer = Trainer(setting.artifacts, learning_rate=0.02)
    trainer.step(BATCH)
    first, again, other = (trainer.compute_gradients({**BATCH, "draw": np.array([each])}) for each in (5, 5, 6))
    assert first == again != other


def test_validation_drops_nothing(tmp_path):
    folder = make_folder(tmp_path)
    tuner = Tuner(folder, lora="dropout=0.5")
    found = [
        node for node in tuner.adapted.setting().artifacts.eval_model.graph.node if node.op_type == "DropoutTraining"
    ]
    assert not found
    assert "DropoutTraining" not in {
        node.op_type for node in scoring(tuner.adapted.base, tuner.adapters, tuner.values)[0].graph.node
    }
