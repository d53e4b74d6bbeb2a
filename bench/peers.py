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
from bench.case import Case, GraphCase
from bench.cells import SWEEP
from bench.measure import NEW, Call, NoSuchWay, only
from bench.torch_operators import ARRAYS, LAYERS, Setups, Torch, Traced, compiled, direct

AND_GRAD = "softmax_cross_entropy_loss_and_grad"
MEAN, IGNORE_INDEX = 1, -100  # how aten's losses reduce, and the label that they leave out
SIGMOIDS = 1.702  # QuickGelu's alpha


def _loss(t: Torch) -> Call:
    log_softmax = t.into("log_softmax", "logits", 1, out="log_prob")
    nll_loss, labels = t.torch.nn.functional.nll_loss, t["labels"]

    def loss() -> object:
        log_prob = log_softmax()
        return nll_loss(log_prob, labels), log_prob

    return loss


def _loss_only(t: Torch) -> Call:
    """One number, for which no memory need be given.

    These tensors need no gradient, so nothing is kept for one; entering no_grad at each call would cost 4 µs.
    """
    return partial(t.torch.nn.functional.cross_entropy, t["logits"], t["labels"])


def _loss_grad(t: Torch) -> Call:
    return partial(_backward(t, t["dy"], t["log_prob"]), t["log_prob"])


def _backward(t: Torch, dy: Any, like: Any) -> Callable[[Any], Any]:
    """What computes the gradient of the mean loss from log_prob. like: has the shape and dtype of logits."""
    labels, total = t["labels"], like.new_full((), float(t["labels"].numel()))
    name = "aten.nll_loss_backward" if like.ndim == 2 else "aten.nll_loss2d_backward"
    nll = t.into(f"{name}.grad_input", grad_input=t.like("dlogits"))
    log_softmax = t.into("aten._log_softmax_backward_data.out", out="dlogits")

    def backward(log_prob: Any) -> Any:
        gradient = nll(dy, log_prob, labels, None, MEAN, IGNORE_INDEX, total)
        return log_softmax(gradient, log_prob, 1, log_prob.dtype)

    return backward


def _loss_and_grad(t: Torch) -> Call:
    """By autograd, which makes new memory; into memory that is given, by the steps that autograd takes."""
    functional, logits, labels = t.torch.nn.functional, t["logits"], t["labels"]
    if not t.is_given:
        return with_grad(functional.cross_entropy, t)
    kept, backward = t.like("logits"), _backward(t, logits.new_ones(()), logits)

    def loss_and_grad() -> object:
        log_prob = t.torch.log_softmax(logits, 1, out=kept)
        return functional.nll_loss(log_prob, labels), backward(log_prob)

    return loss_and_grad


def with_grad(loss: Callable[[Any, Any], Any], t: Torch) -> Call:
    """A loss and its gradient by autograd."""
    logits, labels, grad = t["logits"].requires_grad_(), t["labels"], t.torch.autograd.grad

    def loss_and_grad() -> object:
        value = loss(logits, labels)
        return value, grad(value, logits)[0]

    return loss_and_grad


def _relu(t: Torch) -> Call:
    return t.into("clamp_min", "x", 0, out="y") if t.is_given else t.into("relu", "x")


def _gather_grad(t: Torch) -> Call:
    """The backward of embedding, or additions into zeros, whichever is faster; only these can be told where."""
    dy, indices, dx = t["dy"], t["indices"], t["dx"]
    if t.is_given:
        return lambda: dx.zero_().index_add_(0, indices, dy)
    embedding = t.into("aten.embedding_dense_backward", dy, indices, len(dx), -1, False)
    if dy.is_cuda:
        return embedding
    return t.fastest(embedding, lambda: t.torch.zeros_like(dx).index_add_(0, indices, dy))


