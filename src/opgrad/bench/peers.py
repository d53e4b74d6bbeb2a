"""Who else computes what opgrad computes: for each peer, how to set each operator up.

A setup gets the peer's module and the case and returns the call to be timed. All of them write into the
case's results where the peer has a form that does. A peer that lacks a dtype has no call.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import opgrad
from opgrad.bench import composed, graph_peers
from opgrad.bench.case import Case
from opgrad.bench.form_case import FormCase
from opgrad.bench.graph_case import GraphCase
from opgrad.contract import FLOAT8, Array

Call = Callable[[], object]

ML_DTYPES = ("bfloat16", *FLOAT8)  # those that NumPy and torch know from each other by their bits alone
PEERS = ("torch", "onnxruntime", "scipy", "numpy")
# Elements beyond which one call of NumPy's many passes takes over half a second; it is not measured there.
NUMPY_LIMIT = {"float32": 1 << 24, "float64": 1 << 23, "float16": 1 << 21, "bfloat16": 1 << 21}


def installed() -> list[str]:
    """The peers that this Python has."""
    needs = {"onnxruntime": ("onnxruntime", "onnx")}
    return [peer for peer in PEERS if all(importlib.util.find_spec(name) for name in needs.get(peer, (peer,)))]


def chosen(names: Sequence[str], present: Sequence[str]) -> list[str]:
    """These peers, or all that are present. Raises ValueError for one that is unknown or not installed."""
    for name in names:
        if name not in present:
            raise ValueError(f"bench: peer is {name!r}, expected one installed of {', '.join(present)}")
    return list(names or present)


def calls(case: Case | GraphCase, peers: Sequence[str]) -> dict[str, Call]:
    """The calls of those peers that compute this case; a plan is compared with nothing but our own calls."""
    if isinstance(case, GraphCase):
        return graph_peers.calls(case, peers)
    if isinstance(case, FormCase) and (ours := case.beside()):
        return ours
    found = {}
    for peer in peers:
        call = SETUPS[peer](case)
        if call is not None:
            found[peer] = call
    return found


# --- torch ----------------------------------------------------------------------------------------------------


class Torch:
    """The case's arrays as tensors in the same memory, by name."""

    def __init__(self, case: Case):
        self.torch = importlib.import_module("torch")
        self.torch.set_num_threads(opgrad.get_num_threads())
        self.aten = self.torch.ops.aten
        self.case = case
        self.tensors = {name: self._tensor(array) for name, array in case.arrays.items()}

    def _tensor(self, array: Any) -> Any:
        if isinstance(array, self.torch.Tensor):
            return array.detach()  # a tensor of its own, of which a peer may ask for a gradient
        if array.dtype.name in ML_DTYPES:
            bits = array.view(np.int16 if array.itemsize > 1 else np.int8)
            return self.torch.from_numpy(bits).view(getattr(self.torch, array.dtype.name))
        return self.torch.from_numpy(array)

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]


def _loss(t: Torch) -> Call:
    log_softmax, nll_loss = t.torch.log_softmax, t.torch.nn.functional.nll_loss
    logits, log_prob, labels = t["logits"], t["log_prob"], t["labels"]
    return lambda: nll_loss(log_softmax(logits, 1, out=log_prob), labels)


def _loss_only(t: Torch) -> Call:
    """These tensors need no gradient, so nothing is kept for one; entering no_grad at each call would cost 4 µs."""
    return partial(t.torch.nn.functional.cross_entropy, t["logits"], t["labels"])


def _loss_grad(t: Torch) -> Call:
    log_prob, labels = t["log_prob"], t["labels"]
    middle, total = t.torch.empty_like(log_prob), log_prob.new_tensor(float(labels.numel()))
    nll = t.aten.nll_loss_backward if log_prob.ndim == 2 else t.aten.nll_loss2d_backward
    mean, ignore_index = 1, -100
    given = (t["dy"], log_prob, labels, None, mean, ignore_index, total)
    log_softmax = t.aten._log_softmax_backward_data.out

    def backward() -> object:
        nll.grad_input(*given, grad_input=middle)
        return log_softmax(middle, log_prob, 1, log_prob.dtype, out=t["dlogits"])

    return backward


def _loss_and_grad(t: Torch) -> Call:
    logits, labels = t["logits"].requires_grad_(), t["labels"]
    cross_entropy, grad = t.torch.nn.functional.cross_entropy, t.torch.autograd.grad
    return lambda: grad(cross_entropy(logits, labels), logits)


def _softmax_grad(name: str, result: str) -> Callable[[Torch], Call]:
    def setup(t: Torch) -> Call:
        backward = getattr(t.aten, name).out
        return partial(backward, t["dy"], t["y"], t.case.axis, t["y"].dtype, **{result: t["dx"]})

    return setup


def _elementwise(name: str, kept: str, *extra: Any) -> Callable[[Torch], Call]:
    """A gradient of aten from dy and what the forward operator kept."""

    def setup(t: Torch) -> Call:
        return partial(getattr(t.aten, name).grad_input, t["dy"], t[kept], *extra, grad_input=t["dx"])

    return setup


