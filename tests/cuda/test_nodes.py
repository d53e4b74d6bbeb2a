"""onnxruntime's nodes of CUDA's provider, on the stand-in for a device (tests/support/device_sessions.py).

They take the tests of the CPU's nodes, and those below. All run in a process of their own, because in that of the other
tests Triton may be an interpreter; the first test starts it.
"""

import gc
import importlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from cuda_gate import environment as compiling
from onnx_cases import check, find, samples
from onnx_models import one_node
from subprocesses import run_python

from opgrad.cli.compile import DEVICES
from opgrad.contract import Spec
from opgrad.contract.signature import Operand
from opgrad.cpu.compiler import target
from opgrad.onnxruntime import InferenceSession, lower
from opgrad.ops import operators

triton = pytest.importorskip("triton", reason="needs Triton")
execute = importlib.import_module("opgrad.cuda.execute")
INSIDE = "device_sessions" in sys.modules
inside = pytest.mark.skipif(not INSIDE, reason="runs in the process that the first test starts")
outside = pytest.mark.skipif(INSIDE, reason="ran in the process that started this one")
ROOT = Path(__file__).parents[2]
# Of the nodes' tests against the references: one dtype of each operator in `make test`, all in `make test-ptx`.
EVERYTHING = "OPGRAD_PTX" in os.environ
SHARE = "test_nodes or (test_against and float32 and not float64 and not int32-float and not Scale-float32-i)"
# What the CPU refuses is NaN on a device, where nobody looks at labels and indices.
NOT_REFUSED = "77"


@outside
@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="needs a C compiler")
def test_nodes_on_a_device():
    chosen = f"not {NOT_REFUSED}" if EVERYTHING else f"({SHARE}) and not {NOT_REFUSED}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "device_sessions"]
    command += ["-W", "ignore::RuntimeWarning", "-k", chosen]
    command += ["tests/cuda/test_nodes.py", "tests/onnxruntime/test_softmax.py"]
    variables = {"OPGRAD_PTX": "90", **compiling()}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "failed" not in done.stdout


KEYS = """
from opgrad.cuda import without_triton
without_triton.release = "3.9.0"
with without_triton.importing():
    from opgrad.cuda import ahead
from opgrad.cli.examples import signatures
from opgrad.contract.signature import prepare
from opgrad.cuda.execute import Device, planning
from opgrad.ops import operators

for name in ("softmax_grad", "softmax_cross_entropy_loss_and_grad", "gather_grad", "leaky_relu_grad"):
    for dtype in ("float64", "bfloat16"):
        for op, specs, attributes in signatures(operators()[name], dtype):
            with without_triton.importing(), planning(Device()):
                program = op.kernel("opgrad.cuda")(prepare(op, specs, attributes, any_stride=True))
            print(name, dtype, *map(ahead.key, program.launches))
"""


@outside
def test_kernels_have_the_same_keys_without_triton():
    environment = {"TRITON_INTERPRET": "0"}
    keys = run_python(KEYS, **environment)
    assert len(keys.splitlines()) > 40
    hidden = "import sys\nsys.modules['triton'] = None\n"
    seen = "\nassert sys.modules['triton'] is None\nimport opgrad.cuda.softmax as s\nprint(type(s.triton))"
    assert run_python(hidden + KEYS + seen, **environment) == f"{keys}\n<class 'opgrad.cuda.without_triton._Triton'>"


@outside
def test_parameters_are_words_in_the_order_of_the_kernels_arguments():
    """Those that are no constants; numbers as the bits that the kernel reads."""
    ahead = importlib.import_module("opgrad.cuda.ahead")
    x, sums = Operand(1, "float32"), execute.Scratch(64, "float64")
    arguments = {"x": x, "C": "constant", "sizes": (5, -1), "rate": 0.5, "wide": 0.5, "sums": sums}
    launch = execute.Launch(SimpleNamespace(arg_names=list(arguments)), (1,), arguments)
    kinds = [[[0], "*fp32"], [[2, 0], "i64"], [[2, 1], "i32"], [[3], "fp32"], [[4], "fp64"], [[5], "*fp64"]]
    found = list(ahead.parameters(launch, ahead.Machine("name", 0, 128, kinds)))
    words = [5, (1 << 64) - 1, 0x3F000000, 0x3FE0 << 48]
    assert found == [(0, x), *((word, None) for word in words), (64, sums), (0, None), (0, None)]