TORCH: Setups = {
    "softmax": direct("softmax", "x", "axis", out="y"),
    "log_softmax": direct("log_softmax", "x", "axis", out="y"),
    "softmax_grad": direct("aten._softmax_backward_data.out", "dy", "y", "axis", "y.dtype", grad_input="dx"),
    "log_softmax_grad": direct("aten._log_softmax_backward_data.out", "dy", "y", "axis", "y.dtype", out="dx"),
    "softmax_cross_entropy_loss": _loss,
    "softmax_cross_entropy_loss_only": _loss_only,
    "softmax_cross_entropy_loss_grad": _loss_grad,
    AND_GRAD: _loss_and_grad,
    "relu": _relu,
    "sigmoid": direct("sigmoid", "x", out="y"),
    "tanh": direct("tanh", "x", out="y"),
    "quick_gelu": direct("aten.silu.out", "x", out="y"),
    "leaky_relu": direct("aten.leaky_relu.out", "x", 0.01, out="y"),
    "relu_grad": direct("aten.threshold_backward.grad_input", "dy", "x", 0, grad_input="dx"),
    "sigmoid_grad": direct("aten.sigmoid_backward.grad_input", "dy", "y", grad_input="dx"),
    "tanh_grad": direct("aten.tanh_backward.grad_input", "dy", "y", grad_input="dx"),
    "quick_gelu_grad": direct("aten.silu_backward.grad_input", "dy", "x", grad_input="dx"),
    "leaky_relu_grad": direct("aten.leaky_relu_backward.grad_input", "dy", "y", 0.01, True, grad_input="dx"),
    "gather": direct("index_select", "x", "axis", "indices", out="y"),
    "gather_grad": _gather_grad,
    "in_place_accumulator": direct("add", "buffer", "value", out="sum"),
    "scale": direct("mul", "x", "factor", out="y"),
}


def call(case: Case, way: str) -> Call | None:
    """The call of torch, if it has the operator and can take the arguments. Raises NoSuchWay."""
    setup = ({**LAYERS, **ARRAYS} if isinstance(case, GraphCase) else TORCH).get(case.op.name)
    return setup(Torch(case, way)) if setup else None


def compiled_call(case: Case, way: str) -> Call | None:
    """torch's call compiled; of the loss with its gradient by autograd the loss, whose gradient is compiled with it."""
    if case.op.name == AND_GRAD and way == NEW:
        return compiled_for([Torch(case, way)])[0]
    eager = call(case, way)
    return eager and compiled(eager)


# --- one compiled function for several arrays -----------------------------------------------------------------------


def _quick_gelu(t: Torch) -> Call:
    return lambda: t["x"] * t.torch.sigmoid(SIGMOIDS * t["x"])


def _quick_gelu_grad(t: Torch) -> Call:
    def backward() -> object:
        gate = t.torch.sigmoid(SIGMOIDS * t["x"])
        return t["dy"] * gate * (1 + SIGMOIDS * t["x"] * (1 - gate))

    return backward


# What users write where the compiler makes one kernel of it, while the eager peer is the nearest single kernel.
EXPRESSIONS: Setups = {**TORCH, "quick_gelu": _quick_gelu, "quick_gelu_grad": _quick_gelu_grad}


def compiled_for(every: Sequence[Torch]) -> list[Call]:
    """The calls of one operator on several arrays of one shape by one compiled function, with results in new memory."""
    first, setup = every[0], EXPRESSIONS[every[0].case.op.name]
    if first.case.op.name == AND_GRAD:
        loss = compiled(first.torch.nn.functional.cross_entropy)
        return [with_grad(loss, t) for t in every]
    names = [name for name in first.case.op.arrays if name in first.values]

    def run(*arrays: Any) -> object:
        made = setup(Traced(first, dict(zip(names, arrays, strict=True))))
        return made and made()

    made = compiled(run)
    return [partial(made, *(t[name] for name in names)) for t in every]


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
        from_numpy, typed = runtime.OrtValue.ortvalue_from_numpy, runtime.OrtValue.ortvalue_from_numpy_with_onnx_type
        values = {  # bfloat16 by its bits
            name: from_numpy(each) if each.dtype.isbuiltin == 1 else typed(each.view(np.uint16), types[name])
            for name, each in inputs.items()
        }
        return partial(session.run_with_ort_values, list(case.results), values)
    binding = session.io_binding()
    for name, array in case.arrays.items():
        bind = binding.bind_output if name in case.results else binding.bind_input
        bind(name, "cpu", 0, types[name], array.shape, array.ctypes.data)
    return partial(session.run_with_iobinding, binding)


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
    "torch": call,
    COMPILE: compiled_call,
    "onnxruntime": _onnxruntime,
    "scipy": _scipy,
    "numpy": _numpy,
}
