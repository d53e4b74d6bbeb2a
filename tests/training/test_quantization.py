"""Quantized training: where pairs stand, what is learned, and the integer models of what was trained."""

import sys
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import EXAMPLES, loaded
from command import cli
from onnx import numpy_helper, parser
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.shape_inference import quant_pre_process
from small_models import build, set_of

from opgrad.gradients import gradients
from opgrad.onnx.graph.byte_products import MOST
from opgrad.training import Trainer
from opgrad.training.artifacts import OptimType, generate_artifacts
from opgrad.training.onnxblock.loss import CrossEntropyLoss
from opgrad.training.quantization import Distillation, convert, prepare, with_learned_scales, with_teacher

RANDOM = np.random.default_rng(4)
SHAPES = {
    "w1": (4, 1, 3, 3), "b1": (4,), "w2": (4, 4, 3, 3), "b2": (4,), "w3": (3, 64), "b3": (3,),
    "m1": (16, 24), "a1": (24,), "m2": (24, 16), "a2": (16,), "g1": (16,), "m3": (16, 3),
}  # fmt: skip
IMAGES = """<ir_version: 10, opset_import: ["": 21]> images (float[batch, 1, 8, 8] x) => (float[batch, 3] scores) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w1, b1) r = Relu(c) m = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    d = Conv <pads = [1, 1, 1, 1]> (m, w2, b2) s = Sigmoid(d) t = Mul(d, s) u = Add(t, m) f = Flatten(u)
    scores = Gemm <transB = 1> (f, w3, b3) }"""
TOKENS = """<ir_version: 10, opset_import: ["": 21]> tokens (float[batch, 5, 16] x) => (float[batch, 3] scores) {
    n = LayerNormalization(x, g1, a2) h = MatMul(n, m1) i = Add(h, a1) g = Gelu(i) o = MatMul(g, m2) p = Add(o, a2)
    y = Add(x, p) k = Transpose <perm = [0, 2, 1]> (y) q = MatMul(y, k) e = Softmax(q) v = MatMul(e, y)
    axis = Constant <value_ints: ints = [1]> () l = ReduceMean <keepdims = 0> (v, axis) scores = MatMul(l, m3) }"""
MODELS = {"images": (IMAGES, (1, 8, 8)), "tokens": (TOKENS, (5, 16))}


@pytest.fixture(autouse=True)
def _the_same_numbers(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "RANDOM", np.random.default_rng(4))


def model_of(name):
    model = parser.parse_model(MODELS[name][0])
    read = {each for node in model.graph.node for each in node.input}
    for each, shape in SHAPES.items():
        if each in read:
            size = 0.1 if len(shape) == 1 else 1 / np.sqrt(shape[0] if each[0] == "m" else np.prod(shape[1:]))
            values = (RANDOM.normal(size=shape) * size + (each == "g1")).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(values, each))
    return model


def batches_of(name, count=4):
    return [{"x": RANDOM.normal(size=(16, *MODELS[name][1])).astype(np.float32)} for _ in range(count)]


AS_IT_IS = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # else constants become integers that are multiplied