@outside
def test_a_pack_for_a_device(tmp_path):
    """The kernels of an operator and of an artifact set, as machine code for the architecture that is named."""
    path = tmp_path / "kernels.pack"
    words = ["--for", "sm_90", "--ops", "quick_gelu_grad", "--dtypes", "float16", "examples/digits", "-o", str(path)]
    command = [sys.executable, "-m", "opgrad", "compile", *words]
    done = subprocess.run(command, cwd=ROOT, env=compiling(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pack = target.Pack(str(path))
    ((environment, names),) = pack.names.items()
    assert environment == f"sm_90-triton-{triton.__version__}"
    code = [target.PackedObjects(pack, environment).read(name) for name in names]
    heads = [json.loads(each.partition(b"\n")[0]) for each in code]
    assert {"quick_gelu_grad", "relu_grad", "loss_rows", "loss_grad"} <= {head["name"] for head in heads}
    assert all(each.partition(b"\n")[2].startswith(b"\x7fELF") for each in code)


@outside
def test_packs_are_for_the_devices_that_plans_know():
    assert [f"sm_{architecture}" for architecture in execute.DEVICES] == list(DEVICES)


if INSIDE:
    import device_sessions
    from device_sessions import DEVICE, STREAM, given, given_back

    from opgrad.onnxruntime import device_plans, node

RELU = one_node("ReluGrad", [("dy", "float32"), ("x", "float32")], [("dx", "float32")])
LOSS_OF_ONNX = "SoftmaxCrossEntropyLoss"
LOSS = f"{LOSS_OF_ONNX}Internal", "float32", "int64", "float32", "int64"


def relu(*shape):
    random = np.random.default_rng(3)
    dy, x = (random.normal(size=shape).astype("f4") for _ in range(2))
    return {"dy": dy, "x": x}, np.where(x > 0, dy, 0)


@inside
def test_kernels_run_on_onnxruntimes_stream():
    DEVICE.launches.clear()
    feeds, expected = relu(5, 7)
    np.testing.assert_array_equal(InferenceSession(RELU).run(None, feeds)[0], expected)
    assert [each.stream for each in DEVICE.launches] == [STREAM]


@inside
def test_onnxruntimes_own_functions_stand_at_their_places():
    """Where the stand-ins are in its table, it has functions that take the same arguments."""
    InferenceSession(RELU).run(None, relu(5, 7)[0])
    assert device_sessions.said == {"stream": (0, 0), "allocator": (0, True)}


@inside
def test_working_memory_is_onnxruntimes_and_given_back():
    """A mean's sums are working memory; so is log_prob, which this node has no output for."""
    given_back.clear()
    overload = find(*LOSS)
    feeds = samples(overload.operator.name)
    check(overload, feeds)
    assert given_back
    assert not given


@inside
def test_a_session_that_goes_releases_its_allocators():
    gc.collect()
    before = len(device_sessions.allocators)
    session = InferenceSession(RELU)
    assert len(device_sessions.allocators) == before + 1
    del session
    gc.collect()
    assert len(device_sessions.allocators) == before


@inside
def test_python_is_asked_once_for_each_shape(monkeypatch):
    asked = []
    prepare = node.RuntimeNode.prepare
    monkeypatch.setattr(node.RuntimeNode, "prepare", lambda self, key: asked.append(key) or prepare(self, key))
    session = InferenceSession(RELU)
    for size in (3, 4, 3, 4, 3):
        feeds, expected = relu(size, 5)
        np.testing.assert_array_equal(session.run(None, feeds)[0], expected)
    assert len(asked) == 2


@inside
def test_a_kernel_is_compiled_once_for_all_shapes_of_its_kind(monkeypatch):
    """With a warning, which says so; the next process finds it in the cache."""
    compiled, machine = [], device_plans.ahead.machine
    monkeypatch.setattr(device_plans.ahead, "machine", lambda *given: compiled.append(1) or machine(*given))
    model = one_node("TanhGrad", [("dy", "float64"), ("y", "float64")], [("dx", "float64")])
    session = InferenceSession(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in (32, 48, 64):
            session.run(None, {"dy": np.ones((size, 16)), "y": np.ones((size, 16))})
    assert len(compiled) <= 1
    assert len(told) == len(compiled)
    assert all("tanh_grad: its CUDA kernel tanh_grad was compiled in" in str(each.message) for each in told)
    device_plans._functions.clear()
    InferenceSession(model).run(None, {"dy": np.ones((80, 16)), "y": np.ones((80, 16))})
    assert len(compiled) <= 1


@inside
def test_a_pack_serves_kernels_without_triton(monkeypatch, tmp_path):
    op, specs = operators()["tanh_grad"], [Spec((48, 16), np.dtype("float16"))] * 2
    device_plans.compile_ahead(op, specs, {}, 90, str(tmp_path / "folder"))
    path = tmp_path / "kernels.pack"
    path.write_bytes(target.packed(str(tmp_path / "folder")))
    monkeypatch.setattr(target, "served", lambda: (target.Pack(str(path)), ""))
    monkeypatch.setattr(device_plans, "find_spec", lambda name: None)
    monkeypatch.setattr(device_plans, "kernels", device_plans.kernels.__wrapped__)
    ports = [(name, "float16") for name in ("dy", "y")]
    half = np.full((48, 16), 0.5, "f2")
    (dx,) = InferenceSession(one_node("TanhGrad", ports, [("dx", "float16")])).run(None, {"dy": half, "y": half})
    np.testing.assert_array_equal(dx, np.full((48, 16), 0.375, "f2"))
    lacking = rf"relu_grad: {path} lacks the kernel _elements for sm_90-triton-\S+, and Triton is not installed; pip"
    with pytest.raises(Exception, match=lacking):
        InferenceSession(RELU).run(None, relu(6, 13)[0])
    monkeypatch.setattr(DEVICE, "architecture", 80)
    known = rf"the device is sm_80, but {path} has kernels for sm_90-triton-\S+, and Triton is not installed; pip"
    with pytest.raises(Exception, match=known):
        InferenceSession(RELU).run(None, relu(6, 15)[0])


@inside
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_nothing_to_compute(shape):
    feeds, expected = relu(*shape)
    DEVICE.launches.clear()
    np.testing.assert_array_equal(InferenceSession(RELU).run(None, feeds)[0], expected)
    assert not DEVICE.launches


@inside
@pytest.mark.parametrize("share", [64, 1 << 30], ids=["parts of rows", "a cluster"])
def test_rows_that_several_thread_blocks_share(monkeypatch, share):
    """In two launches, or in one of clusters; with the limits of regimes lowered, so that rows are short."""
    regimes = importlib.import_module("opgrad.cuda.regimes")
    limits = replace(regimes.RegisterLimits(), row=128, tile=32, step=64, peel=32, share=share)
    monkeypatch.setattr(regimes, "LIMITS", limits)
    model = one_node("SoftmaxGrad_13", [("dy", "float64"), ("y", "float64")], [("dx", "float64")], axis=-1)
    dy, y = (np.random.default_rng(seed).normal(size=(2, 200)) for seed in (1, 2))
    DEVICE.launches.clear()
    (dx,) = InferenceSession(model).run(None, {"dy": dy, "y": y})
    np.testing.assert_allclose(dx, y * (dy - (dy * y).sum(-1, keepdims=True)), atol=1e-13)
    if share == 64:
        assert len(DEVICE.launches) == 2
    elif regimes.clusters():
        assert DEVICE.launches[0].grid[0] > 2


@inside
def test_indices_that_are_sorted():
    """By several launches, which share working memory."""
    ports = [("shape", "int64"), ("indices", "int32"), ("dy", "float32")]
    model = one_node("GatherGrad", ports, [("dx", "float32")], axis=0)
    random = np.random.default_rng(3)
    indices, dy = random.integers(-40, 40, 300).astype("i4"), random.normal(size=(300, 5)).astype("f4")
    expected = np.zeros((40, 5))
    np.add.at(expected, indices, dy.astype(float))
    given_back.clear()
    DEVICE.launches.clear()
    (dx,) = InferenceSession(model).run(None, {"shape": np.array([40, 5]), "indices": indices, "dy": dy})
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5)
    assert len(DEVICE.launches) > 2
    assert len(given_back) == 1


@inside
@pytest.mark.parametrize("outputs", [("loss",), ("loss", "log_prob")])
def test_the_loss_of_onnx(outputs):
    """Of which onnxruntime has a kernel for the CPU alone."""
    ports = [("logits", "float32"), ("labels", "int64")]
    options = {"reduction": "sum", "ignore_index": 2}
    model = one_node(LOSS_OF_ONNX, ports, [(name, "float32") for name in outputs], domain="", **options)
    feeds = {"logits": np.random.default_rng(0).normal(size=(7, 5)).astype("f4"), "labels": np.arange(7) % 5}
    expected = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    DEVICE.launches.clear()
    for mine, other in zip(InferenceSession(model).run(None, feeds), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)
    assert DEVICE.launches


@inside
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("digits", {"relu_grad", "loss_rows", "loss_grad"}),
        ("digits_attention", {"gradient_rows", "sum_slices", "divided", "tanh_grad", "loss_rows", "loss_grad"}),
    ],
)
def test_a_training_graph(name, kernels):
    """As the artifact generator wrote it: loss and gradients are those of the same graph in plain ONNX."""
    model, random, feeds = onnx.load(ROOT / "examples" / name / "training_model.onnx"), np.random.default_rng(0), {}
    for value in model.graph.input:
        shape = [size.dim_value or 16 for size in value.type.tensor_type.shape.dim]
        kind = value.type.tensor_type.elem_type
        drawn = {onnx.TensorProto.INT64: random.integers(0, 10, shape), onnx.TensorProto.BOOL: np.zeros(shape, bool)}
        feeds[value.name] = drawn.get(kind, random.normal(size=shape).astype("f4"))
    DEVICE.launches.clear()
    buffers = {name: array.copy() for name, array in feeds.items()}  # accumulators write into them
    found = InferenceSession(model.SerializeToString()).run(None, buffers)
    assert kernels <= {each.kernel for each in DEVICE.launches}
    plain = lower(model).SerializeToString()
    expected = onnxruntime.InferenceSession(plain, providers=["CPUExecutionProvider"]).run(None, feeds)
    for mine, other in zip(found, expected, strict=False):  # which has the accumulated gradients besides
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


