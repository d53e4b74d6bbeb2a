"""Frozen integers of artifacts, one or several to a byte, and products of bytes as the integers say."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from command import cli, succeeds
from onnx import TensorProto, helper, numpy_helper, parser
from small_models import build, normal, set_of

from opgrad.onnx.graph.facts import facts_of
from opgrad.onnxruntime import exact_products
from opgrad.training import Dataset, Trainer
from opgrad.training.artifacts import LossType, OptimType
from opgrad.training.engine.training_graph import open_session, session_options
from opgrad.training.files import tensor_values
from opgrad.training.make import artifacts

DEPTH, WIDTH, BLOCK = 80, 48, 16
KINDS = {"int4": (TensorProto.INT4, -8, 7), "uint4": (TensorProto.UINT4, 0, 15), "int8": (TensorProto.INT8, -128, 127)}
X = np.random.default_rng(3).normal(size=(6, 16)).astype(np.float32)
TARGET = np.random.default_rng(4).normal(size=(6, 3)).astype(np.float32)


def models(kind):
    """y = tanh(x @ a @ w) @ b with w of integers in blocks, and the same with w as floats."""
    number, low, high = KINDS[kind]
    random = np.random.default_rng(5)
    q = random.integers(low, high + 1, (DEPTH, WIDTH))
    scales = (random.uniform(0.5, 1.5, (DEPTH // BLOCK, WIDTH)) / high).astype(np.float32)
    zeros = random.integers(low // 2, high // 2 + 1, scales.shape)
    w = ((q - np.repeat(zeros, BLOCK, 0)) * np.repeat(scales, BLOCK, 0)).astype(np.float32)
    integers = {"q": q, "zeros": zeros}
    stored = [helper.make_tensor(name, number, each.shape, each.reshape(-1)) for name, each in integers.items()]
    unpack = f"w = DequantizeLinear <axis = 0, block_size = {BLOCK}> (q, scales, zeros)"
    floats = normal(a=(16, DEPTH), b=(WIDTH, 3))
    found = []
    for first, held, more in ((unpack, {"scales": scales}, stored), ("", {"w": w}, [])):
        body = f"{first} h = MatMul (x, a) p = MatMul (h, w) t = Tanh (p) y = MatMul (t, b)"
        model = build(f"g (float[n, 16] x) => (float[n, 3] y) {{ {body} }}", {**held, **floats}, 21)
        model.graph.initializer.extend(more)
        model.ir_version = 10
        found.append(model)
    return found


def trainer_of(model, folder):
    folder.mkdir()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=1500)
    before = (folder / "model.data").read_bytes()
    given = LossType.MSELoss, OptimType.AdamW
    made = set_of(folder / "model.onnx", folder / "set", *given, requires_grad=["a", "b"])
    assert (folder / "model.data").read_bytes() == before
    return Trainer(made, learning_rate=0.01)


@pytest.mark.parametrize(("kind", "shared"), [("int4", False), ("int4", True), ("uint4", True), ("int8", False)])
def test_trains_as_the_floats_do(kind, shared, tmp_path, monkeypatch):
    """shared: weights are inputs of the sessions, which read the mapped file, as those from 64 MiB on are."""
    monkeypatch.setattr(tensor_values, "HUGE", 1500)
    monkeypatch.setattr(tensor_values, "SHARED_FROM", 0 if shared else 1 << 26)
    monkeypatch.setattr(artifacts, "OUTSIDE_FROM", 1500)
    packed, floats = (trainer_of(model, tmp_path / str(place)) for place, model in enumerate(models(kind)))
    graph = onnx.load(packed.artifacts.directory / "training_model.onnx", load_external_data=False).graph
    assert "QuantizedMatMulGrad" in {node.op_type for node in graph.node}
    assert ("q" in packed.artifacts.constants) == shared
    size = (packed.artifacts.directory / "weights.data").stat().st_size
    assert size < 2 * 4096 + DEPTH * WIDTH + 8192  # the bytes are there once, each tensor at a multiple of 4,096
    batch = {"x": X, "target": TARGET}
    losses = [[each.step(batch) for _ in range(4)] for each in (packed, floats)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    data = Dataset(batch, packed.artifacts.axes)
    assert packed.evaluate(data).loss == pytest.approx(floats.evaluate(data).loss, rel=1e-5)
    packed.check_export()
    packed.export(tmp_path / "out.onnx")
    stored = {each.name: each for each in onnx.load(tmp_path / "out.onnx").graph.initializer}
    expected = {each.name: each for each in models(kind)[0].graph.initializer}
    assert stored["q"].data_type == KINDS[kind][0]
    np.testing.assert_array_equal(*(numpy_helper.to_array(each["q"]) for each in (stored, expected)))
    floats.export(tmp_path / "floats.onnx")
    np.testing.assert_allclose(*(scores(tmp_path / name) for name in ("out.onnx", "floats.onnx")), rtol=1e-4, atol=1e-5)


def scores(path):
    """In stock onnxruntime; its optimizations would round x to 8 bits beside weights of 4."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0]


ROWS, TERMS, COLUMNS = 6, 32, 16
DYNAMIC = "q, s, z = DynamicQuantizeLinear(x)"
FLOATS = "f = Cast<to = 1>(i) t = Mul(f, s) y = Mul(t, ws)"
TEXTS = {
    "MatMulInteger": f"{DYNAMIC} i = MatMulInteger(q, w, z, wz) {FLOATS}",
    "MatMulInteger without zero": f"{DYNAMIC} i = MatMulInteger(q, w, z) {FLOATS}",
    "QLinearMatMul": "q = QuantizeLinear(x, xs, xz) p = QLinearMatMul(q, xs, xz, w, ws, wz, ys, xz)"
    " y = DequantizeLinear(p, ys, xz)",
    "QGemm": "q = QuantizeLinear(x, xs, xz) y = com.microsoft.QGemm(q, xs, xz, w, ws, wz)",
    "MatMulIntegerToFloat": f"{DYNAMIC} y = com.microsoft.MatMulIntegerToFloat(q, w, s, ws, z, wz)",
    "DynamicQuantizeMatMul": "y = com.microsoft.DynamicQuantizeMatMul(x, w, ws, wz)",
    "DequantizeLinear": "q = QuantizeLinear(x, xs, xz) a = DequantizeLinear(q, xs, xz) b = DequantizeLinear(w, ws, wz)"
    " p = MatMul(a, b) r = QuantizeLinear(p, ys, xz) y = DequantizeLinear(r, ys, xz)",
    "DequantizeLinear without zero": "q = QuantizeLinear(x, xs, xz) a = DequantizeLinear(q, xs, xz)"
    " b = DequantizeLinear(w, wss) p = MatMul(a, b) r = QuantizeLinear(p, ys, xz) y = DequantizeLinear(r, ys, xz)",
}


@pytest.fixture
def saturating(monkeypatch):
    monkeypatch.setattr(exact_products, "saturates", lambda: True)


def model_of(name, most=127, given=False):
    """given: whether the weight is an input of the graph, as large ones are in sessions."""
    random = np.random.default_rng(0)
    w = random.integers(-most, most + 1, (TERMS, COLUMNS)).astype(np.int8)
    weight = f", int8[{TERMS}, {COLUMNS}] w" if given else ""
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[rows, {TERMS}] x{weight}) => (float[rows, {COLUMNS}] y) {{ {TEXTS[name]} }}"""
    )
    zero = np.zeros((), np.int8) if given or "QGemm" in name else random.integers(-3, 4, (), np.int8)
    held = {"wz": zero, "ws": np.float32(0.01), "xs": np.float32(0.02), "xz": np.uint8(128), "ys": np.float32(0.4)}
    held["wss"] = np.full(COLUMNS, 0.01, np.float32)
    held |= {} if given else {"w": w}
    read = {each for node in model.graph.node for each in node.input}
    tensors = [numpy_helper.from_array(np.asarray(array), each) for each, array in held.items() if each in read]
    model.graph.initializer.extend(tensors)
    x = random.uniform(-2, 2, (ROWS, TERMS)).astype(np.float32)
    return model, {"x": x, **({"w": w} if given else {})}


def expected(name, model, feeds):
    """y by exact integers."""
    held = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer} | feeds
    dynamic = "DynamicQuantizeLinear" in TEXTS[name] or name.startswith("Dynamic")
    if dynamic:
        low, high = min(feeds["x"].min(), 0), max(feeds["x"].max(), 0)
        scale = np.float32((high - low) / 255)
        zero = np.clip(np.rint(-low / scale), 0, 255)
    else:
        scale, zero = held["xs"], held["xz"]
    q = np.clip(np.rint(feeds["x"] / scale) + zero, 0, 255).astype(np.int64)
    total = (q - np.int64(zero)) @ (held["w"].astype(np.int64) - held.get("wz", np.int8(0)))
    y = total * np.float64(scale) * np.float32(0.01)
    if "ys" not in held:
        return y, 1e-5
    return (np.clip(np.rint(y / held["ys"]) + 128, 0, 255) - 128) * held["ys"], held["ys"] * 1.001


def bytes_of(model):
    """The dtypes of the two operands of each product of bytes that onnxruntime runs."""
    kinds = {each.name: each.data_type for each in model.graph.initializer}
    kinds |= {each.name: each.type.tensor_type.elem_type for each in model.graph.input}
    return {
        kinds.get(node.input[weight], TensorProto.UINT8)
        for node in model.graph.node
        for _, weight, _ in facts_of(node).byte_products
    }


def run(model, folder, feeds):
    """What an own session computes, and the model that it runs."""
    options = session_options(1)
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    (y,) = open_session(model, options, "test").run(["y"], feeds)
    return y, onnx.load(folder / "optimized.onnx")


@pytest.mark.parametrize(("most", "given"), [(127, False), (127, True), (64, False)])
@pytest.mark.parametrize("name", TEXTS)
def test_sessions_multiply_unsigned_bytes(name, most, given, tmp_path, saturating):
    """Weights of seven bits stay signed."""
    model, feeds = model_of(name, most, given)
    before = model.SerializeToString()
    y, optimized = run(model, tmp_path, feeds)
    wanted, tolerance = expected(name, model, feeds)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=tolerance)
    assert bytes_of(optimized) == {TensorProto.UINT8 if most == 127 else TensorProto.INT8}
    assert most == 127 or exact_products.note(model) is None
    assert model.SerializeToString() == before


def test_processors_that_do_not_saturate_keep_the_model(monkeypatch):
    monkeypatch.setattr(exact_products, "saturates", lambda: False)
    model, _ = model_of("MatMulInteger")
    given = model.SerializeToString()
    assert exact_products.with_exact_products(given) is given
    assert exact_products.note(model) is None


def test_a_processor_is_tried():
    """As the processor says of itself, where Linux asks it."""
    flags = set(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else set()
    if not {"avx2"} <= flags:
        pytest.skip("no x86-64 with AVX2")
    assert exact_products.saturates() == flags.isdisjoint(("avx512_vnni", "avx_vnni"))


@pytest.mark.parametrize("name", ["MatMulInteger", "DequantizeLinear"])
def test_bases_of_others_are_trained_and_told(name, tmp_path, saturating):
    model, feeds = model_of(name)
    model.graph.node.add().CopyFrom(helper.make_node("Mul", ["y", "scale"], ["scores"]))
    model.graph.output[0].name = "scores"
    model.graph.initializer.append(numpy_helper.from_array(np.ones(COLUMNS, np.float32), "scale"))
    onnx.save(model, tmp_path / "model.onnx")
    _, text = cli("inspect", tmp_path / "model.onnx", columns=400)
    assert "products of unsigned and signed bytes saturate" in text
    trainer = Trainer(set_of(model, tmp_path / "set", LossType.MSELoss, requires_grad=["scale"]), 0.1)
    wanted, tolerance = expected(name, model, feeds)
    target = np.zeros(wanted.shape, np.float32)
    loss = trainer.compute_gradients({**feeds, "target": target})
    assert loss == pytest.approx((wanted**2).mean(), rel=1e-4 if tolerance < 1e-3 else 0.2)
    rows = tmp_path / "rows.npz"
    np.savez(rows, x=np.repeat(feeds["x"], 4, 0), target=np.repeat(target, 4, 0))
    words = ["train", tmp_path / "set", "--data", rows, "--epochs", 1, "--output", tmp_path / "out"]
    assert "note: products of unsigned and signed bytes saturate" in succeeds(*words, columns=400)