def run(model, feeds, level=onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def trained(model, name, steps=12, loss=None, *, folder, **options):
    """The model after some steps on labels that depend on the inputs, and the parameters that it began with."""
    artifacts = set_of(model, folder, loss or CrossEntropyLoss(), OptimType.AdamW, **options)
    trainer, losses = Trainer(artifacts, 0.01), []
    several = batches_of(name)
    for step in range(steps):
        batch = several[step % len(several)]
        labels = batch["x"].reshape(16, -1)[:, :3].argmax(1)
        losses.append(trainer.step({**batch, "labels": labels}))
    trainer.export(folder / "trained.onnx")
    return onnx.load(folder / "trained.onnx"), artifacts, trainer, losses


class Reader(CalibrationDataReader):
    def __init__(self, batches):
        self.rest = iter(batches)

    def get_next(self):
        return next(self.rest, None)


def by_onnxruntime(model, batches, per_channel, folder):
    """What onnxruntime's quantizer makes of a model: what is quantized while it runs, and which constants are."""
    onnx.save(model, folder / "given.onnx")
    quant_pre_process(str(folder / "given.onnx"), str(folder / "pre.onnx"), skip_symbolic_shape=True)
    quantize_static(str(folder / "pre.onnx"), str(folder / "q.onnx"), Reader(batches), quant_format=QuantFormat.QDQ,
                    activation_type=QuantType.QUInt8, per_channel=per_channel, reduce_range=True)  # fmt: skip
    graph = onnx.load(folder / "q.onnx").graph
    constants = {each.name: each for each in graph.initializer if each.name.endswith("_quantized")}
    scales = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    activations = {node.input[0]: scales[node.input[1]] for node in graph.node if node.op_type == "QuantizeLinear"}
    weights = {
        node.input[0].removesuffix("_quantized"): scales[node.input[1]]
        for node in graph.node
        if node.input[0] in constants and constants[node.input[0]].data_type != onnx.TensorProto.INT32
    }
    return activations, weights


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_pairs_stand_where_onnxruntime_puts_them(name, per_channel, tmp_path):
    model, batches = model_of(name), batches_of(name)
    activations, weights = by_onnxruntime(model, batches, per_channel, tmp_path)
    graph = prepare(model, "int8", batches, per_channel=per_channel).graph
    held = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    pairs = {
        node.input[0].removesuffix("/limited"): np.exp(held[f"{node.input[1]}.log"])
        for node in graph.node
        if node.op_type == "QuantizeLinear"
    }
    assert pairs.keys() == activations.keys() | weights.keys()
    assert set(weights) == pairs.keys() & held.keys()
    for each, scale in (activations | weights).items():
        np.testing.assert_allclose(pairs[each], scale, rtol=1e-5, err_msg=each)


def assert_exact_on_every_processor(graph, held):
    """Those without VNNI add two products with bytes in 16 bits; training may move weights beyond what their scale
    reaches, but the integers stay within."""
    assert 2 * 255 * MOST < 2**15
    makers = {node.output[0]: node for node in graph.node}
    pairs = [makers.get(node.input[1]) for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    weights = [held.get(node.input[0]) for node in pairs if node is not None]
    largest = [np.abs(w.astype(int)).max() for w in weights if w is not None and w.dtype == np.int8]
    assert len(largest) >= 3
    assert max(largest) <= MOST


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_integer_model_agrees_with_what_was_trained(name, per_channel, kind, tmp_path):
    """To one step of the scale of its result, and so do almost all numbers where onnxruntime computes in integers."""
    model, batches = model_of(name), batches_of(name)
    made = prepare(model, kind, batches if kind == "int8" else (), per_channel=per_channel)
    after, artifacts, trainer, losses = trained(made, name, folder=tmp_path)
    logs = [each for each in artifacts.trainable if each.endswith(".log")]
    changed = [each for each in logs if not np.array_equal(trainer.parameters[each], artifacts.trainable[each])]
    assert len(logs) >= 3
    assert len(changed) >= len(logs) - 2  # what is cut off nowhere, and rounded evenly, may have no gradient
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    integers = convert(after)
    feeds = batches[0]
    mine, fused, other = run(integers, feeds, AS_IT_IS), run(integers, feeds), run(after, feeds, AS_IT_IS)
    held = {each.name: numpy_helper.to_array(each) for each in integers.graph.initializer}
    if kind == "int8":
        last = next(node for node in integers.graph.node if node.output[0] == "scores")
        step = float(held[last.input[1]])
        assert_exact_on_every_processor(integers.graph, held)
    else:
        step = 1e-4 * np.abs(other).max()  # the products are those of floats
    assert np.abs(mine - other).max() <= step * 1.001
    # Its kernels may round a number to the next step, which the layers behind may double.
    assert np.mean(np.abs(fused - other) <= step * 1.001) > 0.95
    assert np.abs(fused - other).max() <= 2.001 * step
    kinds = {held[node.input[0]].dtype.name for node in integers.graph.node
             if node.op_type == "DequantizeLinear" and node.input[0] in held}  # fmt: skip
    expected = {
        "int8": {"int8", "int32" if name == "images" else "uint8"},
        "int4": {"int4"} if name == "images" else set(),
    }
    assert kinds == expected[kind]
    assert not any(node.op_type == "Exp" for node in integers.graph.node)


@pytest.mark.parametrize(("shape", "axis"), [((5, 3, 2, 2), 0), ((6, 8), 1), ((8, 6), 0), ((6, 8), None)])
def test_scales_get_the_gradient_of_a_step_of_seven_bits(shape, axis):
    """Where a weight lies beyond: dy times the bound; elsewhere dy times what was rounded off."""
    w, count = RANDOM.normal(size=shape).astype(np.float32), () if axis is None else (shape[axis],)
    scale = RANDOM.uniform(0.01, 0.02, count).astype(np.float32)
    sizes = ", ".join(map(str, shape))
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[{sizes}] x) => (float[{sizes}] y) {{
        d = DequantizeLinear <axis = {axis or 0}> (w_quantized, w_scale, zero) y = Mul(d, x) }}""")
    held = {"w_quantized": np.zeros(shape, np.int8), "w_scale": scale, "zero": np.zeros(count, np.int8)}
    model.graph.initializer.extend(numpy_helper.from_array(array, each) for each, array in held.items())
    made = gradients(with_learned_scales(model, {"w": w}), "y", ["w", "w_scale.log"], plain=True)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    x = RANDOM.normal(size=shape).astype(np.float32)
    y, dw, dlog = session.run(None, {"x": x})
    wide = scale if axis is None else scale.reshape([-1 if each == axis else 1 for each in range(len(shape))])
    number = w / wide
    beyond = np.abs(number) > MOST
    assert 0.1 < beyond.mean() < 0.9
    np.testing.assert_allclose(y, np.clip(np.rint(number), -MOST, MOST) * wide * x, rtol=1e-5)
    np.testing.assert_allclose(dw, np.where(beyond, 0, x), rtol=1e-6)
    step = np.where(beyond, MOST * np.sign(number), np.rint(number) - number)
    others = tuple(each for each in range(len(shape)) if each != axis)
    np.testing.assert_allclose(dlog, (x * step * wide).sum(others).reshape(count), rtol=1e-3, atol=1e-4)


def test_onnxruntime_computes_in_integers(tmp_path):
    """Its optimizer makes the nodes between pairs those of its integer kernels."""
    made = convert(prepare(model_of("images"), "int8", batches_of("images"), per_channel=True))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "fused.onnx"), 4
    onnxruntime.InferenceSession(made.SerializeToString(), options, ["CPUExecutionProvider"])
    fused = {node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node}
    assert {"QLinearConv", "NhwcMaxPool", "QLinearSigmoid", "QLinearMul", "QLinearAdd", "QGemm"} <= fused
    assert not fused & {"Conv", "MaxPool", "Sigmoid", "Mul", "Add", "Gemm"}


def test_products_of_four_bits_are_those_of_onnxruntimes_quantizer():
    model = model_of("tokens")
    quantizer = MatMulNBitsQuantizer(onnx.ModelProto.FromString(model.SerializeToString()), block_size=32)
    quantizer.process()
    expected = {node.input[0] for node in quantizer.model.model.graph.node if node.op_type == "MatMulNBits"}
    made = convert(prepare(model, "int4"))
    nodes = [node for node in made.graph.node if node.op_type == "MatMulNBits"]
    assert {node.input[0] for node in nodes} == expected
    held = {each.name: numpy_helper.to_array(each) for each in made.graph.initializer}
    floats = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    for node in nodes:
        packed, scales = (held[each] for each in node.input[1:3])
        w = floats[node.input[1].removesuffix("_floats/packed")].T
        whole = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[:, : w.shape[1]].astype(np.int32) - 8
        wide = np.repeat(scales.reshape(len(packed), -1), 32, 1)[:, : w.shape[1]]
        assert np.abs(whole * wide - w).max() <= np.abs(w).max() / 7


def test_a_batch_normalization_becomes_part_of_its_convolution():
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
        g (float[batch, 1, 8, 8] x) => (float[batch, 4, 6, 6] y)
        <float[4, 1, 3, 3] w1, float[4] g, float[4] b, float[4] m, float[4] v> {
        c = Conv(x, w1) y = BatchNormalization(c, g, b, m, v) }""")
    for name, shape in (("w1", (4, 1, 3, 3)), *((each, (4,)) for each in "gbmv")):
        values = RANDOM.uniform(0.5, 1.5, shape).astype(np.float32)
        (tensor,) = [each for each in model.graph.initializer if each.name == name] or [model.graph.initializer.add()]
        tensor.CopyFrom(numpy_helper.from_array(values, name))
    feeds = {"x": RANDOM.normal(size=(2, 1, 8, 8)).astype(np.float32)}
    made = prepare(model, "int8", [feeds], per_channel=True)
    others = [node for node in made.graph.node if "/limited" not in node.output[0] and "Linear" not in node.op_type]
    assert [node.op_type for node in others if node.op_type != "Exp"] == ["Conv"]
    expected = run(model, feeds)
    assert np.abs(run(convert(made), feeds) - expected).max() < 0.05 * np.abs(expected).max()


