"""Which operators have a form of plain ONNX operators, and what the function that writes it is given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Body, NodeView, Value
from opgrad.onnx.graph.messages import HALVES, MICROSOFT
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
        given = [each for each in self.inputs[:count] if each is not None]
        if len(given) < count:
            raise NoForm(f"it has {len(given)} of its {count} inputs")
        return given

    def _sizes(self, index: int) -> Sizes | None:
        """The sizes of an input, None if the graph does not even tell the rank."""
        return self.input_shapes[index]

    def constant(self, index: int) -> np.ndarray | None:
        """The value of an input that is a constant of the graph; None if it is missing or is not."""
        return self.values(index) if self.input(index) is not None else None


Results = Value | Sequence[Value | None]


Write = Callable[[Call], Results]
# The functions that write operators with others: each returns the values of the outputs, in order; nodes of outputs
# that are not wanted are removed afterwards.
FORMS: dict[tuple[str, str], Write] = {}


def lowers(*names: str, domain: str = MICROSOFT) -> Callable[[Write], Write]:
    """Declare the form of the operators of these names."""

    def declare(write: Write) -> Write:
        FORMS.update({(domain, name): write for name in names})
        return write

    return declare


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
            written = write(widened(call))
            results = [written] if isinstance(written, Value) else list(written)
            models = [call.input(place) if call.input_types[place] in HALVES else None for place in like]
            return [
                each if each is None or model is None else each.like(model)
                for each, model in zip(results, models, strict=True)
            ]

        return form

    return decorate
