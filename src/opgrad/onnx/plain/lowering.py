"""Training graphs as plain ONNX: every training operator becomes a function of the model itself.

Each node gets a function of its own signature (which inputs it has, its attributes); nodes that need the same body
share one. The functions lie in the domain `opgrad`, under the operator's name.
"""

import inspect
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from opgrad.base import arguments
from opgrad.base.files import json_object
from opgrad.onnx.graph.conversion import raise_opset
from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.formulas import Body, NodeView, Value
from opgrad.onnx.graph.loading import load
from opgrad.onnx.graph.messages import (
    HALVES,
    MICROSOFT,
    attribute_of,
    copied,
    declared_types,
    domain_of,
    free_name,
    opset_of,
)
from opgrad.onnx.graph.nodes import all_nodes, model_nodes, naming, needed, read_by, subgraphs
from opgrad.onnx.graph.sizes import Sizes


class NoForm(NotImplementedError):
    """This node cannot be written with plain operators; the text says why."""


@dataclass
class Call(NodeView):
    """A node that is being lowered.

    body: where the form is written to.
    inputs: the node's inputs as values of the body; None where an optional one is missing.
    attributes: as the node has them, text decoded.
    outputs: the number of the node's outputs; `wanted`: those that have a name.
    input_shapes, output_shapes: the sizes of each as far as the graph tells them; None where it tells nothing.
    input_types, output_types: the TensorProto.DataType of each, None where the graph tells nothing.
    forward: the first input of the MaxPool whose gradient this is; None of another operator, or where it is unknown.
    values: gives the value of an input that is a constant of the graph, None of another.
    """

    _problem = NoForm
    body: Body
    inputs: Sequence[Value | None]
    attributes: Mapping[str, Any]
    outputs: int
    wanted: frozenset[int]
    input_shapes: Sequence[Sequence[int | None] | None]
    output_shapes: Sequence[Sequence[int | None] | None]
    input_types: Sequence[int | None]
    output_types: Sequence[int | None]
    forward: Value | None = None
    values: Callable[[int], np.ndarray | None] = lambda index: None

    def operands(self, count: int) -> list[Value]:
        """The first inputs, none of which may be missing."""
        found = [each for each in self.inputs[:count] if each is not None]
        if len(found) < count:
            raise NoForm(f"it has {len(found)} of its {count} inputs")
        return found

    def _sizes(self, index: int) -> Sizes | None:
        """The sizes of an input, None if the graph does not even tell the rank."""
        return self.input_shapes[index]

    def constant(self, index: int) -> np.ndarray | None:
        """The value of an input that is a constant of the graph; None if it is missing or is not."""
        return self.values(index) if self.input(index) is not None else None


Results = Value | Sequence[Value | None]


Write = Callable[..., Results]  # of the call and, as further parameters, its first inputs, none of which may be missing
# The functions that write operators with others: each returns the values of the outputs, in order; nodes of outputs
# that are not wanted are removed afterwards.
FORMS: dict[tuple[str, str], Write] = {}


def lowers(*names: str, domain: str = MICROSOFT) -> Callable[[Write], Write]:
    """Declare the form of the operators of these names."""

    def declare(write: Write) -> Write:
        FORMS.update({(domain, name): _of_call(write) for name in names})
        return write

    return declare


def _of_call(write: Write) -> Callable[[Call], Results]:
    """The same function of a call alone."""
    count = len(inspect.signature(write).parameters) - 1
    return lambda call: write(call, *call.operands(count)) if count else write(call)


def widened(call: Call) -> Call:
    """The same call with inputs as float32 that are float16 or bfloat16, as far as the graph tells."""
    pairs = zip(call.inputs, call.input_types, strict=True)
    wide = [each.cast(TensorProto.FLOAT) if each is not None and dtype in HALVES else each for each, dtype in pairs]
    return replace(call, inputs=wide)