def test_what_a_branch_reads_may_have_no_pair():
    """The quantizer leaves a pair without readers there, whose scale would be no weight."""
    text = """g (float[batch, 16] x) => (float[batch, 3] y) {
        h = MatMul(x, m3) s = ReduceSum <keepdims = 0> (x) z = Constant <value = float {0}> () c = Greater(s, z)
        y = If (c) <then_branch = t () => (float[batch, 3] p) { p = Relu(h) },
                    else_branch = e () => (float[batch, 3] q) { q = Tanh(h) }> }"""
    feeds = {"x": RANDOM.normal(size=(9, 16)).astype(np.float32)}
    model = build(text, {"m3": RANDOM.normal(size=SHAPES["m3"]).astype(np.float32)})
    made = prepare(model, "int8", [feeds])
    logs = [each.name for each in made.graph.initializer if each.name.endswith(".log")]
    gradients(made, "y", [*logs, "m3"])
    assert sorted(logs) == ["m3_scale.log", "x_scale.log"]


def test_distillation(tmp_path):
    """The loss is that of the labels and the divergence from the float model, which stays, and is not exported."""
    model, batches = model_of("tokens"), batches_of("tokens")
    both = with_teacher(prepare(model, "int4"), model)
    weight, temperature = 0.3, 3.0
    loss = Distillation(CrossEntropyLoss(), weight, temperature)
    after, artifacts, *_ = trained(both, "tokens", 1, loss, frozen_params=["teacher/*"], folder=tmp_path)
    assert not any(name.startswith("teacher/") for name in artifacts.trainable)
    assert not any(each.name.startswith("teacher/") for each in after.graph.initializer)
    assert [each.name for each in after.graph.input] == ["x"]
    batch = {"x": batches[0]["x"], "labels": np.arange(16) % 3}
    found = Trainer(artifacts, 0.01).compute_gradients(batch)
    student, teacher = (
        run(each, {"x": batch["x"]}, AS_IT_IS).astype(np.float64) for each in (prepare(model, "int4"), model)
    )

    def log_softmax(x):
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    entropy = -log_softmax(student)[np.arange(16), batch["labels"]].mean()
    t, s = log_softmax(teacher / temperature), log_softmax(student / temperature)
    divergence = (np.exp(t) * (t - s)).sum(1).mean()
    np.testing.assert_allclose(found, (1 - weight) * entropy + weight * temperature**2 * divergence, rtol=1e-5)


