"""Finds the tensors of a model that are its weights, and selects those that are trained.

Users choose tensors by names and by patterns of the shell, such as `layers.0.*`. A pattern matches names of tensors,
and the names that tensors would have in the modules that read them; `Candidates.modules` has these. Constants that are
used like weights, such as sinusoidal positions, are told from them. Layers that read one tensor may get a copy each.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from opgrad.base.arguments import ArgumentError
from opgrad.onnx.gradients.expansion import differentiable_inputs, inline_functions, taken_nodes
from opgrad.onnx.graph.facts import ALL, facts_of
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import CLASSICAL, FLOATS, domain_of, size_of
from opgrad.onnx.graph.nodes import all_nodes, captured, module_path, reads_values, subgraphs
from opgrad.onnx.graph.subgraphs import FIRST_STATE, state_count
from opgrad.training.files.tensor_values import Held, array_of
from opgrad.training.make import forms
from opgrad.training.make.checks import listed, quantity, without_values
from opgrad.training.make.tensors import (
    PRODUCTS,
    computed_from,
    is_handed_on,
    layer_of,
    matching,
    name_in_module,
    tensors_of,
)

# The places of tensors among the inputs of operators that return their numbers, in parts or in sequences.
PARTS = {
    **dict.fromkeys(("Split", "SplitToSequence", "SequenceAt"), (0,)),
    "SequenceConstruct": ALL,
    "SequenceInsert": (0, 1),
}
MIXING = {**dict.fromkeys(("ScatterND", "ScatterElements"), (0, 2)), "Where": (1, 2)}  # likewise, of constants alone
REPEATING = ("Expand", "Tile")
SCALE = "_scale.log"  # behind the name of a weight: the scale with which it is rounded, see `quantization.prepare`
SCALES = ("Add", "Mul")  # a constant operand of these is a weight if it has more than one element, or is a bias
LARGEST_SCALE = 1e4  # a constant with larger numbers is a mask, which hides elements from a softmax
ARITHMETIC = ("Add", "Sub", "Mul", "Div")
LEARNED_OF = ("Exp", "Sigmoid", "Softplus", "Tanh")  # of a number alone: of a constant exporters would fold them
DOUBTFUL = (*ARITHMETIC, *LEARNED_OF, "Pow", "Max", "Min", "Where")
MULTIPLYING = ("MatMul", "Mul", "Einsum", "Gemm")
WAVES = ("Sin", "Cos")
ROOTS = (0.5, -0.5, 0.25, -0.25)  # of the size of a head: attention scales scores, or queries and keys
LARGEST_EPSILON = 1e-3
GUARDED = (("Sqrt", 0), ("Pow", 0), ("Log", 0), ("Reciprocal", 0), ("Div", 1))  # what epsilons keep from 0
PARAMETER = re.compile(r"[A-Za-z_]+|[A-Za-z_]\w*(\.\w+)+")  # a name that a module gives a parameter
MADE_UP = re.compile(r"val_\d+|helper\.constant\.\d+")  # of torch.onnx and of paddle2onnx
NUMBERED = ("val", "scalar_tensor", "lifted_tensor")  # the names that exporters give constants
MOST_SHARED = 4  # tensors that a note describes
MOST_STEPS = 8  # the most nodes between a product and the sine of it

POSITIONS, FREQUENCIES, INPUT = "positions, as sines", "frequencies of positions", "normalizes an input"
KIND, LEARNED = "pkg.torch.export.graph_signature.InputSpec.kind", "PARAMETER"  # torch.export's; other kinds stay
BUFFER = "a buffer of the module"
FILLING = "fills the place of a scale or a bias"
NORMS = ("InstanceNormalization", "LayerNormalization", "BatchNormalization", "GroupNormalization")
NEUTRAL = {1: 1.0, 2: 0.0}  # at the places of scales and biases

MOST_LOOKED_AT, MOST_ROWS = 64, 4096  # the most rows or columns of a table to check, and rows of these columns
LEAST_ROWS = 8  # the fewest rows of a table of positions; fewer rows can look like one by chance
# The largest error of a sine in a table of this type; the error of float32 sines of large angles reaches 1e-4.
TOLERANCE = {np.dtype(np.float64): 1e-3, np.dtype(np.float32): 1e-3}
LOW_PRECISION = 2e-2


def is_of_sines(values: Callable[[str], np.ndarray], name: str, dims: Iterable[int]) -> bool:
    """Whether a tensor is a table of sinusoidal positions: sines and cosines, with a row for each position."""
    sizes = [size for size in dims if size != 1]
    if len(sizes) < 2 or max(sizes[-2:]) < LEAST_ROWS or len(sizes) > 3:
        return False
    array = values(name)
    kind = TOLERANCE.get(array.dtype, LOW_PRECISION)
    if not np.all(np.abs(array.ravel()[:: max(1, array.size // 4096)].astype(np.float64)) <= 1 + kind):
        return False
    table = array.reshape(sizes)
    if len(sizes) == 3:  # positions along the two axes of images, or a table for each of several heads
        return _has_pairs(table.reshape(-1, sizes[2]), kind) or _has_pairs(table.reshape(sizes[0], -1).T, kind)
    return any(_has_pairs(each, kind) or _has_waves(each, kind) for each in (table, table.T))


def _some(table: np.ndarray) -> np.ndarray:
    """At most `MOST_LOOKED_AT` rows of a table, evenly spread over it, in float64."""
    step = -(-len(table) // MOST_LOOKED_AT)
    return table[::step].astype(np.float64)


def _has_pairs(table: np.ndarray, tolerance: float) -> bool:
    """Whether every row holds the sines and the cosines of the same angles: the sum of its squares is half its size.

    Rows of zeros, as for a class token or padding, are skipped. Of a large table only some rows are checked.
    """
    table = _some(table)
    rows, columns = table.shape
    squares = np.square(table).sum(axis=1)
    kept = squares > 0
    if columns < 4 or columns % 2 or kept.sum() < max(LEAST_ROWS, rows - 2):
        return False
    close = np.abs(squares[kept] - columns / 2) < tolerance * columns
    return bool(close.all()) and bool(np.ptp(table) > 1)


def _has_waves(table: np.ndarray, tolerance: float) -> bool:
    """Whether every column f is a sine over the rows: f(n + m) + f(n - m) = c * f(n), with one c for all n.

    Of a large table only some columns and the first rows are checked.
    """
    table = _some(table[:MOST_ROWS].T).T
    rows = len(table)
    if rows < LEAST_ROWS or np.ptp(table) <= 1:
        return False
    step = max(1, rows // 4)
    middle, sums = table[step:-step], table[2 * step :] + table[: -2 * step]
    squares = np.square(middle).sum(axis=0)
    factors = np.where(squares > 0, (middle * sums).sum(axis=0) / np.where(squares > 0, squares, 1), 2)
    off = np.abs(sums - factors * middle).max()
    # Columns for which c is always 2 are straight lines.
    return bool(off < 4 * tolerance and (np.abs(factors) <= 2 + tolerance).all() and (factors < 1.9).any())


@dataclass(frozen=True)
class Selection:
    """Names of parameters, in the order of the model.

    trainable: parameters that get gradients. frozen: parameters that stay as they are.
    held: the frozen ones that were named in frozen_params.
    constants: float tensors of more than one element that are no parameters.
    shared: for trainable and held weights that several layers read, these.
    torn: biases that a pattern takes without their layers' weights, with a weight's name where it tells no layer.
    untrained: where all weights are taken, the constants that may have been learned, see `Candidates.doubtful`.
    turned: trained weights that are the transposes of other ones, each with that.
    """

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    held: tuple[str, ...]
    constants: tuple[str, ...]
    shared: dict[str, list[str]] = field(default_factory=dict)
    torn: tuple[tuple[str, str], ...] = ()
    untrained: tuple[str, ...] = ()
    turned: tuple[tuple[str, str], ...] = ()

    def notes(self) -> Iterator[str]:
        """What is probably a mistake."""
        if self.shared:
            yield shared_note(self.shared, "trained or frozen", "untie them")
        yield from (turned_note(*each) for each in self.turned[:MOST_SHARED])
        yield from (torn_note(*each) for each in self.torn)
        if self.untrained:
            named = listed(self.untrained)
            yield f"not trained unless named: {named}; nothing tells whether constants like these were learned"


class Candidates:
    """The tensors of a model that could be parameters; the model has no loss yet, whose tensors are constants.

    tensors: as of `tensors_of`. weights: the names of those that the model multiplies, adds or looks up, except
    `fixed`. fixed: for tensors that are used like weights but were never trained, what they are, by name. statistics:
    the names of means and variances of batch normalization. modules: for weights that are not named after the modules
    that read them, the names that they would have there. shared: for weights that several layers read, these: paths of
    modules, or nodes. products: by the name of a bias, that of the weight with whose product it is added. numbers: the
    names of single numbers with the name of a parameter, which are added or multiplied: a gate that was learned looks
    like a constant of a formula; epsilons and roots of sizes, as of attention's scale, are known. doubtful: these, and
    tensors that the model computes with in other ways: centers, thresholds and exponents may be learned. graph: with
    the types of values, unless the model has functions.
    """

    def __init__(self, model: onnx.ModelProto, apart: Mapping[str, Held] | None = None):
        self._apart = apart or {}
        self.tensors = tensors_of(model)
        self._readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        inlined = inline_functions(without_values(model)) if model.functions else model
        self._graph = Graph(inlined)
        self.graph = None if model.functions else self._graph
        self._nodes = list(taken_nodes(self._graph, inlined.graph.node))
        self._inputs = {each.name: each.type.tensor_type.elem_type for each in inlined.graph.input}
        self._producers = {name: node for node in self._nodes for name in node.output if name}
        self._constant = computed_from(self.tensors, self._nodes)
        for node in self._nodes:
            for index, name in enumerate(node.input if reads_values(node) else ()):
                self._readers.setdefault(name, []).append((node, index))
        told = ((each.name, props) for each in model.graph.value_info for props in each.metadata_props)
        self._kinds = {name: props.value for name, props in told if props.key == KIND}
        self.statistics = [name for name in forms.statistics(model) if self._is_float(name)]
        found = [
            name
            for name in self.tensors
            if name not in self.statistics and self._is_float(name) and self._is_weight(name)
        ]
        self.fixed = {name: reason for name in found if (reason := self._reason(name)) is not None}
        if len(self.fixed) == len(found):  # in a model without other weights, scales of the inputs are the weights
            self.fixed = {name: reason for name, reason in self.fixed.items() if reason != INPUT}
        self.weights = [name for name in found if name not in self.fixed]
        self.modules = {name: names for name in self.weights if (names := self._names_in_modules(name))}
        scales = ((f"{name}{SCALE}", [f"{each}{SCALE}" for each in names]) for name, names in self.modules.items())
        self.modules |= {name: names for name, names in scales if name in self.weights}
        self.shared = {name: layers for name in self.weights if len(layers := self._layers(name)) > 1}
        self.products = dict(self._biases())
        known = {*self.weights, *self.statistics, *self.fixed, *self._kinds}
        self.numbers = [
            each.name for each in model.graph.initializer if each.name not in known and self._is_number(each.name)
        ]
        self.doubtful = [
            name for name in self.tensors if name in self.numbers or (name not in known and self._is_doubtful(name))
        ]

    def _values(self, name: str) -> np.ndarray:
        return array_of(self._apart.get(name, self.tensors[name]))

    def _is_float(self, name: str) -> bool:
        return name in self.tensors and self.tensors[name].data_type in FLOATS

    def _is_weight(self, name: str) -> bool:
        if self._kinds.get(name) == LEARNED and name in self._readers:
            return True
        several = size_of(self.tensors[name]) > 1
        return any(
            index in facts_of(node).weights
            or self._is_learned_scale(node)
            or (node.op_type in SCALES and (several or self._is_only_bias(name, node)) and self._is_scale(name))
            for node, index in self._reads(name)
        ) or (several and self._makes_weight(name) and self._is_scale(name))

    def _makes_weight(self, name: str) -> bool:
        """Whether something computed of a tensor and constants alone is a weight, as by weight normalization."""
        seen, waiting = {name}, [name]
        while waiting:
            read = waiting.pop()
            for node, index in self._readers.get(read, ()):
                is_constant = self._constant.issuperset(captured(node))
                if not is_constant and read != name:
                    if index in facts_of(node).weights or node.op_type in SCALES:
                        return True
                    is_constant = is_handed_on(node, index)  # such as repeated for each row of the batch
                computes = is_constant and node.op_type not in (*WAVES, *MIXING)
                if computes and read in differentiable_inputs(self._graph, node):
                    waiting += [each for each in node.output if each not in seen]
                    seen.update(node.output)
        return False

    def _is_number(self, name: str) -> bool:
        if not self._is_float(name) or size_of(self.tensors[name]) != 1 or name.startswith(NUMBERED):
            return False
        operations = [node for node, _ in self._reads(name) if node.op_type in (*ARITHMETIC, *LEARNED_OF)]
        return bool(PARAMETER.fullmatch(name)) and not all(self._is_of_formula(name, node) for node in operations)

    def _is_of_formula(self, name: str, node: onnx.NodeProto) -> bool:
        """Whether a number is an operand that nobody trains: an epsilon, a root of a size as a scale, 1 of 1 - p."""
        array = self._values(name)
        value = abs(float(array.item()))
        if node.op_type == "Sub" and value == 1 and node.input[0] in self.results(name):  # 1 - p
            return True
        if node.op_type == "Add":
            readers = self._readers.get(node.output[0], ())
            return value < LARGEST_EPSILON and any((each.op_type, index) in GUARDED for each, index in readers)
        scaled = [each for each in node.input if each not in self.results(name)]
        makers = [self._producers.get(self._moved(each)) for each in scaled]
        scaled += [each.input[0] for each in makers if each is not None and each.op_type in PRODUCTS]  # queries
        sizes = {size[-1] for each in scaled if (size := self._graph.sizes(each))}
        heads = [size for size in sizes if isinstance(size, int) and size > 1]
        error = 1e-3 if array.itemsize == 2 else 1e-6
        return any(math.isclose(value, size**root, rel_tol=error) for size in heads for root in ROOTS)

    def _is_doubtful(self, name: str) -> bool:
        return (
            self._is_float(name)
            and size_of(self.tensors[name]) > 1
            and any(
                (node.op_type in DOUBTFUL or (node.op_type in FIRST_STATE and not self._is_filling(name)))
                and not domain_of(node)
                for node, _ in self._reads(name)
            )
            and self._is_scale(name)
        )

    def _is_only_bias(self, name: str, node: onnx.NodeProto) -> bool:
        """Whether one number is the bias of a layer with one result: it has an axis, and is added to a product."""
        return bool(self.tensors[name].dims) and node.op_type == "Add" and any(map(self._is_product, node.input))

    def _is_product(self, name: str) -> bool:
        """Whether a value is the product of an input and a float tensor with an axis of one element."""
        node = self._producers.get(self._moved(name))
        if node is None or node.op_type not in PRODUCTS or domain_of(node):
            return False
        factor = self._moved(node.input[1])
        return self._is_float(factor) and 1 in self.tensors[factor].dims

    def _moved(self, name: str) -> str:
        """The value that another one is in another shape or type."""
        while (node := self._producers.get(name)) is not None and facts_of(node).moves:
            name = node.input[0]
        return name

    def _handed_on(self, name: str, node: onnx.NodeProto, index: int) -> Sequence[str]:
        """The results of a node that hold the numbers of a constant operand, which a tensor's become.

        A single number that is repeated is a filling: zeros in the place of a bias, as exporters write them.
        """
        if node.op_type in REPEATING and size_of(self.tensors[name]) == 1:
            return ()
        if is_handed_on(node, index):
            return node.output[:1]
        if domain_of(node):
            return ()
        if node.op_type in FIRST_STATE:
            return self._in_body(node, index)
        if index in MIXING.get(node.op_type, ()):
            return node.output if self._constant.issuperset(captured(node)) and not self._is_filling(name) else ()
        return node.output if index in PARTS.get(node.op_type, ()) else ()

    def _in_body(self, node: onnx.NodeProto, index: int) -> Sequence[str]:
        """The name in a loop's body of an operand that it only reads: a state that stays, or one that is scanned."""
        first, bodies = FIRST_STATE[node.op_type], list(subgraphs(node))
        if index < first or [len(each.input) for each in bodies] != [len(node.input)]:
            return ()
        name = bodies[0].input[index].name
        if index < first + state_count(node):
            last = bodies[0].output[index - bool(first)].name
            while (maker := self._producers.get(last)) is not None and maker.op_type == "Identity":
                last = maker.input[0]
            if last != name:
                return ()
        return (name,)

    def _is_filling(self, name: str) -> bool:
        """Whether all elements of a tensor are the same, as of the zeros that a mask puts into a weight."""
        values = self._values(name).ravel()
        return bool(np.all(values == values[:1]))

    def _reads(self, name: str, parts: bool = True) -> Iterator[tuple[onnx.NodeProto, int]]:
        """The nodes that read a tensor, directly or reshaped or cast, each with the place among its inputs.

        parts: whether through nodes that part it or put it into sequences, too.
        """
        seen, waiting = set(), [name]
        while waiting:
            for node, index in self._readers.get(waiting.pop(), ()):
                yield node, index
                if parts or is_handed_on(node, index):
                    results = [each for each in self._handed_on(name, node, index) if each not in seen]
                    seen.update(results)
                    waiting += results

    def turned(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """The matrices that are the transpose of one before them, as exporters fold a shared weight, with that one."""
        known: dict[tuple[tuple[int, ...], bytes], str] = {}  # by the shape and how the first row begins
        for name in names:
            values = self._values(name)
            if values.ndim != 2 or not values.size:
                continue
            row, column = values[0, :MOST_LOOKED_AT], values[:MOST_LOOKED_AT, 0]  # few pages of a file
            if np.ptp(row) == np.ptp(column) == 0:
                continue
            other = known.get((values.shape[::-1], column.tobytes()))
            if other is not None and np.array_equal(values.T, self._values(other)):
                yield name, other
            known.setdefault((values.shape, row.tobytes()), name)

    def results(self, name: str) -> list[str]:
        """The names under which nodes read a tensor: its own, and those of results that hold its numbers."""
        return [name, *(each for node, index in self._reads(name) for each in self._handed_on(name, node, index))]

    def _names_in_modules(self, name: str) -> list[str]:
        """The names that a weight would have in the modules that read it, if its own name begins with none of these.

        Exporters fold the transposition of a layer's weight and then name it onnx::MatMul_217 or val_98.
        """
        found = []
        for node, index in self._reads(name):
            path, known = module_path(node), name_in_module(name, node, index)
            if (
                known
                and not self._handed_on(name, node, index)
                and not (name.startswith(f"{path}.") if path else "." in name)
            ):
                found.append(known)
        return [each for each in dict.fromkeys(found) if each not in self.tensors]

    def _layers(self, name: str) -> list[str]:
        """What reads a tensor: modules, or nodes where these tell of none."""
        found = (
            layer_of(node, index, self._constant)[0]
            for node, index in self._reads(name, parts=False)
            if not is_handed_on(node, index)
        )
        return list(dict.fromkeys(found))

    def _biases(self) -> Iterator[tuple[str, str]]:
        """Biases, each with the weight with whose product it is added."""
        weights = set(self.weights)
        factors = {
            node.output[0]: name
            for name in self.weights
            for node, index in self._reads(name)
            if node.op_type in PRODUCTS and index == 1
        }
        for node in self._nodes:
            added, products = (node.input, node.input) if node.op_type == "Add" else (node.input[2:3], node.output[:1])
            weight = next((factors[name] for name in products if name in factors), None)
            if weight is not None:
                yield from ((name, weight) for name in added if name in weights)

    def _is_learned_scale(self, node: onnx.NodeProto) -> bool:
        """Whether a node is the exponential of the logarithm of a scale with which something is quantized."""
        readers = self._readers.get(node.output[0], ()) if node.op_type == "Exp" else ()
        return any(each.op_type == "QuantizeLinear" and index == 1 for each, index in readers)

    def _is_scale(self, name: str) -> bool:
        """Whether a constant that is added or multiplied is a scale or bias, and no mask."""
        values = self._values(name)
        with np.errstate(invalid="ignore", over="ignore"):
            is_small = np.all(np.abs(values) < LARGEST_SCALE)
        ones = values == 1
        return bool(is_small) and (not ones.any() or bool(ones.all()) or not np.all(ones | (values == 0)))

    # --- what was never trained ---

    def _reason(self, name: str) -> str | None:
        """What an untrained tensor is, in words; None for a weight."""
        if (kind := self._kinds.get(name)) not in (None, LEARNED):
            return BUFFER
        if self._is_of_frequencies(name):
            return FREQUENCIES
        if kind is None and self._normalizes_input(name):
            return INPUT
        if self._fills(name):
            return FILLING
        return POSITIONS if is_of_sines(self._values, name, self.tensors[name].dims) else None

    def _uses(self, name: str) -> list[onnx.NodeProto]:
        """The nodes that compute with a tensor, directly or reshaped or cast."""
        return [node for node, index in self._reads(name, parts=False) if not is_handed_on(node, index)]

    def _fills(self, name: str) -> bool:
        """Whether an exporter made up the scale or the bias of a normalization that has none, beside named weights.

        It is a Constant node, or has a made up name for the instances that groups are normalized as.
        """
        is_node = name in self._producers and any(map(self._is_float, self._graph.initializers))
        kinds = NORMS if is_node else NORMS[:1] if MADE_UP.fullmatch(name) else ()
        readers = self._readers.get(name, ())
        return bool(kinds and readers) and all(
            node.op_type in kinds and not domain_of(node) and bool(np.all(self._values(name) == NEUTRAL.get(index)))
            for node, index in readers
        )

    def _normalizes_input(self, name: str) -> bool:
        """Whether all readers of the tensor apply it to an input, with a number for each channel or feature.

        A tensor with more than one axis larger than 1, such as a table of positions, is no such normalization.
        """
        nodes = self._uses(name) if sum(size > 1 for size in self.tensors[name].dims) <= 1 else []
        own = {*self.results(name)} if nodes else set[str]()
        return bool(nodes) and all(
            node.op_type in ARITHMETIC
            and not domain_of(node)
            and any(self._is_input(other) for other in node.input if other not in own)
            for node in nodes
        )

    def _is_input(self, name: str) -> bool:
        """Whether a value is a float input, or computed from one and constants element by element."""
        while name not in self._inputs:
            node = self._producers.get(name)
            if node is None or domain_of(node):
                return False
            if facts_of(node).moves:
                name = node.input[0]
                continue
            others = [each for each in node.input if each not in self.tensors]
            if node.op_type not in ARITHMETIC or len(others) != 1:
                return False
            name = others[0]
        return name not in self.tensors

    def _is_of_frequencies(self, name: str) -> bool:
        """Whether a tensor holds frequencies: it is multiplied by positions, and sines are taken of the products."""
        products = self._uses(name)
        return bool(products) and all(
            node.op_type in MULTIPLYING
            and not domain_of(node)
            and self._leads_to_waves(node)
            and self._is_of_integers(node.input, name)
            for node in products
        )

    def _leads_to_waves(self, node: onnx.NodeProto) -> bool:
        names = [*node.output]
        for _ in range(MOST_STEPS):
            readers = [each for name in names for each, _ in self._readers.get(name, ())]
            if any(each.op_type in WAVES for each in readers):
                return True
            names = [
                each.output[0] for each in readers if facts_of(each).moves or each.op_type in (*ARITHMETIC, "Concat")
            ]
        return False

    def _is_of_integers(self, names: Iterable[str], but: str) -> bool:
        """Whether values are computed from integers alone, except for scalar constants."""
        seen, waiting = {but}, [name for name in names if name]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.tensors:
                if self._is_float(name) and size_of(self.tensors[name]) > 1:
                    return False
            elif name in self._inputs:
                if self._inputs[name] in FLOATS:
                    return False
            elif (node := self._producers.get(name)) is not None:
                waiting += captured(node) if reads_values(node) else []
        return True


def reaching(forward: Graph, loss: str) -> set[str]:
    """The names of the values with respect to which a loss can be differentiated."""
    found = {loss}
    for node in reversed(forward.graph.node):
        if found.intersection(node.output):
            found.update(differentiable_inputs(forward, node))
    return found


def select(
    forward: Graph,
    loss: str,
    requires_grad: Iterable[str] | None,
    frozen_params: Iterable[str] | None,
    candidates: Candidates,
) -> Selection:
    """Choose the parameters of a graph with a loss.

    candidates: of the model without it; tensors of the loss are parameters only if they are named in full.
    requires_grad: names or patterns; None: all weights on which the loss depends. frozen_params: names or patterns.
    The statistics of batch normalizations in training mode become frozen parameters, which each step updates.

    Raises ValueError for names and patterns that match nothing, and for a model without weights.
    """
    model = forward.model
    inputs, tensors = [each.name for each in model.graph.input], tensors_of(model)
    modules, parameters = candidates.modules, [*candidates.weights, *candidates.statistics]
    names = [*tensors, *inputs]
    named, matched = matching("requires_grad", requires_grad or (), names, candidates.weights, modules)
    frozen_by_name, frozen_by_pattern = matching("frozen_params", frozen_params or (), tensors, parameters, modules)
    if both := [name for name in named if name in set(frozen_by_name)]:
        raise ArgumentError("frozen_params", f"has {listed(both)}, expected none that is to be trained")
    held = {*frozen_by_name, *(name for name in frozen_by_pattern if name not in named)}
    frozen, by_pattern = set(held), {*matched, *frozen_by_pattern}
    if requires_grad is None:
        if not candidates.weights:
            raise ValueError(no_weights(forward.model))
        depended = reaching(forward, loss)
        matched = [name for name in candidates.weights if name in depended]
        if not matched:
            known = listed(candidates.weights)
            raise ValueError(f"the loss {loss!r} depends on no weight of the model, of which it has {known}")
        frozen |= set(candidates.statistics)
    trainable = {*named, *(name for name in matched if name not in frozen)}
    frozen |= {name for name in forms.statistics(model, training=True) if name in tensors} - trainable
    others = {name for name, each in tensors.items() if each.data_type in FLOATS and size_of(each) > 1}
    groups = trainable, frozen, held, others - trainable - frozen
    trained, stay, named_to_stay, constants = (
        tuple(name for name in [*inputs, *tensors] if name in group) for group in groups
    )
    shared = {name: layers for name, layers in candidates.shared.items() if name in {*trainable, *held}}
    torn = torn_layers(candidates, by_pattern, trainable)
    untrained = [name for name in candidates.doubtful if requires_grad is None and name in depended - frozen]
    turned = tuple(candidates.turned(name for name in trained if name in candidates.tensors))
    return Selection(trained, stay, named_to_stay, constants, shared, torn, tuple(untrained), turned)


def torn_layers(
    candidates: Candidates, matched: Collection[str], trainable: Collection[str]
) -> tuple[tuple[str, str], ...]:
    """Biases that a pattern takes without the weights of their layers; see `Selection`.

    matched: the names of what patterns match.
    """
    found = []
    for bias, weight in candidates.products.items():
        layer, names = bias.rpartition(".")[0], (weight, *candidates.modules.get(weight, ()))
        known = not layer or any(name.startswith(f"{layer}.") for name in names)
        if bias in matched and not known and (bias in trainable) != (weight in trainable):
            found.append((bias, weight))
    return tuple(found)


def torn_note(bias: str, weight: str) -> str:
    """The note about a bias that a pattern takes without the weight of its layer."""
    return (
        f"a pattern takes {bias!r} and not {weight!r}, the weight of the same layer, whose name tells nothing of the "
        "layer; name it, too"
    )


def shared_note(shared: Mapping[str, Sequence[str]], fate: str, remedy: str) -> str:
    """The note about weights that several layers read. fate: of all of them. remedy: what a user can do."""
    described = [f"{name!r} by {listed(layers, 3)}" for name, layers in list(shared.items())[:MOST_SHARED]]
    more = [f"{len(shared) - MOST_SHARED} more tensors"] if len(shared) > MOST_SHARED else []
    return (
        f"{quantity(len(shared), 'tensor')} read by several layers, {fate} as one: {'; '.join([*described, *more])}; "
        f"{remedy} if only their first values are the same"
    )


def turned_note(name: str, other: str) -> str:
    """The note about a weight that is the transpose of another; see `Candidates.turned`."""
    return (
        f"{name!r} is the transpose of {other!r}, as exporters fold a weight that layers share, and is trained "
        "apart; export with do_constant_folding=False or, with dynamo=True, optimize=False to train them as one"
    )


def no_weights(model: onnx.ModelProto) -> str:
    held = {each.name for each in model.graph.initializer}
    quantized = [
        node for node in all_nodes(model.graph.node) if facts_of(node).quantized and held.intersection(node.input)
    ]
    text = "the model has no weights, expected float tensors that it multiplies, adds or looks up"
    if not quantized:
        classical = next((node.op_type for node in all_nodes(model.graph.node) if domain_of(node) == CLASSICAL), None)
        return text if classical is None else f"{text}: those of {classical} are attributes, which are not trained"
    return (
        f"{text}: those of {quantity(len(quantized), 'node')} such as {quantized[0].op_type} are quantized, integers "
        "that no step can change a little; train the float model that this was made of, and quantize the result"
    )