def in_float32(*like: int) -> Callable[[Write], Write]:
    """The same form, computed in float32 where the graph tells that inputs are float16 or bfloat16.

    Their sums and counts would be rounded after each term, and onnxruntime has no scatter that adds them.
    like: for each result the input whose type it has.
    """

    def decorate(write: Write) -> Write:
        def form(call: Call) -> Results:
            written = _of_call(write)(widened(call))
            results = [written] if isinstance(written, Value) else list(written)
            models = [call.input(place) if call.input_types[place] in HALVES else None for place in like]
            return [
                each if each is None or model is None else each.like(model)
                for each, model in zip(results, models, strict=True)
            ]

        return form

    return decorate


DOMAIN = "opgrad"
FEEDBACK = "opgrad.feedback"
KEPT_DOMAINS = ("", "ai.onnx", "com.microsoft")

# Operators of training graphs that have no form of plain ONNX operators, and why.
NOT_LOWERED: Mapping[str, str] = {
    name: reason
    for names, reason in (
        ("AdamOptimizer", "its inputs and outputs are written in place; AdamWOptimizer has a form"),
        ("LambOptimizer", "its inputs and outputs are written in place"),
        ("SGDOptimizer", "its inputs and outputs are written in place; SGDOptimizerV2 has a form"),
        (
            """BitmaskBiasDropout BitmaskDropout BitmaskDropoutGrad GistBinarizeEncoder GistBinarizeDecoder
            GistPack1Encoder GistPack1Decoder GistPack8Encoder GistPack8Decoder GistPack16Encoder GistPack16Decoder
            GistPackMsfp15Encoder GistPackMsfp15Decoder""",
            "it unpacks memory in a layout of its own",
        ),
        ("DropoutTraining", "its seed is an input, and that of Dropout an attribute"),
        ("FakeQuant", "it rounds in a way that no plain operator has"),
        ("ATen PythonOp PythonOpGrad", "it calls back into PyTorch"),
        ("YieldOp", "it hands tensors to ORTModule in the middle of the graph"),
        ("TritonOp", "it is a kernel of its own"),
        ("NcclAllReduce NcclAllGather NcclReduceScatter AdasumAllReduce Send Recv", "it sends data to other processes"),
        ("RecordEvent WaitEvent", "it is a signal between streams"),
        ("SummaryHistogram SummaryMerge SummaryScalar SummaryText", "its output is a message of TensorBoard"),
    )
    for name in names.split()
}
# The operators with a form that stock onnxruntime has on the CPU.
STOCK = ("BiasGelu", "FastGelu", "FusedMatMul", "Gelu", "QuickGelu", "SimplifiedLayerNormalization")


@arguments.naming("lower")
def lower(
    model: onnx.ModelProto | bytes | str | os.PathLike[str], *, operators: Collection[str] | None = None
) -> onnx.ModelProto:
    """The same model with training operators as functions of plain ONNX operators.

    model: an onnx.ModelProto, which is not changed, the bytes of one, or the path of a file. Data outside the file
        stays there; save the result in the same folder.
    operators: names of the operators to lower, of `opgrad.onnxruntime.LOWERED`; None: all that stock onnxruntime lacks.

    Returns the new model. Operators of other names are left alone. What the originals wrote into their inputs (the
    sum of InPlaceAccumulatorV2, running statistics of BatchNormInternal, parameters and moments of the optimizers)
    is an additional output, named after the input with `.next` at its end unless it had a name; the entry
    `opgrad.feedback` of the model's metadata tells, as JSON, into which input each such output belongs.

    Raises TypeError for another kind of model, FileNotFoundError, ValueError for a damaged model or an unknown name
    in `operators`, and NotImplementedError, naming the operator and the reason, where it has no such form.
    """
    lowered = load(model, outside=False)
    lowered_names = {name for _, name in FORMS}
    if isinstance(operators, str):
        raise TypeError(f"operators is of type str, expected a collection of names such as [{operators!r}]")
    for name in operators or ():
        if name in NOT_LOWERED:
            raise NotImplementedError(f"{name} has no form of plain operators: {NOT_LOWERED[name]}")
        if name not in lowered_names:
            raise ValueError(f"operators has {name!r}, expected names of opgrad.onnxruntime.LOWERED")
    # The operators to lower or to complain about.
    names = frozenset(lowered_names - set(STOCK) | NOT_LOWERED.keys() if operators is None else operators)
    if any(_concerns(node, names) for node in model_nodes(lowered)):
        raise_opset(lowered)
        _Lowering(lowered, names).run()
    return lowered


def _concerns(node: onnx.NodeProto, names: frozenset[str]) -> bool:
    """Whether a node is of an operator to lower, and of its domain."""
    known = (domain_of(node), node.op_type) in FORMS or (node.op_type in NOT_LOWERED and domain_of(node) == MICROSOFT)
    return known and node.op_type in names


@dataclass
class _Lowering:
    """One run of `lower` over a model of its own."""

    model: onnx.ModelProto
    names: frozenset[str]
    types: dict[str, onnx.TypeProto] = field(default_factory=dict)
    tensors: dict[str, onnx.TensorProto] = field(default_factory=dict)  # of constants
    functions: dict[tuple[str, bytes], str] = field(default_factory=dict)
    feedback: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        model = self.model
        for function in model.functions:
            if function.domain == DOMAIN:
                self.functions[_key(function)] = function.name
        self._graph(model.graph, model.graph)
        for function in list(model.functions):
            if any(_concerns(node, self.names) for node in all_nodes(function.node)):
                self.types, self.tensors = {}, {}  # the names inside a function are not those of the graph
                self._nodes_of(function.node, None)
                function.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        model.ir_version = max(model.ir_version, 8)  # the first version with functions
        # Import the functions' domain, and no domain that nothing uses.
        used = {node.domain for node in model_nodes(self.model)} | {DOMAIN, *KEPT_DOMAINS}
        kept = [each for each in self.model.opset_import if each.domain in used and each.domain != DOMAIN]
        del self.model.opset_import[:]
        self.model.opset_import.extend([*kept, helper.make_opsetid(DOMAIN, 1)])
        if self.feedback:
            entry = next((each for each in model.metadata_props if each.key == FEEDBACK), None)
            entry = entry or model.metadata_props.add(key=FEEDBACK)
            noted = json_object(entry.value or "{}", f"metadata {FEEDBACK} of the model")
            entry.value = json.dumps({**noted, **self.feedback})

    def _graph(self, graph: onnx.GraphProto, main: onnx.GraphProto | None) -> None:
        """Lower the nodes of a graph; `main` is the same graph if its inputs are those of the model."""
        self.types |= declared_types(graph)
        defaults = {each.name for each in graph.input}  # of inputs: initializers that are no constants
        self.tensors |= {each.name: each for each in graph.initializer if each.name not in defaults}
        self._nodes_of(graph.node, main)

    def _nodes_of(self, nodes: Any, main: onnx.GraphProto | None) -> None:
        producers = {name: node for node in nodes for name in node.output if name}
        for node in nodes:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self.tensors[node.output[0]] = node.attribute[0].t
        for node in nodes:
            for graph in subgraphs(node):
                self._graph(graph, None)
            if _concerns(node, self.names):
                self._node(node, producers, main)

    def _node(
        self, node: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto], main: onnx.GraphProto | None
    ) -> None:
        """Turn a node into a call of a function. main: the graph, if its inputs are those of the model."""
        title = f"{node.op_type} (node {node.name!r})" if node.name else node.op_type
        no_form = f"{title} has no form of plain operators"
        if node.op_type in NOT_LOWERED:
            raise NotImplementedError(f"{no_form}: {NOT_LOWERED[node.op_type]}")
        maker = producers.get(node.input[1]) if node.op_type == "MaxPoolGrad" and len(node.input) > 1 else None
        forward = maker.input[0] if maker is not None and maker.op_type == "MaxPool" else None
        # An output with the values that the original operator wrote into an input of the model.
        inputs = {} if main is None else {each.name: each for each in main.input}
        for index, source in facts_of(node).writes.items():
            buffer = node.input[source] if source < len(node.input) else ""
            if main is None or buffer not in inputs:
                continue
            if buffer in self.feedback.values():
                raise NotImplementedError(f"{title} writes into {buffer}, as another node does")
            node.output.extend([""] * (index + 1 - len(node.output)))
            taken = self.types.keys() | {name for each in main.node for name in each.output}
            name = node.output[index] = node.output[index] or free_name(f"{buffer}.next", taken)
            if all(each.name != name for each in main.output):
                value = main.output.add()
                value.CopyFrom(inputs[buffer])
                value.name = name
            self.types[name] = inputs[buffer].type
            self.feedback[name] = buffer
        try:
            with naming(node):
                function, given = self._function(node, forward)
        except NoForm as reason:
            raise NotImplementedError(f"{no_form}: {reason}") from None
        outputs = [name for name in node.output if name]
        del node.input[:], node.output[:], node.attribute[:]
        node.op_type, node.domain, node.overload = function, DOMAIN, ""
        node.input.extend(given)
        node.output.extend(outputs)

    def _function(self, node: onnx.NodeProto, forward: str | None) -> tuple[str, list[str]]:
        """The name of the function for a node, and the names of the inputs that it takes."""
        body = Body(opset_of(self.model))
        call = Call(
            body=body,
            inputs=[body.input() if name else None for name in node.input],
            attributes=dict(map(_attribute, node.attribute)),
            outputs=len(node.output),
            wanted=frozenset(index for index, name in enumerate(node.output) if name),
            input_shapes=[self._sizes(name) for name in node.input],
            output_shapes=[self._sizes(name) for name in node.output],
            input_types=[self._element_type(name) for name in node.input],
            output_types=[self._element_type(name) for name in node.output],
            forward=body.input() if forward else None,
            values=lambda index: self._constant(node.input[index]),
        )
        written = FORMS[domain_of(node), node.op_type](call)
        results = [written] if isinstance(written, Value) else list(written)
        names = []
        for index in sorted(call.wanted):
            value = results[index] if index < len(results) else None
            if value is None:
                raise NoForm(f"it has output {index}, which the operator has not")
            names.append(value.apply("Identity").name)
        nodes = needed(body.nodes, names)
        read = read_by(nodes)
        given = [*zip([each.name if each else "" for each in call.inputs], node.input, strict=True)]
        given += [(call.forward.name, forward)] if call.forward and forward else []
        taken = [(inner, outer) for inner, outer in given if inner and inner in read]
        imports = [helper.make_opsetid("", body.opset)]
        function = helper.make_function(DOMAIN, node.op_type, [inner for inner, _ in taken], names, nodes, imports)
        key = _key(function)
        if key not in self.functions:  # those with equal bodies share one
            used = set(self.functions.values())
            base, number = function.name, 1
            while function.name in used:
                number += 1
                function.name = f"{base}_{number}"
            self.functions[key] = function.name
            self.model.functions.append(function)
        return self.functions[key], [outer for _, outer in taken]

    def _sizes(self, name: str) -> list[int | None] | None:
        tensor = self.types[name].tensor_type if name in self.types else None
        if tensor is None or not tensor.HasField("shape"):
            return None
        return [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]

    def _constant(self, name: str) -> np.ndarray | None:
        tensor = self.tensors.get(name)
        return None if tensor is None or uses_external_data(tensor) else numpy_helper.to_array(tensor)

    def _element_type(self, name: str) -> int | None:
        return self.types[name].tensor_type.elem_type or None if name in self.types else None


def _key(function: onnx.FunctionProto) -> tuple[str, bytes]:
    """A key that is equal for functions which only differ in the number at the end of their name."""
    copy = copied(function)
    copy.name = ""
    return function.name.split("_", 1)[0], copy.SerializeToString(deterministic=True)


def _attribute(attribute: AttributeProto) -> tuple[str, Any]:
    if attribute.ref_attr_name:
        raise NoForm(f"its attribute {attribute.name} is that of the function around it")
    return attribute_of(attribute)
