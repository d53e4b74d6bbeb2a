"""Tensors as users name them, by patterns and by the modules that read them, and those that several layers share.

A pattern of the shell, such as `layers.0.*`, matches names of tensors, and their names in modules that read them.
"""

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

import onnx

from opgrad.base.arguments import ArgumentError, ArgumentTypeError
from opgrad.onnx.graph.conversion import STATISTICS
from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.graph import constant_tensor
from opgrad.onnx.graph.loading import mend
from opgrad.onnx.graph.messages import FLOATS, domain_of, free_name
from opgrad.onnx.graph.nodes import all_nodes, captured, module_path, names_in, reads_values, title
from opgrad.training.files.tensor_values import Held
from opgrad.training.make.checks import listed, near

PATTERN = "*?["
INITIALIZERS = "initializer of the model", "weight of the model"


def fits(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern is one of several names of a tensor, or matches it."""
    return any(fnmatch.fnmatchcase(name, pattern) or name == pattern for name in names)


def matching(
    what: str, given: Iterable[str], names: Iterable[str], weights: Sequence[str],
    modules: Mapping[str, Sequence[str]], kinds: tuple[str, str] = INITIALIZERS,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """The given names, and the weights that match given patterns. Raises ArgumentError for one that matches nothing.

    names: of all tensors. weights: of those that patterns match. modules: further names of weights, see `Candidates`.
    kinds: what the names are of, and what patterns match, for messages.
    """
    known, exact, loose = dict.fromkeys(names), list[str](), list[str]()
    for each in [given] if isinstance(given, str) or not isinstance(given, Iterable) else given:
        if not isinstance(each, str):
            raise ArgumentTypeError(what, f"has {each!r}, expected names")
        if each in known:
            exact.append(each)
        elif found := [name for name in weights if each in modules.get(name, ())]:
            exact += found
        elif found := [name for name in weights if fits(each, (name, *modules.get(name, ())))]:
            loose += found
        else:
            more = chain.from_iterable(modules.values())
            raise ArgumentError(what, f"has {each!r}, {_nothing(each, [*known, *more], *kinds)}")
    return list(dict.fromkeys(exact)), list(dict.fromkeys(loose))


def _nothing(given: str, names: list[str], one: str, several: str) -> str:
    """The reason why a name or a pattern matches nothing, for a message."""
    if not set(PATTERN) & set(given):
        return f"which is no {one}{near(given, names)}"
    if others := [name for name in names if fits(given, (name,))]:
        return f"which matches no {several.split()[0]}, but {listed(others)}: name those in full"
    return f"which matches no {several}{near(given, names)}"


PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "Conv", "ConvTranspose", "FusedConv")  # whose second input is a weight
RUNNING = ("running_mean", "running_var")  # what PyTorch calls the statistics of batch normalization
FORMULA = "a formula"  # of constants
Edge: TypeAlias = tuple[onnx.NodeProto, int]  # a node that reads a tensor, and the place among its inputs
Layer: TypeAlias = tuple[str, str]  # the module that reads a tensor, or the node, and the name of a statistic or ""


def tensors_of(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The initializers and the tensors of Constant nodes, by name."""
    found = {each.name: each for each in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and not domain_of(node) and (tensor := constant_tensor(node)) is not None:
            found[node.output[0]] = tensor
    return found


def computed_from(names: Iterable[str], nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """These names, and those of all that nodes compute from them alone."""
    found = set(names)
    for node in nodes:
        if found.issuperset(captured(node)):
            found.update(node.output)
    return found


def layer_of(node: onnx.NodeProto, index: int, constant: Collection[str] = ()) -> Layer:
    """The layer that reads a tensor; the nodes of one module are one layer, those outside all modules one each.

    constant: names of constants; the nodes outside all modules that compute with these alone are one formula.
    """
    path = module_path(node)
    if not path and all(name in constant for name in captured(node)):
        path = FORMULA
    is_statistic = node.op_type == "BatchNormalization" and not domain_of(node) and index in STATISTICS
    return path or title(node), RUNNING[index - STATISTICS[0]] if is_statistic else ""


def name_in_module(name: str, node: onnx.NodeProto, index: int) -> str | None:
    """The name that a tensor would have as a parameter of the module of a node that reads it; None if unknown."""
    path, statistic = module_path(node), layer_of(node, index)[1]
    if path is None:
        return None
    own = statistic or (name.rpartition(".")[2] if "." in name else "weight" if node.op_type in PRODUCTS else name)
    return f"{path}.{own}" if path else own


def is_handed_on(node: onnx.NodeProto, index: int) -> bool:
    """Whether a node returns its input in another shape or type, moved or rounded, so that others read the tensor."""
    return facts_of(node).moves and not index


def part_statistics(model: onnx.ModelProto, apart: dict[str, Held]) -> None:
    """Give each batch normalization statistics of its own, in place: training changes them, and no weights with them.

    apart: the values of initializers that are placeholders; those of copies are added.
    """
    _Copies(model, apart).part(lambda layers: any(statistic for _, statistic in layers))


def untie(model: onnx.ModelProto, apart: dict[str, Held]) -> None:
    """Give each layer tensors of its own, in place. apart: see `part_statistics`."""
    _Copies(model, apart).part(lambda layers: True)


class _Copies:
    """Copies of the tensors of a model for the layers that read them."""

    def __init__(self, model: onnx.ModelProto, apart: dict[str, Held]):
        self._model, self._apart = model, apart
        self._taken = names_in(model.graph)
        self._made = {name for node in model.graph.node for name in node.output}
        self._constant = computed_from(tensors_of(model), model.graph.node)
        self._edges: dict[str, list[Edge]] = {}
        for node in filter(reads_values, all_nodes(model.graph.node)):
            for index, name in enumerate(node.input):
                self._edges.setdefault(name, []).append((node, index))

    def part(self, wanted: Callable[[Iterable[Layer]], bool]) -> None:
        """Copy the float tensors that several layers read, of which `wanted` holds."""
        tensors = [each for each in self._model.graph.initializer if each.data_type in FLOATS]
        changed = [name for each in tensors if wanted(layers := self._layers(name := each.name)) and len(layers) > 1]
        for name in changed:
            self._part(name)
        if changed:
            mend(self._model)  # sorts the nodes

    def _layers(self, name: str) -> dict[Layer, None]:
        """The layers that read a tensor, in the order of the nodes."""
        found: dict[Layer, None] = {}
        for node, index in self._edges.get(name, ()):
            found |= self._layers(node.output[0]) if self._is_split(node, index) else {self._layer(node, index): None}
        return found

    def _layer(self, node: onnx.NodeProto, index: int) -> Layer:
        return layer_of(node, index, self._constant)

    def _is_split(self, node: onnx.NodeProto, index: int) -> bool:
        """Whether a node hands a tensor on and may be copied: those within bodies stay."""
        return is_handed_on(node, index) and node.output[0] in self._made

    def _part(self, name: str) -> None:
        tensor = next(each for each in self._model.graph.initializer if each.name == name)
        groups = self._groups(name)
        named = [layer for layer, edges in groups.items() if self._name(name, edges) == name]
        direct = [layer for layer, edges in groups.items() if not layer[1] and not self._is_split(*edges[0])]
        kept = [*named, *direct, *groups][0]
        for layer, edges in groups.items():
            if layer == kept:
                continue
            copy = self._model.graph.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = self._copy_name(name, edges, layer)
            if name in self._apart:
                self._apart[copy.name] = self._apart[name]

    def _copy_name(self, name: str, edges: list[Edge], layer: Layer) -> str:
        """The name of a copy, which these edges read from now on."""
        node, _ = edges[0]
        if len(edges) == 1 and node.op_type == "Identity":  # the older exporter names its result as the parameter
            self._model.graph.node.remove(node)
            return node.output[0]
        found = free_name(self._name(name, edges) or f"{name}.{layer[1] or 'copy'}", self._taken)
        for node, place in edges:
            node.input[place] = found
        return found

    def _name(self, name: str, edges: list[Edge]) -> str | None:
        """The name of a tensor in the module that these edges lead to."""
        node, index = edges[0]
        while self._is_split(node, index):
            node, index = self._edges[node.output[0]][0]
        return name_in_module(name, node, index)

    def _groups(self, name: str) -> dict[Layer, list[Edge]]:
        """The direct readers of a tensor for each layer that they lead to; those that lead to several are copied."""
        found: dict[Layer, list[Edge]] = {}
        for node, index in self._edges.get(name, ()):
            if not self._is_split(node, index):
                found.setdefault(self._layer(node, index), []).append((node, index))
                continue
            for number, (layer, edges) in enumerate(self._groups(node.output[0]).items()):
                handing = node if not number else self._copied(node, edges)
                found.setdefault(layer, []).append((handing, index))
        return found

    def _copied(self, node: onnx.NodeProto, edges: list[Edge]) -> onnx.NodeProto:
        """A copy of a node in the main graph for some of its readers."""
        copy = self._model.graph.node.add()
        copy.CopyFrom(node)
        copy.name = free_name(node.name, self._taken) if node.name else ""
        copy.output[0] = free_name(node.output[0], self._taken)
        self._edges[copy.output[0]] = edges
        for reader, place in edges:
            reader.input[place] = copy.output[0]
        return copy
