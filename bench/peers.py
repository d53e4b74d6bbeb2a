"""Who else computes what opgrad computes: for each peer, how to set each operator up.

A setup gets the case and the way in which to work, and returns the call to be timed: one that writes into the case's
results, or one that makes its own. A peer without a call that works this way raises NoSuchWay, one that lacks an
operator or a dtype has no call.
"""

import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import opgrad
from bench.case import Case, GraphCase
from bench.cells import SWEEP, check
from bench.measure import NEW, Call, NoSuchWay, only
from bench.torch_operators import TORCH, Setups, Torch, Traced, compiled, with_grad

AND_GRAD = "softmax_cross_entropy_loss_and_grad"
SIGMOIDS = 1.702  # QuickGelu's alpha
COMPILE = "torch.compile"
MODULES = {  # that each peer needs
    "torch": ["torch"], COMPILE: ["torch"], "onnxruntime": ["onnxruntime", "onnx"], "scipy": ["scipy"],
    "numpy": ["numpy"],
}  # fmt: skip
# Elements beyond which one call of NumPy's many passes takes over a tenth of a second; it is not measured there.
NUMPY_LIMIT = {"float32": 1 << 22, "float64": 1 << 21, "float16": 1 << 19, "bfloat16": 1 << 19}
LONGEST = {"scipy": 0.1, "numpy": 0.1}  # seconds of a call of these many passes, beyond which they are not measured
LONGEST_SWEPT = {**LONGEST, "onnxruntime": 0.25}  # which takes over a second along axis 1
LONGEST_NOTE = 160  # characters
LACKS_DTYPE = "not implemented"


def installed(modules: Mapping[str, Sequence[str]] = MODULES) -> list[str]:
    """The peers that this Python has. modules: what each of them needs."""
    return [peer for peer, needed in modules.items() if all(map(importlib.util.find_spec, needed))]


def chosen(names: Sequence[str], present: Sequence[str]) -> list[str]:
    """These peers, or all that are present. Raises ValueError for one that is unknown or not installed."""
    check("peer", names, present, "one installed of")
    return list(names or present)


def calls(case: Case, names: Sequence[str], way: str) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of those peers that compute this case in this way, and what keeps others from it."""
    longest = LONGEST_SWEPT if case.cell.workload.group == SWEEP else LONGEST
    return tried(names, lambda name: SETUPS[name](case, way), longest)


def tried(
    names: Iterable[str],
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
            if time.perf_counter() - start > longest.get(name, math.inf):
                notes[name] = f"takes over {longest[name]:g} seconds"
            else:
                found[name] = call
        except Exception as error:  # whatever a peer cannot do, the others are still worth measuring
            if said := reason(error):
                notes[name] = said
    return found, notes


def reason(error: Exception) -> str:
    """An error in one line; nothing for a dtype that a peer lacks, which goes without saying."""
    if isinstance(error, NotImplementedError | RuntimeError) and LACKS_DTYPE in str(error):
        return ""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = first if isinstance(error, NoSuchWay) else f"{type(error).__name__}: {first}"
    return text if len(text) <= LONGEST_NOTE else text[: LONGEST_NOTE - 1] + "…"


# --- torch ----------------------------------------------------------------------------------------------------------


def _torch(case: Case, way: str) -> Call | None:
    setup = TORCH.get(case.op.name)
    return setup(Torch(case, way)) if setup else None


def _compiled(case: Case, way: str) -> Call | None:
    """torch's call compiled; of the loss with its gradient by autograd the loss, whose gradient is compiled with it."""
    if case.op.name == AND_GRAD and way == NEW:
        return compiled_for([Torch(case, way)])[0]
    eager = _torch(case, way)
    return eager and compiled(eager)


def _quick_gelu_grad(t: Torch) -> Call:
    def backward() -> object:
        gate = t.torch.sigmoid(SIGMOIDS * t["x"])
        return t["dy"] * gate * (1 + SIGMOIDS * t["x"] * (1 - gate))

    return backward


# What users write where the compiler makes one kernel of it, while the eager peer is the nearest single kernel.
EXPRESSIONS: Setups = {
    **TORCH,
    "quick_gelu": lambda t: lambda: t["x"] * t.torch.sigmoid(SIGMOIDS * t["x"]),
    "quick_gelu_grad": _quick_gelu_grad,
}


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


# --- onnxruntime ----------------------------------------------------------------------------------------------------

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
    """A session with this one operator; None if there is no kernel for it or for the dtype."""
    if case.op.name not in ONNX:
        return None
    runtime, helper = importlib.import_module("onnxruntime"), importlib.import_module("onnx").helper
    name, inputs, passed = ONNX[case.op.name]
    types = {key: int(helper.np_dtype_to_tensor_dtype(array.dtype)) for key, array in case.arrays.items()}
    infos = {key: helper.make_tensor_value_info(key, types[key], each.shape) for key, each in case.arrays.items()}
    attributes = {key: case.values.get(key, case.op.attributes[key]) for key in passed}
    domain, _, kind = name.rpartition(".")
    node = helper.make_node(kind, inputs, list(case.results), domain=domain, **attributes)
    graph = helper.make_graph([node], kind, [infos[key] for key in inputs], [infos[key] for key in case.results])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = opgrad.get_num_threads()
    options.log_severity_level = 4
    try:
        session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if type(error).__name__ in ("NotImplemented", "InvalidGraph"):
            return None
        raise
    if way == NEW:
        from_numpy, typed = runtime.OrtValue.ortvalue_from_numpy, runtime.OrtValue.ortvalue_from_numpy_with_onnx_type
        values = {  # bfloat16 by its bits
            key: from_numpy(each) if each.dtype.isbuiltin == 1 else typed(each.view(np.uint16), types[key])
            for key, each in ((key, case.arrays[key]) for key in inputs)
        }
        return partial(session.run_with_ort_values, list(case.results), values)
    binding = session.io_binding()
    for key, array in case.arrays.items():
        bind = binding.bind_output if key in case.results else binding.bind_input
        bind(key, "cpu", 0, types[key], array.shape, array.ctypes.data)
    return partial(session.run_with_iobinding, binding)


# --- SciPy and NumPy ------------------------------------------------------------------------------------------------

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
    return max(math.prod(array.shape) for array in case.arrays.values()) > NUMPY_LIMIT[case.dtype]


SETUPS: Mapping[str, Callable[[Case, str], Call | None]] = {
    "torch": _torch,
    COMPILE: _compiled,
    "onnxruntime": _onnxruntime,
    "scipy": _scipy,
    "numpy": _numpy,
}
