"""Nodes of a gradient graph, written with the values of `opgrad.onnx.graph.formulas`.

A node that is written twice with the same inputs and attributes exists once. Constants are initializers of the graph.
The element type of every value is known, so that a number in a formula becomes a constant of that type.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opgrad.onnx.graph.facts import dtype_of_result
from opgrad.onnx.graph.formulas import Body, Value
from opgrad.onnx.graph.messages import MICROSOFT, copied, domain_of, free_name
from opgrad.onnx.graph.nodes import leave_out_results, needed, read_by, rename
from opgrad.onnx.graph.sizes import Sizes


class GraphBody(Body):
    """Nodes that are appended to a graph.

    opset: the version of ai.onnx, 11 or later. taken: the names that the graph has already; each new name is added.
    plain: whether all nodes will be lowered to ai.onnx in the end.
    """

    def __init__(self, opset: int, taken: set[str], plain: bool = False):
        super().__init__(opset)
        self.plain = plain
        self.initializers: list[TensorProto] = []
        self.infos: dict[str, onnx.ValueInfoProto] = {}
        self.taken = taken
        self._written: dict[Any, list[Value]] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._scope = ""

    def scope(self, name: str) -> None:
        """Let the names of all values that are written from now on start with `name`."""
        self._scope = self.free(name)
        self._count = 0

    def free(self, name: str) -> str:
        """A name that is not taken yet; from now on it is."""
        return free_name(name, self.taken)

    def beside(self) -> "GraphBody":
        """An empty body for the same graph, which takes its names from the same ones."""
        return GraphBody(self.opset, self.taken, self.plain)

    def nodes_of(self, op: str, outputs: int, *inputs: Value | None, **attributes: Any) -> list[Value]:
        """The outputs of a node; it is appended unless an equal node is already there."""
        given = ["" if each is None else each.name for each in inputs]
        while given and not given[-1]:
            given.pop()
        node = helper.make_node(op, given, [], **attributes)
        key = outputs, node.SerializeToString(deterministic=True)
        if key not in self._written:
            node.name = f"{self._scope}/{op}_{self._count}"
            self._count += 1
            node.output.extend([node.name, *(f"{node.name}:{index}" for index in range(1, outputs))])
            self.nodes.append(node)
            dtypes = (self._dtype(node, index, inputs, attributes) for index in range(outputs))
            self._written[key] = [Value(self, *each) for each in zip(node.output, dtypes, strict=True)]
        return self._written[key]

    def _dtype(
        self, node: onnx.NodeProto, index: int, inputs: Sequence[Value | None], attributes: dict[str, Any]
    ) -> int | None:
        """The dtype of a result of a node, as far as that of the inputs tells it."""
        if node.op_type in ("If", "Loop"):
            return None  # their results have dtypes of their own
        if node.op_type == "Cast":
            return int(attributes["to"])
        dtype, of = dtype_of_result(domain_of(node), node.op_type, self.opset, index)
        like = inputs[of] if of < len(inputs) else None
        return dtype if dtype is not None or like is None else like.element_type

    def microsoft(self, op: str, *inputs: Value | None, **attributes: Any) -> Value:
        """Append a node of the domain com.microsoft with one output."""
        return self.node(op, *inputs, domain=MICROSOFT, **attributes)

    def concat(self, *values: Value, axis: int = 0) -> Value:
        """The concatenation of the values along an axis; constants are concatenated now and not at run time."""
        known = [self._arrays.get(each.name) for each in values]
        arrays = [each for each in known if each is not None]
        if len(arrays) == len(values):
            return self.constant(np.concatenate(arrays, axis))
        return super().concat(*values, axis=axis)

    def tensor(self, tensor: TensorProto) -> Value:
        """An initializer; equal tensors share one."""
        value = super().tensor(tensor)
        return Value(self, value.name, value.element_type, list(tensor.dims))

    def _write(self, tensor: TensorProto) -> Value:
        named = copied(tensor)
        named.name = self.free(f"{self._scope}/Constant_{self._count}")
        self._count += 1
        self.initializers.append(named)
        self._arrays[named.name] = numpy_helper.to_array(named)
        return Value(self, named.name, tensor.data_type, list(tensor.dims))

    def inner_prefix(self) -> str:
        """The prefix of the names inside the body of the next Scan or Loop."""
        return f"{self._scope}/scan_{self._count}_"

    def declare(self, value: Value, element_type: int, sizes: Sizes | None) -> Value:
        """The same value with its type and sizes, which are also written to the graph's value_info."""
        known = Value(self, value.name, element_type, sizes)
        self.infos[value.name] = helper.make_tensor_value_info(value.name, element_type, sizes)
        return known

    def rename(self, names: dict[str, str]) -> None:
        """Rename values wherever they are written, read or declared."""
        for node in self.nodes:
            rename(node, names)
        infos, self.infos = self.infos, {}
        for name, info in infos.items():
            info.name = names.get(name, name)
            self.infos[info.name] = info

    def keep(self, wanted: Collection[str]) -> None:
        """Drop the nodes, the optional results and the initializers that these values do not depend on."""
        self.nodes = needed(self.nodes, wanted)
        read = read_by(self.nodes).union(wanted)
        for node in self.nodes:
            leave_out_results(node, read)
        self.initializers = [each for each in self.initializers if each.name in read]
        self.infos = {name: info for name, info in self.infos.items() if name in read}
        self._written.clear()
        self._constants.clear()
