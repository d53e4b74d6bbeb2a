"""Embedding tables of which a step only changes the rows that its batches have read.

The training graph no longer sums the gradient of such a table. Its outputs are the gradient of the rows that were
looked up, and the indices. So the time of a step depends on the batch and not on the size of the table.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx
from onnx import helper

from opgrad import optim
from opgrad.graph.messages import keep
from opgrad.ops.gather import gather_grad
from opgrad.training.engine.optimizer import SGD, AdamW, AdamWRule
from opgrad.training.formats.names import BUFFER_SUFFIX

Lookups: TypeAlias = Mapping[
    str, tuple[np.ndarray, np.ndarray]
]  # by table: indices, and the gradient of what they name
INDICES, GRADIENT = "_rows.indices", "_rows.gradient"  # behind a table's name: outputs of the graph


# --- graph -----------------------------------------------------------------------------------------------------------


def expose(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Replace each table's gradient in a training graph by two outputs: the indices, and the gradient of the rows.

    Raises ValueError for a name that is no parameter with a gradient, and for one that is not read by exactly one
    Gather along its first axis; a table whose weights are tied to another layer is read more than once.
    """
    for name in names:
        _expose(model.graph, name)


def _expose(graph: onnx.GraphProto, name: str) -> None:
    adding = [node for node in graph.node if node.input and node.input[0] == name + BUFFER_SUFFIX]
    if not adding:
        found = [value.name.removesuffix(BUFFER_SUFFIX) for value in graph.input if value.name.endswith(BUFFER_SUFFIX)]
        raise ValueError(f"row_wise: {name!r} is no parameter that is trained, expected one of {', '.join(found)}")
    gradient = adding[0].input[1]
    made = [node for node in graph.node if gradient in node.output]
    readers = [node for node in graph.node if name in node.input and node.op_type != "Shape"]
    if not (
        _is_lookup(made, "GatherGrad") and _is_lookup(readers, "Gather") and list(readers[0].input).count(name) == 1
    ):
        kinds = ", ".join(sorted({node.op_type for node in readers}))
        raise ValueError(f"row_wise: {name} is read by {kinds}, expected one Gather along its first axis alone")
    _, indices, dy = made[0].input
    for node in (*adding, *made):
        graph.node.remove(node)
    dropped = {output for node in adding for output in node.output}
    keep(graph.output, [value for value in graph.output if value.name not in dropped])
    keep(graph.input, [value for value in graph.input if value.name != name + BUFFER_SUFFIX])
    graph.node.append(helper.make_node("Cast", [indices], [name + INDICES], to=onnx.TensorProto.INT64))
    graph.node.append(helper.make_node("Identity", [dy], [name + GRADIENT]))
    graph.output.append(helper.make_tensor_value_info(name + INDICES, onnx.TensorProto.INT64, None))
    graph.output.append(helper.make_tensor_value_info(name + GRADIENT, onnx.TensorProto.FLOAT, None))


def _is_lookup(nodes: Sequence[onnx.NodeProto], kind: str) -> bool:
    """Whether `nodes` is a single node of this kind along the first axis."""
    return len(nodes) == 1 and nodes[0].op_type == kind and all(item.i == 0 for item in nodes[0].attribute)


# --- optimizer -------------------------------------------------------------------------------------------------------


class RowWise:
    """The steps of row-wise tables, by the rule of the optimizer of the other parameters.

    rest: the optimizer of the other parameters. tables: float32, changed in place.

    moments: by table, arrays like it; the moments of a row stay as they are while no batch reads the row.
    """

    def __init__(self, rest: SGD | AdamW, tables: Mapping[str, np.ndarray]):
        if rest.rule.max_norm is not None:
            raise ValueError("row_wise: gradients are clipped to a norm, expected no clip_norm beside row_wise")
        self._rest, self.tables = rest, tables
        self.moments = {name: {each: np.zeros_like(table) for each in rest.moments} for name, table in tables.items()}
        self._last: Lookups = {}
        self._kept: list[Lookups] = []

    def give(self, found: Mapping[str, np.ndarray]) -> None:
        """Take the indices and gradients of a batch from the outputs of its run, in place of the last batch's."""
        self._last = {name: (found[name + INDICES], found[name + GRADIENT]) for name in self.tables}

    def keep(self, weight: float) -> None:
        """Add the last batch's gradient, times `weight`, to the gradient of the next step."""
        for _, dy in self._last.values():
            np.multiply(dy, np.float32(weight), out=dy)
        self._kept.append(self._last)

    def step(self) -> None:
        """Change the rows along the kept gradients or, without any, along the last batch's.

        To be called after the step of the other parameters.
        """
        parts, self._kept = self._kept or [self._last], []
        for name, table in self.tables.items():
            indices = np.concatenate([part[name][0].reshape(-1) for part in parts])
            dy = np.concatenate([part[name][1].reshape(-1, *table.shape[1:]) for part in parts])
            rows, values = gather_grad(table.shape, indices, dy, sparse=True)
            self._change(table, self.moments[name], rows, values)

    def _change(
        self, table: np.ndarray, moments: Mapping[str, np.ndarray], rows: np.ndarray, values: np.ndarray
    ) -> None:
        rule, rate = self._rest.rule, float(self._rest.learning_rate)
        if isinstance(rule, AdamWRule):
            settings = rule.alpha, rule.beta, rule.epsilon, rule.weight_decay, rule.adam_mode, bool(rule.correct_bias)
            first, second = moments["momentum0"], moments["momentum1"]
            optim.adam_rows(table, first, second, rows, values, rate, self._rest.steps, *settings)
        else:
            optim.sgd_rows(table, rows, values, rate)
