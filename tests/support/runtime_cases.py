"""Operators that NumPy's evaluator of ONNX lacks: their gradients in stock onnxruntime, against PyTorch.

A case has a formula in PyTorch, written after the operator's documentation. In float64 it gives the results that the
operator's own kernel has to give, and by autograd the gradients.
"""

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import torch
from gradient_case import MICROSOFT, alone
from onnx import helper

from opgrad.gradients import gradients
from opgrad.onnxruntime import lower

NARROW = {np.dtype("float16"): 2.0**-10, np.dtype("float32"): 2.0**-22, np.dtype(ml_dtypes.bfloat16): 2.0**-7}


@dataclass(frozen=True)
class RuntimeCase:
    """An operator on arrays, and what it computes.

    arrays: the inputs, None for one that is left out. formula: of tensors in the same order, gives all results that
    are compared, None for one that is not. wanted: the places of the inputs to differentiate with respect to.
    terms: how many terms the longest sum has, by which the tolerance grows. runs: whether onnxruntime has a kernel.
    constants: the places of inputs that are constants of the model.
    """

    op: str
    arrays: list
    formula: object
    wanted: tuple = (0,)
    attributes: dict = field(default_factory=dict)
    domain: str = MICROSOFT
    opset: int = 21
    outputs: int = 1
    terms: int = 16
    runs: bool = True
    constants: tuple = ()

    @property
    def feeds(self):
        """The inputs by name, but for constants."""
        return {
            f"x{place}": array
            for place, array in enumerate(self.arrays)
            if array is not None and place not in self.constants
        }

    def model(self):
        """The operator alone."""
        constants = [onnx.numpy_helper.from_array(self.arrays[place], f"x{place}") for place in self.constants]
        return alone(self, self.outputs, {"": self.opset, MICROSOFT: 1, "ai.onnx.ml": 3}, constants, 10)


def added_to(cases, terms=16):
    """A function that adds a case to these."""

    def add(name, arrays, formula, wanted=None, form="", **options):
        """A case; by default all floats are differentiated."""
        floats = [place for place, array in enumerate(arrays) if array is not None and array.dtype.kind not in "iub"]
        attributes = {key: options.pop(key) for key in list(options) if key not in RuntimeCase.__dataclass_fields__}
        given = {"terms": terms, **options}
        case = RuntimeCase(name, arrays, formula, tuple(floats if wanted is None else wanted), attributes, **given)
        cases[f"{name}{', ' * bool(form)}{form}"] = case

    return add


def session_of(model):
    """A session of stock onnxruntime that says nothing of the model."""
    return onnxruntime.InferenceSession(model.SerializeToString(), exact_options(), ["CPUExecutionProvider"])


def exact_options():
    """Options of a silent session whose products of bytes are exact on processors without VNNI, too."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def tensors_of(case):
    """The inputs as tensors; floats in float64, those to differentiate with respect to with gradients."""
    tensors = []
    for place, array in enumerate(case.arrays):
        if array is None or array.dtype.kind not in "iub":
            array = None if array is None else np.asarray(array, np.float64)
        elif array.dtype.name in ("uint4", "int4", "uint2", "int2"):
            array = array.astype(np.int64)
        tensor = None if array is None else torch.tensor(array)
        if place in case.wanted:
            tensor.requires_grad_(True)
        tensors.append(tensor)
    return tensors


def check(case):
    """Compare an operator's results and gradients in onnxruntime with those of its formula."""
    tensors = tensors_of(case)
    expected = case.formula(*tensors)
    expected = list(expected) if isinstance(expected, (list, tuple)) else [expected]
    kind = next(array.dtype for array in case.arrays if array is not None and array.dtype in NARROW)
    tolerance = NARROW[kind] * case.terms
    if case.runs:
        for mine, other in zip(session_of(case.model()).run(None, case.feeds), expected, strict=False):
            if other is not None:
                close(mine, other.detach().numpy(), tolerance)
    model, factors = weighted(case, kind, expected)
    wanted = [f"x{place}" for place in case.wanted]
    names = ["loss", *(f"{name}_grad" for name in wanted)]
    loss, *found = session_of(lower(gradients(model, "loss", wanted))).run(names, case.feeds)
    total = sum((expected[place] * torch.tensor(factor)).sum() for place, factor in factors.items())
    close(loss, total.detach().numpy(), tolerance * 16, "loss")
    total.backward()
    for place, gradient in zip(case.wanted, found, strict=True):
        close(gradient, tensors[place].grad.numpy(), tolerance, f"gradient of input {place}")