TORCH: Mapping[str, Callable[[Torch], Call]] = {
    "softmax": lambda t: partial(t.torch.softmax, t["x"], t.case.axis, out=t["y"]),
    "log_softmax": lambda t: partial(t.torch.log_softmax, t["x"], t.case.axis, out=t["y"]),
    "softmax_grad": _softmax_grad("_softmax_backward_data", "grad_input"),
    "log_softmax_grad": _softmax_grad("_log_softmax_backward_data", "out"),
    "softmax_cross_entropy_loss": _loss,
    "softmax_cross_entropy_loss_only": _loss_only,
    "softmax_cross_entropy_loss_grad": _loss_grad,
    "softmax_cross_entropy_loss_and_grad": _loss_and_grad,
    "relu": lambda t: partial(t.torch.clamp_min, t["x"], 0, out=t["y"]),
    "sigmoid": lambda t: partial(t.torch.sigmoid, t["x"], out=t["y"]),
    "tanh": lambda t: partial(t.torch.tanh, t["x"], out=t["y"]),
    "quick_gelu": lambda t: partial(t.aten.silu.out, t["x"], out=t["y"]),
    "leaky_relu": lambda t: partial(t.aten.leaky_relu.out, t["x"], 0.01, out=t["y"]),
    "relu_grad": _elementwise("threshold_backward", "x", 0),
    "sigmoid_grad": _elementwise("sigmoid_backward", "y"),
    "tanh_grad": _elementwise("tanh_backward", "y"),
    "quick_gelu_grad": _elementwise("silu_backward", "x"),
    "leaky_relu_grad": _elementwise("leaky_relu_backward", "y", 0.01, True),
    "gather": lambda t: partial(t.torch.index_select, t["x"], t.case.axis, t["indices"], out=t["y"]),
    "gather_grad": lambda t: partial(
        t.aten.embedding_dense_backward, t["dy"], t["indices"], t.case.shape[0], -1, False
    ),
    "in_place_accumulator": lambda t: partial(t.torch.add, t["buffer"], t["value"], out=t["sum"]),
    "scale": lambda t: partial(t.torch.mul, t["x"], t["factor"], out=t["y"]),
}


def _torch(case: Case) -> Call | None:
    if isinstance(case, FormCase):
        tensors = Torch(case)
        return composed.call(tensors.torch, case, tensors.tensors)
    setup = TORCH.get(case.op.name)
    return setup(Torch(case)) if setup else None


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


def _onnxruntime(case: Case) -> Call | None:
    if case.op.name not in ONNX or isinstance(case, FormCase):
        return None
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = opgrad.get_num_threads()
    options.log_severity_level = 4
    try:
        session = runtime.InferenceSession(_model(case), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if type(error).__name__ in ("NotImplemented", "InvalidGraph"):  # no kernel for this dtype
            return None
        raise
    binding = session.io_binding()
    for name, array in case.arrays.items():
        bind = binding.bind_output if name in case.results else binding.bind_input
        bind(name, "cpu", 0, _onnx_type(array), array.shape, array.ctypes.data)
    return partial(session.run_with_iobinding, binding)


def _onnx_type(array: Array) -> int:
    return int(importlib.import_module("onnx").helper.np_dtype_to_tensor_dtype(array.dtype))


def _model(case: Case) -> bytes:
    """An ONNX model with this one operator."""
    helper = importlib.import_module("onnx").helper
    name, inputs, passed = ONNX[case.op.name]
    attributes = {key: case.values.get(key, case.op.attributes[key]) for key in passed}
    domain, _, kind = name.rpartition(".")
    node = helper.make_node(kind, inputs, list(case.results), domain=domain, **attributes)
    infos = {
        key: helper.make_tensor_value_info(key, _onnx_type(array), array.shape) for key, array in case.arrays.items()
    }
    graph = helper.make_graph([node], kind, [infos[key] for key in inputs], [infos[key] for key in case.results])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


# --- SciPy and NumPy ----------------------------------------------------------------------------------------

SCIPY: Mapping[str, Callable[[Any, Case], Call]] = {
    "softmax": lambda special, case: partial(special.softmax, case.values["x"], axis=case.axis),
    "log_softmax": lambda special, case: partial(special.log_softmax, case.values["x"], axis=case.axis),
    "sigmoid": lambda special, case: partial(special.expit, case.values["x"], out=case.results["y"]),
}


def _scipy(case: Case) -> Call | None:
    setup = SCIPY.get(case.op.name)
    if setup is None or isinstance(case, FormCase) or case.dtype not in ("float32", "float64") or _too_large(case):
        return None
    return setup(importlib.import_module("scipy.special"), case)


def _numpy(case: Case) -> Call | None:
    """The reference as it stands, in the array's own dtype; of the forms of softmax those in one float dtype."""
    if isinstance(case, FormCase) and ("out_dtype" in case.values or "dropout" in case.values):
        return None
    return None if _too_large(case) else partial(case.op.reference, **case.values)


def _too_large(case: Case) -> bool:
    largest = max(math.prod(array.shape) for array in case.arrays.values())
    return largest > NUMPY_LIMIT[case.dtype]


SETUPS: Mapping[str, Callable[[Case], Call | None]] = {
    "torch": _torch,
    "onnxruntime": _onnxruntime,
    "scipy": _scipy,
    "numpy": _numpy,
}