NO_WEIGHT = "g (float x) => (float y) { y = Exp(x) }"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda model: prepare(model, "int2"), "kind is 'int2', expected int8 or int4"),
        (lambda model: prepare(model, "int8"), "calibration has no batches"),
        (lambda model: prepare(model, "int8", [{"z": np.zeros(1)}]), "calibration lacks the input 'x', expected x"),
        (lambda model: prepare(model, "int8", [[1]]), "calibration has a list"),
        (lambda _: prepare(build(NO_WEIGHT), "int4"), "no MatMul, Gemm or Conv with a constant weight"),
        (convert, "no weight of the model is quantized"),
        (lambda _: prepare(prepare(model_of("images"), "int4"), "int4"),
         "the model is quantized already, it has DequantizeLinear; expected a float"),
        (lambda _: Distillation(CrossEntropyLoss(), 2), "weight is 2, expected a number from 0 to 1"),
        (lambda model: generate_artifacts(prepare(model, "int4"), loss=Distillation(CrossEntropyLoss())),
         "the model has no 'teacher/scores'"),
    ],
)  # fmt: skip
def test_wrong_arguments_and_models(wrong, message):
    with pytest.raises(TypeError if "a list" in message else ValueError, match=message):
        wrong(model_of("tokens"))


def test_the_example(tmp_path, monkeypatch):
    """With few examples and one epoch: it gives an accuracy for each kind."""
    example = loaded(EXAMPLES / "quantization" / "compare.py")
    monkeypatch.setattr(example, "CALIBRATED", 100)
    for task in (example.digits(), example.counts()):
        few = {name: array[:200] for name, array in task.training.items()}
        short = replace(task, training=few, epochs=dict.fromkeys(task.epochs, 1))
        found = example.compare(short, 0)
        assert len(found) == 5
        assert all(0 <= each <= 100 for each in found)