def weighted(case, kind, expected):
    """The model with the sum of its results, each times random numbers, as its only output; the numbers by place."""
    random, model, factors, terms = np.random.default_rng(5), case.model(), {}, []
    for place, result in enumerate(expected):
        if result is None:
            continue
        factor = random.normal(size=tuple(result.shape)).astype(kind)
        factors[place] = factor.astype(np.float64)
        model.graph.initializer.append(onnx.numpy_helper.from_array(factor, f"f{place}"))
        model.graph.node.append(helper.make_node("Mul", [f"y{place}", f"f{place}"], [f"w{place}"]))
        model.graph.node.append(helper.make_node("ReduceSum", [f"w{place}"], [f"t{place}"], keepdims=0))
        terms.append(f"t{place}")
    model.graph.node.append(helper.make_node("Sum", terms, ["loss"]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("loss", helper.np_dtype_to_tensor_dtype(kind), []))
    return model, factors


def close(mine, other, tolerance, what="result"):
    """Compare with the largest element, which a sum of this size is rounded to."""
    assert mine.shape == other.shape, (what, mine.shape, other.shape)
    scale = max(np.abs(other).max(initial=0), 1e-3)
    worst = np.abs(mine.astype(np.float64) - other).max(initial=0)
    assert worst <= tolerance * scale, f"{what}: off by {worst / scale:.2e}, at most {tolerance:.2e}"


def check_in_bfloat16(case):
    """Compare the gradients of an operator whose floats are bfloat16, rounded from float32 inputs, with its formula.

    case: in float16, in which inputs of float32 stay what they are. Each gradient is rounded once.
    """
    narrow = {f"x{place}" for place, each in enumerate(case.arrays) if each is not None and each.dtype == np.float16}
    rounded = [each if each is None or each.dtype != np.float16 else halved(each) for each in case.arrays]
    wide = replace(case, arrays=rounded)
    tensors = tensors_of(wide)
    expected = case.formula(*tensors)
    expected = list(expected) if isinstance(expected, (list, tuple)) else [expected]
    model, factors = weighted(wide, np.dtype(np.float32), expected)
    (node,) = [each for each in model.graph.node if each.op_type == case.op]
    casts = [helper.make_node("Cast", [name], [f"{name}_narrow"], to=onnx.TensorProto.BFLOAT16) for name in narrow]
    back = [helper.make_node("Cast", [f"{name}_narrow"], [name], to=onnx.TensorProto.FLOAT) for name in node.output]
    node.input[:] = [f"{name}_narrow" if name in narrow else name for name in node.input]
    node.output[:] = [f"{name}_narrow" for name in node.output]
    nodes = [copied(each) for each in (*casts, node, *back, *(each for each in model.graph.node if each is not node))]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    wanted = [f"x{place}" for place in case.wanted]
    found = session_of(lower(gradients(model, "loss", wanted))).run([f"{name}_grad" for name in wanted], wide.feeds)
    sum((expected[place] * torch.tensor(factor)).sum() for place, factor in factors.items()).backward()
    for place, gradient in zip(case.wanted, found, strict=True):
        close(gradient, tensors[place].grad.numpy(), 2.0**-7, f"gradient of input {place}")


def halved(array):
    """The same numbers as bfloat16 has, in float32."""
    return array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def copied(node):
    """A copy of a node."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy
