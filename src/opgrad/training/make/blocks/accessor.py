"""The model that blocks are building: one at a time in each thread."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import onnx
from onnx import TensorProto, defs, helper

from opgrad.base.reading import check_regular
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import MICROSOFT, copied
from opgrad.training.files.tensor_values import Held

LATEST_IR_VERSION = 10  # the latest version that the last packages of onnxruntime-training can read
Sizes = Sequence[int | str | None]

_current: ContextVar["ModelAccessor | None"] = ContextVar("opgrad.onnxblock.model", default=None)


class ModelAccessor:
    """A model that is being built.

    model: the model; blocks change it in place. apart: the values of its huge initializers, by name; in the model these
    are placeholders. drawn: how many numbers the names of blocks have used so far.
    """

    def __init__(self, model: onnx.ModelProto, drawn: int = 0, apart: dict[str, Held] | None = None):
        self.model, self.apart, self.drawn = model, {} if apart is None else apart, drawn
        self.blocks: list[str] = []  # the names of those that are being built, the innermost last
        self._types: Graph | None = None

    # --- names ---

    def fresh(self, what: str) -> str:
        """A name that the model does not have: onnx::<what>::<the next number>."""
        while True:
            self.drawn += 1
            name = f"onnx::{what}::{self.drawn}"
            if not self.has_value(name) and all(name != node.name for node in self.model.graph.node):
                return name

    def has_value(self, name: str) -> bool:
        """Whether an input, an initializer or the result of a node has this name."""
        graph = self.model.graph
        return any(name == each.name for each in (*graph.input, *graph.initializer)) or any(
            name in node.output for node in graph.node
        )

    # --- what is known of values ---

    def element_type(self, name: str) -> int | None:
        """The TensorProto.DataType of a value, None if it is not known."""
        return self._known(name).element_type(name)

    def sizes(self, name: str) -> Sizes | None:
        """For each axis an int, a name or None; None in place of the list if not even the rank is known."""
        return self._known(name).sizes(name)

    def _known(self, name: str) -> Graph:
        if self._types is None or self._types.element_type(name) is None:
            self._types = self.graph()
        return self._types

    def graph(self) -> Graph:
        """The model as a graph, with the types that are known."""
        return Graph(self.model, known=self._types)

    def forget(self) -> None:
        """Forget types and sizes, as the graph has changed; they are inferred again when they are needed."""
        self._types = None

    # --- writing ---

    def constant(self, name: str, element_type: int, shape: Sequence[int], values: Sequence[float]) -> str:
        """Append an initializer."""
        self.model.graph.initializer.append(helper.make_tensor(name, element_type, shape, values))
        return name

    def input(self, name: str, element_type: int, sizes: Sizes | None) -> str:
        """Append an input to the graph."""
        self.model.graph.input.append(helper.make_tensor_value_info(name, element_type, sizes))
        return name


def current() -> ModelAccessor:
    """The model that blocks build. Raises RuntimeError outside of `base` and `empty_base`."""
    found = _current.get()
    if found is None:
        raise RuntimeError("onnxblock: there is no model to build on; call blocks within base(model) or empty_base()")
    return found


@contextmanager
def building(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    """Within the `with` block, blocks build this model. Raises RuntimeError if they build another one already."""
    if _current.get() is not None:
        raise RuntimeError(
            "onnxblock: blocks build another model already, expected one of base and empty_base at a time"
        )
    token = _current.set(accessor)
    try:
        yield accessor
    finally:
        _current.reset(token)


@contextmanager
def base(model: onnx.ModelProto) -> Iterator[ModelAccessor]:
    """Let blocks build on a copy of a model.

    Gives a `ModelAccessor`, whose `model` is the copy. Raises TypeError for another model, RuntimeError inside
    another `base` or `empty_base`.
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"base: model is of type {type(model).__name__}, expected onnx.ModelProto")
    with building(ModelAccessor(copied(model))) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Let blocks build a new model.

    opset_version: of ai.onnx; None: the newest that onnx has.

    Gives a `ModelAccessor`. Raises RuntimeError inside another `base` or `empty_base`.
    """
    with building(ModelAccessor(empty_model(opset_version))) as accessor:
        yield accessor


def empty_model(opset_version: int | None = None) -> onnx.ModelProto:
    """A model without nodes."""
    opsets = [
        helper.make_opsetid(MICROSOFT, 1),
        helper.make_opsetid("", opset_version or defs.onnx_opset_version()),
    ]
    version = min(onnx.IR_VERSION, LATEST_IR_VERSION)
    graph = onnx.GraphProto(name="graph")
    return onnx.ModelProto(ir_version=version, producer_name="orttraining", graph=graph, opset_import=opsets)


@contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[str]:
    """Name the library with the operators of one's own that the model has; graphs are written without it.

    custom_op_library_path: the file. Gradients of operators come from `opgrad.gradients.register_gradient`.

    Raises FileNotFoundError.
    """
    yield library_file(custom_op_library_path)


def library_file(path: str | bytes | os.PathLike[str]) -> str:
    """The path of a library with operators of one's own. Raises FileNotFoundError, and OSError for a pipe or device."""
    found = os.fsdecode(path)
    if not Path(found).exists():
        raise FileNotFoundError(f"custom_op_library: there is no file {found}")
    check_regular(Path(found), f"custom_op_library: {found}")
    return found


def type_name(element_type: int | None) -> str:
    """The name of an element type in messages."""
    return TensorProto.DataType.Name(element_type) if element_type else "unknown"
