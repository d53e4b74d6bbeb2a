"""The operators of CUDA's provider: how they are described to onnxruntime, and sessions where there is no device.

With onnxruntime-gpu, which `make test-onnxruntime-gpu` installs beside the environment, its own library registers them.
What the nodes compute is in tests/cuda/test_nodes.py.
"""

import ctypes

import numpy as np
import onnxruntime
import pytest
from onnx_models import one_node

from opgrad.contract import FLOATS
from opgrad.cuda import driver
from opgrad.onnxruntime import InferenceSession, abi, custom_ops, node
from opgrad.onnxruntime.overloads import LOSS, overloads_beside_cuda
from opgrad.ops import operators

CUDA = "CUDAExecutionProvider"
IS_GPU_RUNTIME = CUDA in onnxruntime.get_available_providers()
MODEL = one_node("ReluGrad", [("dy", "float32"), ("x", "float32")], [("dx", "float32")])
FEEDS = {"dy": np.ones(3, "f4"), "x": np.array([1, -1, 2], "f4")}
# Without a device, or without CUDA's libraries, onnxruntime logs why.
pytestmark = pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")


def driver_is_there():
    try:
        return bool(driver.library())
    except driver.DriverError:
        return False


def described():
    """What onnxruntime is told of the operators of CUDA's provider: name, provider, memory and dtypes of inputs."""
    found = []
    for structure in custom_ops._structures(None, custom_ops._functions, True):
        op, address = structure.operator, ctypes.addressof(structure)
        asked = {name: getattr(op, name) for name in abi.MEMBERS}
        provider = ctypes.string_at(abi.call(asked["GetExecutionProviderType"], address)).decode()
        if provider == CUDA:
            name = ctypes.string_at(abi.call(asked["GetName"], address)).decode()
            count = abi.call(asked["GetInputTypeCount"], address)
            memory, dtypes = (
                [ctypes.c_int(abi.call(asked[member], address, i)).value for i in range(count)]
                for member in ("GetInputMemoryType", "GetInputType")
            )
            found.append((name, memory, [abi.DTYPES[each] for each in dtypes]))
    return found


def test_every_operator_with_a_kernel_is_there_in_every_dtype():
    found = described()
    on_cuda = {op.name: op for op in operators().values() if "cuda" in op.support.backends}
    expected = {each.name for op in on_cuda.values() for each in op.onnx} | {LOSS.name}
    assert {name for name, _, _ in found} == expected
    for name in expected:
        assert set(FLOATS) <= {dtype for other, _, dtypes in found if other == name for dtype in dtypes}
    assert len(found) == sum(each.on_device for each in overloads_beside_cuda())


def test_what_is_read_as_an_attribute_stays_in_the_hosts_memory():
    memories = {name: memory for name, memory, _ in described()}
    assert memories["GatherGrad"] == [abi.CPU_MEMORY, abi.DEFAULT_MEMORY, abi.DEFAULT_MEMORY]
    assert memories["SoftmaxCrossEntropyLossInternal"] == [0, 0, 0, abi.CPU_MEMORY]
    assert memories["InPlaceAccumulatorV2"] == [0, 0, abi.CPU_MEMORY]
    assert memories["SoftmaxGrad_13"] == [0, 0]


@pytest.mark.skipif(not IS_GPU_RUNTIME, reason="needs onnxruntime-gpu")
@pytest.mark.parametrize("outputs", [("loss",), ("loss", "log_prob")])
def test_the_loss_of_onnx_is_ours_on_the_cpu_too(outputs):
    ports = [("logits", "float32"), ("labels", "int64")]
    model = one_node(LOSS.name, ports, [(name, "float32") for name in outputs], domain="", ignore_index=2)
    feeds = {"logits": np.random.default_rng(0).normal(size=(7, 5)).astype("f4"), "labels": np.arange(7) % 5}
    expected = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    session = InferenceSession(model)
    assert [each.overload.onnx for each in node._nodes.values() if not each._node.closed][-1] is LOSS
    for mine, other in zip(session.run(None, feeds), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)


def test_the_cpus_sessions_are_as_they_were(recwarn):
    session = InferenceSession(MODEL)
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert session.run(None, FEEDS)[0].tolist() == [1, 0, 1]
    assert not recwarn.list


@pytest.mark.skipif(driver_is_there(), reason="there is a device")
@pytest.mark.parametrize("options", [(), ({"device_id": 0},)], ids=["name", "with options"])
def test_cuda_asked_for_and_lacking(options):
    asked = (CUDA, *options) if options else CUDA
    lacking = "finds no CUDA device here" if IS_GPU_RUNTIME else "has no CUDA provider, expected onnxruntime-gpu"
    expected = f"InferenceSession: providers has {CUDA}, but onnxruntime {onnxruntime.__version__} {lacking}"
    with pytest.raises(RuntimeError, match=expected):
        InferenceSession(MODEL, providers=[asked])
    with pytest.warns(RuntimeWarning, match=f"{expected}.*; the session runs on the CPU"):
        session = InferenceSession(MODEL, providers=[asked, "CPUExecutionProvider"])
    assert session.run(None, FEEDS)[0].tolist() == [1, 0, 1]
