"""Embedding tables of which a step only changes the rows that its batches have read.

The training graph no longer sums the gradient of such a table. Its outputs are the gradient of the rows that were
looked up, and the indices. So the time of a step depends on the batch and not on the size of the table.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx
from onnx import helper

from opgrad.call import optim
from opgrad.call.operators import gather_grad
from opgrad.onnx.graph.messages import keep
from opgrad.onnx.graph.nodes import reads_values
from opgrad.training.engine.distributed import OneProcess
from opgrad.training.engine.optimizer import SGD, AdamW
from opgrad.training.files.artifact_set import AdamWRule
from opgrad.training.make.patterns import matching
from opgrad.training.make.shared_tensors import name_in_module

Lookups: TypeAlias = Mapping[
    str, tuple[np.ndarray, np.ndarray]
]  # by table: indices, and the gradient of what they name
KINDS = "parameter that is trained", "table that is trained"  # what names are of, and what patterns match
INDICES, GRADIENT = "_rows.indices", "_rows.gradient"  # behind a table's name: outputs of the graph


# --- graph -----------------------------------------------------------------------------------------------------------


def expose(model: onnx.ModelProto, gradients: dict[str, str], given: Sequence[str]) -> list[str]:
    """Replace each table's gradient in a training graph by two outputs: the indices, and the gradient of the rows.

    gradients: names of the gradients by parameter; those of the tables go.
    given: names of tables, or patterns that match some. Returns the names of the tables.
    Raises ValueError for a name that is no parameter with a gradient, a pattern that matches no table, and a table that
    is not read by exactly one Gather along its first axis; one that is tied to another layer is read more than once.
    """
    if not given:
        return []
    trained = list(gradients)
    modules: dict[str, list[str]] = {}  # of tables alone
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] in trained:
            known = name_in_module(node.input[0], node, 0)
            modules.setdefault(node.input[0], []).extend([known] if known else [])
    named, matched = matching("row_wise", given, trained, list(modules), modules, KINDS)
    names = list(dict.fromkeys([*named, *matched]))
    for name in names:
        _expose(model.graph, name, gradients.pop(name))
    return names


def _expose(graph: onnx.GraphProto, name: str, gradient: str) -> None:
    made = [node for node in graph.node if gradient in node.output]
    readers = [node for node in graph.node if name in node.input and reads_values(node)]
    if not (
        _is_lookup(made, "GatherGrad") and _is_lookup(readers, "Gather") and list(readers[0].input).count(name) == 1
    ):
        kinds = ", ".join(sorted({node.op_type for node in readers}))
        raise ValueError(f"row_wise: {name} is read by {kinds}, expected one Gather along its first axis alone")
    _, indices, dy = made[0].input
    graph.node.remove(made[0])
    keep(graph.output, [value for value in graph.output if value.name != gradient])
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
    gradients: by table, the rows that the next step changes, rising, and the gradient of each; empty until `sum_up`.
    """

    def __init__(self, rest: SGD | AdamW, tables: Mapping[str, np.ndarray]):
        self._rest, self.tables = rest, tables
        self.gradients: dict[str, tuple[np.ndarray, np.ndarray]] = {}
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
        self._last = {}

    def sum_up(self) -> None:
        """Form the gradient of the next step, unless it is there: the sum of the kept ones and the last batch's."""
        if not self.gradients:
            parts, self._kept = [each for each in (*self._kept, self._last) if each], []
            self.gradients = {name: self._summed(name, [part[name] for part in parts]) for name in self.tables}

    def add_up(self, processes: OneProcess) -> None:
        """Replace the gradient of the next step by the sum over all processes, which has the same bits on each."""
        self.sum_up()
        for name, (rows, values) in self.gradients.items():
            parts = zip(processes.gather(rows), processes.gather(values), strict=True)
            self.gradients[name] = self._summed(name, list(parts))

    def _summed(self, name: str, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """The rows that indices of several parts name, and the sum of the gradients of each."""
        shape = self.tables[name].shape
        indices = np.concatenate([np.empty(0, np.int64), *(indices.reshape(-1) for indices, _ in parts)])
        dy = np.concatenate([np.empty((0, *shape[1:]), np.float32), *(dy.reshape(-1, *shape[1:]) for _, dy in parts)])
        rows, values = gather_grad(shape, indices, dy, sparse=True)
        return rows, values

    def squares(self) -> float:
        """The sum of the squares of the next step's gradients, for the norm of all gradients together."""
        self.sum_up()
        return sum(float(np.square(values, dtype=np.float64).sum()) for _, values in self.gradients.values())

    def step(self, factor: float) -> None:
        """Change the rows along their gradients, after the step of the other parameters.

        factor: by which that step has clipped the gradients.
        """
        self.sum_up()
        for name, (rows, values) in self.gradients.items():
            clipped = values if factor == 1 else values * np.float32(factor)
            self._change(self.tables[name], self.moments[name], rows, clipped)
        self.gradients = {}

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