# --- the command ---


@pytest.fixture
def files(tmp_path):
    onnx.save(model_of("images"), tmp_path / "model.onnx")
    x = RANDOM.normal(size=(80, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, labels=x.reshape(80, -1)[:, :3].argmax(1))
    return tmp_path


def opgrad(files, *words):
    given = ["train", files / "model.onnx", "--data", files / "data.npz", "--loss", "cross-entropy", "--epochs", 2]
    return cli(*given, "--output", files / "run", *words)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_command_writes_an_integer_model(kind, files):
    options = ("--quantize", kind, "--per-channel", "--distill", 0.5, "--export", files / "integers.onnx")
    status, text = opgrad(files, *options)
    assert status == 0, text
    for path in (files / "run" / "model.onnx", files / "integers.onnx"):
        made = onnx.load(path)
        assert not any(
            each.name.startswith("teacher/") or each.name.endswith(".log") for each in made.graph.initializer
        )
        kinds = {each.data_type for each in made.graph.initializer}
        assert (onnx.TensorProto.INT8 if kind == "int8" else onnx.TensorProto.INT4) in kinds
        assert run(made, {"x": np.zeros((3, 1, 8, 8), np.float32)}).shape == (3, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--per-channel",), "--per-channel is of a quantized model, expected --quantize, too"),
        (("--quantize", "int3"), "--quantize is 'int3', expected int8 or int4"),
        (("--quantize", "int8", "--temperature", "3"), "--temperature is of what is learned from the float model"),
        (("--quantize", "int8", "--distill", "3"), "weight is 3.0, expected a number from 0 to 1"),
    ],
)
def test_options_that_do_not_fit(words, message, files):
    status, text = opgrad(files, *words)
    assert status
    assert message in " ".join(text.split())


def test_calibration_is_of_activations(files):
    _, text = opgrad(files, "--quantize", "int4", "--calibrate", files / "data.npz")
    assert "--calibrate is for activations, and int4 rounds weights alone" in text
