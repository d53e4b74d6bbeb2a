"""torch.onnx.export of every operator: as the ONNX operator of its name, or as the original of the training graphs.

It works by itself: during an export, and while a module is traced, which may be exported later, a call goes to
`on_export`. Programs that torch.export or torch.jit.trace made elsewhere need one line: `decompositions`, or the import
of this module.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.onnx

from opgrad.call.libraries import torch_private
from opgrad.contract import Operator
from opgrad.torch.schema import REGISTERED, Registered, is_recording

Value = Any  # a tensor in the first graph, a value of TorchScript in the second
Shape = Sequence[Any]
Results = Sequence[tuple[torch.dtype, Shape]]

EXPORTER: Any = torch.onnx  # typed as Any, because some public names are missing in the module's `__all__`
SCALAR_TYPES = EXPORTER.JitScalarType


# --- the graphs that two exporters of PyTorch build -------------------------------------------------------------------
#
# That of exported programs (dynamo=True) records `torch.onnx.ops.symbolic` while a model is captured, that of traced
# modules (dynamo=False) calls symbolic functions when the trace is there already.


class ExportGraph:
    """The graph of an exported program: nodes of ONNX stand between the operators of PyTorch."""

    def nodes(self, name: str, inputs: Sequence[Value | None], results: Results, **attributes: Any) -> Sequence[Value]:
        """Add a node, of the default domain or as "domain::name"; its results have these dtypes and shapes."""
        dtypes, shapes = zip(*results, strict=True)
        values = torch.onnx.ops.symbolic_multi_out(name, inputs, attributes, dtypes=dtypes, shapes=shapes)
        device = next(x.device for x in inputs if x is not None)
        return [value.to(device) for value in values]  # they are always made on the CPU

    def dtype(self, x: Value) -> torch.dtype:
        """The dtype of a value."""
        return cast(torch.dtype, x.dtype)

    def shape(self, x: Value) -> Shape:
        """The shape of a value; sizes that are known at run time only are symbols, or None."""
        return tuple(x.shape)

    def numbers(self, values: Any, dtype: torch.dtype) -> Value:
        """A constant: one number, or a list of them, some of which may be known at run time only."""
        if isinstance(values, list | tuple):
            return torch.stack([torch.scalar_tensor(value, dtype=dtype) for value in values])
        return torch.scalar_tensor(values, dtype=dtype)

    def ones(self, like: Value) -> Value:
        """1 for every element of a value."""
        return torch.ones_like(like)

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        """A value in this dtype."""
        return x.to(dtype)

    def merged(self, x: Value, axes: Sequence[int]) -> Value:
        """A value with adjacent axes as one."""
        return x.flatten(axes[0], axes[-1])

    def reshaped(self, x: Value, like: Value) -> Value:
        """A value in the shape of another."""
        return x.reshape(like.shape)


class Trace(ExportGraph):
    """The graph of a traced module, as a symbolic function is given it."""

    def __init__(self, context: Any):
        self.context = context

    def nodes(self, name: str, inputs: Sequence[Value | None], results: Results, **attributes: Any) -> Sequence[Value]:
        given = [self._nothing() if value is None else value for value in inputs]
        marked = {f"{key}_{_mark(value)}": value for key, value in attributes.items()}
        made = self.context.op(name, *given, outputs=len(results), **marked)
        values: Sequence[Value] = made if len(results) > 1 else (made,)
        for value, (dtype, shape) in zip(values, results, strict=True):
            value.setType(_typed(dtype, shape))
        return values

    def _nothing(self) -> Value:
        none = self.context.op("prim::Constant")
        none.setType(torch_private.optional_type.ofTensor())
        return none

    def numbers(self, values: Any, dtype: torch.dtype) -> Value:
        return self.context.op("Constant", value_t=torch.tensor(values, dtype=dtype))

    def dtype(self, x: Value) -> torch.dtype:
        return cast(torch.dtype, SCALAR_TYPES.from_value(x).dtype())

    def shape(self, x: Value) -> Shape:
        return cast(Shape, x.type().varyingSizes())

    def ones(self, like: Value) -> Value:
        one = torch.ones(1, dtype=self.dtype(like))
        return self.context.op("ConstantOfShape", self.context.op("Shape", like), value_t=one)

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        if self.dtype(x) == dtype:
            return x
        made = self.context.op("Cast", x, to_i=SCALAR_TYPES.from_dtype(dtype).onnx_type())
        made.setType(x.type().with_dtype(dtype))
        return made

    def merged(self, x: Value, axes: Sequence[int]) -> Value:
        sizes, shape = self.context.op("Shape", x), self.shape(x)
        pieces = [self._sizes(sizes, 0, axes[0]), self.numbers([-1], torch.int64)]
        pieces.append(self._sizes(sizes, axes[-1] + 1, len(shape)))
        left = [*shape[: axes[0]], None, *shape[axes[-1] + 1 :]]
        return self._viewed(x, self.context.op("Concat", *pieces, axis_i=0), left)

    def _sizes(self, sizes: Value, start: int, stop: int) -> Value:
        bounds = (self.numbers([start], torch.int64), self.numbers([stop], torch.int64))
        return self.context.op("Slice", sizes, *bounds)

    def reshaped(self, x: Value, like: Value) -> Value:
        return self._viewed(x, self.context.op("Shape", like), self.shape(like))

    def _viewed(self, x: Value, sizes: Value, shape: Shape) -> Value:
        made = self.context.op("Reshape", x, sizes)
        made.setType(_typed(self.dtype(x), shape))
        return made


def _typed(dtype: torch.dtype, shape: Shape) -> Any:
    """The type of a tensor in a trace."""
    return torch_private.tensor_type.get().with_dtype(dtype).with_sizes(list(shape))


def _mark(value: Any) -> str:
    """The letter by which a symbolic function tells the type of an attribute."""
    return "s" if isinstance(value, str) else "f" if isinstance(value, float) else "i"


# --- forms ------------------------------------------------------------------------------------------------------------


Given = Mapping[str, Any]  # a call's arguments by parameter name; tensors are values of the graph
Form = Callable[[ExportGraph, Given], Any]
OPSET = 13  # the first opset in which Softmax and its gradient have a single axis
DESCRIPTORS = {"Tensor": "v", "int[1]": "is", "SymInt[]": "is", "bool": "b", "float": "f", "str": "s"}
FORMS: dict[str, Form] = {}


def form(name: str) -> Callable[[Form], Form]:
    """Give an operator its form in ONNX."""

    def give(function: Form) -> Form:
        FORMS[name] = function
        return function

    return give


def node(graph: ExportGraph, name: str, inputs: Sequence[Value | None], like: Value, **attributes: Any) -> Value:
    """Add a node whose result has the dtype and the shape of a value."""
    return graph.nodes(name, inputs, [(graph.dtype(like), graph.shape(like))], **attributes)[0]


# --- operators of ONNX ----------------------------------------------------------------------------------------------


def elementwise(name: str, *attributes: str) -> Form:
    """A node on x with these of the operator's attributes."""

    def build(graph: ExportGraph, given: Given) -> Value:
        return node(graph, name, [given["x"]], given["x"], **{each: float(given[each]) for each in attributes})

    return build


FORMS |= {"relu": elementwise("Relu"), "sigmoid": elementwise("Sigmoid"), "tanh": elementwise("Tanh")}
FORMS["leaky_relu"] = elementwise("LeakyRelu", "alpha")


@form("quick_gelu")
def _quick_gelu(graph: ExportGraph, given: Given) -> Value:
    x = given["x"]
    inner = x
    if given["alpha"] != 1:
        inner = node(graph, "Mul", [x, graph.numbers(float(given["alpha"]), graph.dtype(x))], x)
    return node(graph, "Mul", [x, node(graph, "Sigmoid", [inner], x)], x)


@form("in_place_accumulator")
def _in_place_accumulator(graph: ExportGraph, given: Given) -> Value:
    buffer = given["buffer"]
    value = graph.cast(given["value"], graph.dtype(buffer))
    return (
        node(graph, "Identity", [value], buffer) if given["overwrite"] else node(graph, "Add", [buffer, value], buffer)
    )


def over_rows(name: str, *arrays: str) -> Form:
    """A node along one axis of these arrays; several axes are merged into one before it and split again after it."""

    def build(graph: ExportGraph, given: Given) -> Value:
        values = [given[array] for array in arrays]
        axis = given["axis"]
        rank = len(graph.shape(values[0]))
        axes = sorted(each % rank for each in ([axis] if isinstance(axis, int) else axis))
        if len(axes) == 1:
            return node(graph, name, values, values[0], axis=axes[0])
        merged = [graph.merged(value, axes) for value in values]
        return graph.reshaped(node(graph, name, merged, merged[0], axis=axes[0]), values[0])

    return build


FORMS |= {"softmax": over_rows("Softmax", "x"), "log_softmax": over_rows("LogSoftmax", "x")}
FORMS["softmax_grad"] = over_rows("com.microsoft::SoftmaxGrad_13", "dy", "y")
FORMS["log_softmax_grad"] = over_rows("com.microsoft::LogSoftmaxGrad_13", "dy", "y")


@form("gather")
def _gather(graph: ExportGraph, given: Given) -> Value:
    x, indices = given["x"], given["indices"]
    sizes = graph.shape(x)
    axis = given["axis"] % len(sizes)
    shape = (*sizes[:axis], *graph.shape(indices), *sizes[axis + 1 :])
    return graph.nodes("Gather", [x, indices], [(graph.dtype(x), shape)], axis=axis)[0]


# --- cross-entropy --------------------------------------------------------------------------------------------------


@form("softmax_cross_entropy_loss_only")
def _loss_only(graph: ExportGraph, given: Given) -> Value:
    return _loss(graph, given, given["out_dtype"])[0]


@form("softmax_cross_entropy_loss")
def _loss_and_log_prob(graph: ExportGraph, given: Given) -> tuple[Value, Value]:
    loss, log_prob = _loss(graph, given, given["loss_dtype"], given["log_prob_dtype"], several=True)
    return loss, log_prob


@form("softmax_cross_entropy_loss_and_grad")
def _loss_and_grad(graph: ExportGraph, given: Given) -> tuple[Value, Value]:
    """The loss and its gradient; the exporters leave out the gradient's nodes if nothing reads it."""
    (loss,) = _loss(graph, given, given["loss_dtype"])
    logits = given["logits"]
    log_prob = node(graph, "LogSoftmax", [logits], logits, axis=1)
    arguments = {**given, "dy": graph.ones(loss), "log_prob": log_prob, "out_dtype": given["dlogits_dtype"]}
    return loss, original(graph, REGISTERED["softmax_cross_entropy_loss_grad"].op, arguments)


def _loss(graph: ExportGraph, given: Given, *dtypes: torch.dtype | None, several: bool = False) -> Sequence[Value]:
    """The results of SoftmaxCrossEntropyLoss in these dtypes, computed in the widest that is asked for."""
    logits, labels = given["logits"], given["labels"]
    own = wide = graph.dtype(logits)
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype or own)
    logits = graph.cast(logits, wide)
    weight = [] if given["weight"] is None else [graph.cast(given["weight"], wide)]
    shape = graph.shape(labels) if given["reduction"] == "none" else ()
    results = [(wide, shape), (wide, graph.shape(logits))][: 1 + several]
    made = graph.nodes("SoftmaxCrossEntropyLoss", [logits, labels, *weight], results, **_options(given))
    return [graph.cast(value, dtype or own) for value, dtype in zip(made, dtypes, strict=True)]


def _options(given: Given) -> dict[str, Any]:
    ignored = given["ignore_index"]
    return {"reduction": given["reduction"]} | ({} if ignored is None else {"ignore_index": int(ignored)})


# --- attention --------------------------------------------------------------------------------------------------------


@form("attention")
def _attention(graph: ExportGraph, given: Given) -> Sequence[Value]:
    q, v = given["q"], given["v"]
    kind, rows = graph.dtype(q), graph.shape(q)[:-1]
    results = [(kind, (*rows, graph.shape(v)[-1])), (kind if kind == torch.float64 else torch.float32, rows)]
    return _attention_node(graph, "AttentionTraining", [q, given["k"], v], given, results)


@form("attention_grad")
def _attention_grad(graph: ExportGraph, given: Given) -> Sequence[Value]:
    arrays = [given[name] for name in ("dy", "q", "k", "v", "y", "lse")]
    results = [(graph.dtype(each), graph.shape(each)) for each in arrays[1:4]]
    return _attention_node(graph, "AttentionGrad", arrays, given, results)


def _attention_node(
    graph: ExportGraph, name: str, arrays: Sequence[Value], given: Given, results: Any
) -> Sequence[Value]:
    attributes = {"scale": float(graph.shape(given["q"])[-1] ** -0.5 if given["scale"] is None else given["scale"])}
    more = {"causal": given["causal"], "dropout": float(given["dropout"])}
    inputs = [*arrays, given["mask"], None, None, given["seed"]]
    while inputs[-1] is None:
        inputs.pop()
    return graph.nodes(f"com.microsoft::{name}", inputs, results, **attributes, **more)


# --- operators of training graphs -----------------------------------------------------------------------------------


def original(graph: ExportGraph, op: Operator, given: Given) -> Value:
    """The operator under the name of its original, which `opgrad.onnxruntime` runs and `opgrad lower` makes plain."""
    name = op.onnx[-1]
    inputs = [given.get(each.rstrip("?")) for each in name.inputs]
    for place, each in enumerate(name.inputs):  # some attributes of the operator are inputs here
        if each.rstrip("?") in ("shape", "ignore_index") and inputs[place] is not None:
            inputs[place] = graph.numbers(inputs[place], torch.int64)
    while inputs[-1] is None:
        inputs.pop()
    model = given[op.results[name.outputs[0]].dtype_of or op.arrays[0]]
    dtype = given.get("out_dtype") or graph.dtype(model)
    shape = given["shape"] if "shape" in given else graph.shape(model)
    attributes = {each: given[each] for each in name.attributes if each in op.attributes}
    if given.get("out_dtype"):
        attributes["output_type"] = int(SCALAR_TYPES.from_dtype(dtype).onnx_type())
    attributes = {each: int(value) if isinstance(value, bool) else value for each, value in attributes.items()}
    return graph.nodes(f"{name.origin}::{name.name}", inputs, [(dtype, shape)], **attributes)[0]


def converted(operator: Registered, graph: ExportGraph, arguments: Sequence[Any]) -> Any:
    """The operator's results in a graph, for arguments in the order of its schema; trailing ones may be missing."""
    op = operator.op
    given = {**op.attributes, **dict.fromkeys(operator.names), **dict(zip(operator.names, arguments, strict=False))}
    for name, default in op.attributes.items():
        if name in operator.names[len(arguments) :] and default is not inspect.Parameter.empty:
            given[name] = default
    made = FORMS.get(op.name)
    return made(graph, given) if made is not None else original(graph, op, given)


# --- the two exporters ----------------------------------------------------------------------------------------------


def on_export(operator: Registered, arguments: Sequence[Any]) -> Any:
    """A call while a model is captured for export, or traced."""
    if is_recording():
        # A trace takes no list with sizes that it follows: int() makes them numbers, with PyTorch's warning.
        plain = [[int(each) for each in value] if isinstance(value, list | tuple) else value for value in arguments]
        return operator.overload(*plain)  # the exporter replaces its node by means of the symbolic function
    return converted(operator, ExportGraph(), arguments)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions of opgrad's operators into ONNX's, for programs that torch.onnx.export is given.

    Returns a table for `torch.export.ExportedProgram.run_decompositions`: a function for each operator.
    """
    every = REGISTERED.values()
    return {each.overload: lambda *arguments, it=each: converted(it, ExportGraph(), arguments) for each in every}


def _symbolic(operator: Registered) -> Callable[..., Any]:
    """The symbolic function that the exporter of traced modules calls for a node of this operator."""

    def symbolic(context: Any, *arguments: Any) -> Any:
        given = [_read(name, value) for name, value in zip(operator.names, arguments, strict=False)]
        return converted(operator, Trace(context), given)

    written = operator.schema.values()
    kinds = [DESCRIPTORS.get(each.split()[0].rstrip("?"), "i") for each in written]
    names = ["context", *operator.names]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    symbolic.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # by which arguments are read
    return cast(Callable[..., Any], EXPORTER.symbolic_helper.parse_args(*kinds)(symbolic))


def _read(name: str, value: Any) -> Any:
    """An argument in its usual form: a trace has graph values for None, and numbers for dtypes."""
    if value is None or (isinstance(value, torch_private.graph_value) and value.node().mustBeNone()):
        return None
    return SCALAR_TYPES(value).dtype() if name.endswith("dtype") else value


for each in REGISTERED.values():
    EXPORTER.register_custom_op_symbolic(f"opgrad::{each.op.name}", _symbolic(each), OPSET)