# --- what is refused -------------------------------------------------------------------------------------------------


@inside
def test_arrays_that_kernels_cannot_read():
    memory = np.ones(70, "f4")
    first = (-memory.ctypes.data // 4) % 4 + 1
    array = memory[first : first + 30]
    with pytest.raises(
        Exception, match="an array begins at an address that is no multiple of 16 bytes, expected whole"
    ):
        InferenceSession(RELU).run(None, {"dy": array, "x": array})


# What is patched, on what, with what, and what is said then.
BROKEN = [
    ("driver.device_of", lambda address: None, "relu_grad: dy lies on no CUDA device, expected CUDA device 0, which"),
    ("driver.device_of", lambda address: 1, "relu_grad: dy lies on CUDA device 1, expected CUDA device 0, which runs"),
    ("driver.LAUNCH", "cuLaunchKernelOfTomorrow",
     r"libcuda.so.1 knows CUDA 13.0 and lacks cuLaunchKernelOfTomorrow, expected that of CUDA 11.8 or newer"),
    ("DEVICE.context", 0, "this thread has no device"),
    # As a driver answers that is too old, or of a device of another architecture.
    ("Device.cuModuleLoadData", lambda self, given: 209,
     r"relu_grad: the driver, which knows CUDA 13.0, does not load a kernel for sm_90-triton-\S+: .*error 209"),
]  # fmt: skip


@inside
@pytest.mark.parametrize(("place", "value", "message"), BROKEN, ids=[each[2][:60] for each in BROKEN])
def test_drivers_and_memory_that_do_not_serve(monkeypatch, place, value, message):
    """With a shape of its own each: a known one has a plan."""
    owner, _, name = place.partition(".")
    owners = {"driver": device_plans.driver, "DEVICE": DEVICE, "Device": type(DEVICE)}
    monkeypatch.setattr(owners[owner], name, value)
    monkeypatch.setattr(device_plans, "_functions", {})
    with pytest.raises(Exception, match=message):
        InferenceSession(RELU).run(None, relu(6, 17 + len(message))[0])


@inside
def test_a_launch_that_fails(monkeypatch):
    monkeypatch.setattr(type(DEVICE), "cuLaunchKernelEx", lambda self, given: self._failed("out of resources"))
    session = InferenceSession(RELU)
    with pytest.raises(Exception, match="relu_grad: CUDA error 719, out of resources, in the launch of _elements"):
        session.run(None, relu(6, 9)[0])
    monkeypatch.undo()
    feeds, expected = relu(6, 9)
    np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


@inside
def test_wrong_labels_and_indices_are_nan():
    model = one_node(
        "GatherGrad", [("shape", "int64"), ("indices", "int64"), ("dy", "float32")], [("dx", "float32")], axis=0
    )
    feeds = {"shape": np.array([4, 3]), "indices": np.array([1, 77]), "dy": np.ones((2, 3), "f4")}
    (dx,) = InferenceSession(model).run(None, feeds)
    np.testing.assert_array_equal(dx, np.eye(4, dtype="f4")[1][:, None] * np.ones((1, 3), "f4"))
