"""Who else computes what opgrad computes: for each peer, how to set each operator up.

A setup gets the peer's module, the case and the way in which to work, and returns the call to be timed: one that writes
into the case's results, or one that makes its own. A peer without a call that works this way raises NoSuchWay, one that
lacks an operator or a dtype has no call.
"""

import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import opgrad
from bench import torch_peers
from bench.case import Case, GraphCase
from bench.cells import SWEEP
from bench.measure import NEW, Call, NoSuchWay, only
from opgrad.contract import Array

COMPILE = "torch.compile"
PEERS = ("torch", COMPILE, "onnxruntime", "scipy", "numpy")
# Elements beyond which one call of NumPy's many passes takes over a tenth of a second; it is not measured there.
NUMPY_LIMIT = {"float32": 1 << 22, "float64": 1 << 21, "float16": 1 << 19, "bfloat16": 1 << 19}
LONGEST = {"scipy": 0.1, "numpy": 0.1}  # seconds of a call of these many passes, beyond which they are not measured
LONGEST_SWEPT = {**LONGEST, "onnxruntime": 0.25}  # which takes over a second along axis 1
LONGEST_NOTE = 160  # characters
LACKS_DTYPE = "not implemented"


def installed() -> list[str]:
    """The peers that this Python has."""
    needs = {"onnxruntime": ("onnxruntime", "onnx"), COMPILE: ("torch",)}
    return [peer for peer in PEERS if all(importlib.util.find_spec(name) for name in needs.get(peer, (peer,)))]


def chosen(names: Sequence[str], present: Sequence[str]) -> list[str]:
    """These peers, or all that are present. Raises ValueError for one that is unknown or not installed."""
    for name in names:
        if name not in present:
            raise ValueError(f"bench: peer is {name!r}, expected one installed of {', '.join(present)}")
    return list(names or present)


def calls(case: Case, names: Sequence[str], way: str) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of those peers that compute this case in this way, and what keeps others from it."""
    longest = LONGEST_SWEPT if case.cell.workload.group == SWEEP else LONGEST
    return tried(names, lambda name: SETUPS[name](case, way), longest)


def tried(
    names: Sequence[str],
    setup: Callable[[str], Call | None],
    longest: Mapping[str, float],
    wait: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls that are set up under these names and work, and for others what keeps them from it.

    setup: gives a call, or None where there is none. longest: seconds of a call beyond which it is not measured.
    wait: waits for the device, where an error may come to light.
    """
    found: dict[str, Call] = {}
    notes: dict[str, str] = {}
    for name in names:
        try:
            call = setup(name)
            if call is None:
                continue
            start = time.perf_counter()
            call()
            wait()
            seconds = time.perf_counter() - start
        except Exception as error:  # whatever a peer cannot do, the others are still worth measuring
            if said := reason(error):
                notes[name] = said
        else:
            if seconds > longest.get(name, math.inf):
                notes[name] = f"takes over {longest[name]:g} seconds"
            else:
                found[name] = call
    return found, notes


def reason(error: Exception) -> str:
    """An error in one line; nothing for a dtype that a peer lacks, which goes without saying."""
    if isinstance(error, NotImplementedError | RuntimeError) and LACKS_DTYPE in str(error):
        return ""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = first if isinstance(error, NoSuchWay) else f"{type(error).__name__}: {first}"
    return text if len(text) <= LONGEST_NOTE else text[: LONGEST_NOTE - 1] + "…"


# --- onnxruntime --------------------------------------------------------------------------------------------

# operator -> ONNX operator, its inputs, the attributes to be passed on
ONNX: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "softmax": ("Softmax", ("x",), ("axis",)),
    "log_softmax": ("LogSoftmax", ("x",), ("axis",)),
    "softmax_cross_entropy_loss": ("SoftmaxCrossEntropyLoss", ("logits", "labels"), ()),
    "softmax_cross_entropy_loss_only": ("SoftmaxCrossEntropyLoss", ("logits", "labels"), ()),
    "relu": ("Relu", ("x",), ()),
    "sigmoid": ("Sigmoid", ("x",), ()),
    "tanh": ("Tanh", ("x",), ()),
    "quick_gelu": ("com.microsoft.QuickGelu", ("x",), ("alpha",)),
    "leaky_relu": ("LeakyRelu", ("x",), ("alpha",)),
    "gather": ("Gather", ("x", "indices"), ("axis",)),
}


