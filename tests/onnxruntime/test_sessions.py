"""Sessions, threads and lifetimes in stock onnxruntime, and real training graphs."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
from onnx_cases import find, ports
from onnx_models import one_node, run
from small_models import build

from opgrad.onnxruntime import InferenceSession, node, register

RELU = one_node("ReluGrad", [("dy", "float32"), ("x", "float32")], [("dx", "float32")])


def relu_case(*shape):
    r = np.random.default_rng(sum(shape))
    dy, x = (r.normal(size=shape).astype("f4") for _ in "ab")
    return {"dy": dy, "x": x}, np.where(x > 0, dy, 0)


def test_registering_again_changes_nothing():
    options = onnxruntime.SessionOptions()
    for _ in range(3):
        register(options)
    feeds, expected = relu_case(3)
    sessions = [onnxruntime.InferenceSession(RELU, options, providers=["CPUExecutionProvider"]) for _ in range(2)]
    sessions.append(InferenceSession(RELU, options))
    for session in sessions:
        np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


def test_sessions_outlive_their_options():
    options = onnxruntime.SessionOptions()
    register(options)
    session = onnxruntime.InferenceSession(RELU, options, providers=["CPUExecutionProvider"])
    del options
    gc.collect()
    feeds, expected = relu_case(3)
    np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


def test_nodes_go_with_their_sessions():
    sessions = [InferenceSession(RELU) for _ in range(20)]
    living = len(node._nodes)
    sessions.clear()
    gc.collect()
    InferenceSession(RELU)
    assert len(node._nodes) <= living - 19


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_optimisation_levels(level):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    feeds, expected = relu_case(3)
    np.testing.assert_array_equal(run(RELU, feeds, sess_options=options)[0], expected)


def test_more_shapes_than_plans():
    session = InferenceSession(RELU)
    for _ in range(2):
        for size in range(node.MOST_PLANS + 20):
            feeds, expected = relu_case(size)
            np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


def test_sessions_in_parallel_threads():
    def use(size):
        feeds, expected = relu_case(size, 5)
        for _ in range(5):
            np.testing.assert_array_equal(InferenceSession(RELU).run(None, feeds)[0], expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(8)))


def test_parallel_executor_with_binding():
    """onnxruntime's threads ask Python for plans while the caller waits in C."""
    options = onnxruntime.SessionOptions()
    options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    session = InferenceSession(RELU, options)
    for size in range(1, 30):
        feeds, expected = relu_case(size)
        binding = session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("dx")
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], expected)


def test_outputs_that_are_bound_where_inputs_lie():
    """The whole of an input may become the result where the operator allows it; parts of one may not."""
    overload, r = find("SoftmaxGrad_13", "float32"), np.random.default_rng(0)
    memory, y = r.random(64, np.float32), r.random((4, 6), np.float32)
    dy = memory[:24].reshape(4, 6)
    session = InferenceSession(one_node(overload.onnx.name, *ports(overload, {"dy": dy, "y": y})))
    for start in (24, 0, 3, -3):
        memory[:] = r.random(64)
        lies = dy if start >= 0 else memory[3:27].reshape(4, 6)
        out = memory[max(start, 0) :][:24].reshape(4, 6)
        binding, expected = session.io_binding(), y * (lies - (y * lies).sum(-1, keepdims=True))
        for name, array in (("dy", lies), ("y", y)):
            binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        binding.bind_output("dx", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        if start in (0, 24):
            session.run_with_iobinding(binding)
            np.testing.assert_allclose(out, expected, atol=1e-6)
        else:
            with pytest.raises(
                Exception, match="an output lies where an input or another output lies, expected memory"
            ):
                session.run_with_iobinding(binding)


def test_scratch_memory_of_large_losses():
    overload = find("SoftmaxCrossEntropyLossInternal", "float32", "int64")
    r = np.random.default_rng(3)
    feeds = {"logits": r.normal(size=(20_000, 30)).astype("f4"), "labels": r.integers(0, 30, 20_000)}
    session = InferenceSession(one_node(overload.onnx.name, *ports(overload, feeds)))
    exact = overload.operator.reference(feeds["logits"].astype("f8"), feeds["labels"])
    for found, expected in zip(session.run(None, feeds), exact, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    feeds["labels"][19_999] = 30
    with pytest.raises(Exception, match=r"labels\[19999\] is 30, expected 0 to 29"):
        session.run(None, feeds)


def test_threads_of_onnxruntime_give_the_same_bits():
    overload = find("SoftmaxGrad_13", "float32")
    r = np.random.default_rng(1)
    feeds = {"dy": r.normal(size=(2000, 300)).astype("f4"), "y": r.normal(size=(2000, 300)).astype("f4")}
    results = []
    for threads in (1, 2, 5):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        results.append(run(one_node(overload.onnx.name, *ports(overload, feeds)), feeds, sess_options=options)[0])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


# --- real training graphs -------------------------------------------------------------------------


def test_a_model_without_the_domain_gets_a_remedy():
    """onnxruntime fuses Gemm and Relu into an operator of the domain that the model does not import."""
    text = "g (float[n, 4] x) => (float[n, 3] y) { h = Gemm (x, w) y = Relu (h) }"
    model = build(text, {"w": np.ones((4, 3), "f4")})
    with pytest.raises(Exception, match="not a registered function/op") as caught:
        InferenceSession(model.SerializeToString())
    assert "does not import the domain com.microsoft" in caught.value.__notes__[0]