def _onnxruntime(case: Case, way: str) -> Call | None:
    if case.op.name not in ONNX:
        return None
    runtime = importlib.import_module("onnxruntime")
    type_of = importlib.import_module("onnx").helper.np_dtype_to_tensor_dtype
    types = {name: int(type_of(array.dtype)) for name, array in case.arrays.items()}
    session = _session(runtime, case, types)
    if session is None:
        return None
    if way == NEW:
        inputs = {name: case.arrays[name] for name in ONNX[case.op.name][1]}
        values = {name: _ort_value(runtime, array, types[name]) for name, array in inputs.items()}
        return partial(session.run_with_ort_values, list(case.results), values)
    binding = session.io_binding()
    for name, array in case.arrays.items():
        bind = binding.bind_output if name in case.results else binding.bind_input
        bind(name, "cpu", 0, types[name], array.shape, array.ctypes.data)
    return partial(session.run_with_iobinding, binding)


def _ort_value(runtime: Any, array: Array, kind: int) -> Any:
    """An array as onnxruntime takes it, bfloat16 by its bits."""
    if array.dtype.isbuiltin == 1:
        return runtime.OrtValue.ortvalue_from_numpy(array)
    return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), kind)


def _model(case: Case, types: Mapping[str, int]) -> bytes:
    """An ONNX model with this one operator."""
    helper = importlib.import_module("onnx").helper
    name, inputs, passed = ONNX[case.op.name]
    attributes = {key: case.values.get(key, case.op.attributes[key]) for key in passed}
    domain, _, kind = name.rpartition(".")
    node = helper.make_node(kind, inputs, list(case.results), domain=domain, **attributes)
    infos = {key: helper.make_tensor_value_info(key, types[key], each.shape) for key, each in case.arrays.items()}
    graph = helper.make_graph([node], kind, [infos[key] for key in inputs], [infos[key] for key in case.results])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def _session(runtime: Any, case: Case, types: Mapping[str, int]) -> Any:
    """A session with this one operator; None if there is no kernel for the dtype."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = opgrad.get_num_threads()
    options.log_severity_level = 4
    try:
        return runtime.InferenceSession(_model(case, types), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if type(error).__name__ in ("NotImplemented", "InvalidGraph"):
            return None
        raise


# --- SciPy and NumPy ----------------------------------------------------------------------------------------

SCIPY = {"softmax": "softmax", "log_softmax": "log_softmax", "sigmoid": "expit"}  # of scipy.special


def _scipy(case: Case, way: str) -> Call | None:
    name = SCIPY.get(case.op.name)
    if name is None or case.dtype not in ("float32", "float64") or _too_large(case):
        return None
    function, x = getattr(importlib.import_module("scipy.special"), name), case.values["x"]
    if case.op.kind != "rows":
        return partial(function, x, **case.out(way))
    only(NEW, way)
    return partial(function, x, axis=case.axis)


def _numpy(case: Case, way: str) -> Call | None:
    """The reference as it stands, in the array's own dtype."""
    if isinstance(case, GraphCase) or _too_large(case):
        return None
    only(NEW, way)
    return partial(case.op.reference, **case.values)


def _too_large(case: Case) -> bool:
    largest = max(math.prod(array.shape) for array in case.arrays.values())
    return largest > NUMPY_LIMIT[case.dtype]


SETUPS: Mapping[str, Callable[[Case, str], Call | None]] = {
    "torch": torch_peers.call,
    COMPILE: torch_peers.compiled_call,
    "onnxruntime": _onnxruntime,
    "scipy": _scipy,
    "numpy": _numpy,
}
