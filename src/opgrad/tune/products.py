"""Finds the products with weights in a language model, and what each is for, by the structure of the graph."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto

from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import FEW_BITS, FLOATS, MICROSOFT, copied, domain_of
from opgrad.onnx.graph.nodes import attributes_of, module_path, needed

TABLES = ("Gather", "GatherBlockQuantized")
ATTENTION = ("GroupQueryAttention", "MultiHeadAttention", "Attention", "SparseAttention", "PackedMultiHeadAttention")
CONVOLUTIONS = ("CausalConvWithState", "LinearAttention")  # that stand in a layer where attention stands in others
PRODUCTS = ("MatMul", "FusedMatMul")  # of two values
ROUNDING = ("QuantizeLinear", "DequantizeLinear")  # of activations, around any node
# What stands between products and attention and changes no number, or each row by itself.
BETWEEN = (
    *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Cast", "Expand", "Concat", "Split", "Slice", "Add"),
    *("RotaryEmbedding", "SimplifiedLayerNormalization", "RMSNormalization", "LayerNormalization", "Mul", "Div", "Neg"),
    *("MRotaryEmbedding", "Where", "Sqrt", *ROUNDING),
)
MOVING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", *ROUNDING)
SINKS = ("Concat", "Sub", "Slice")  # how a score that takes probability from the others stands behind them
ACTIVATIONS = ("Sigmoid", "Gelu", "FastGelu", "QuickGelu", "Relu", "Silu", "Swish", "Tanh", "Erf", "BiasGelu")
# In a perceptron.
ELEMENTWISE = (*ACTIVATIONS, "Mul", "Add", "Div", "Cast", "Pow", "Identity", "Split", "Slice", *ROUNDING)
FLOAT_BITS = {TensorProto.DOUBLE: 64, TensorProto.FLOAT: 32, TensorProto.FLOAT16: 16, TensorProto.BFLOAT16: 16}
BITS: dict[int, int] = FLOAT_BITS | FEW_BITS  # of a stored number
THROUGH = ("DequantizeLinear", "Transpose", "Cast", "Identity", "Reshape")  # between a stored weight and its product


@dataclass(frozen=True)
class WeightProduct:
    """A product of activations and a stored weight, or a table from which rows are looked up.

    node: the name of its node. op: its operator. layer: the number of its layer, -1 outside of layers.
    role: q, k, v, o, qkv, gate, up, down, head, embedding, or other.
    input, output: the names of what it reads and of its result, before a bias that another node adds.
    weight: the name of the stored weight. inputs, outputs: the sizes of their last axes; of a table rows and columns.
    parts: of a result that others split, the role of each part, its first column and the one behind its last.
    bits: of a stored number of the weight. trainable: whether the weight is a float tensor.
    shared: whether another product has the same weight.
    module: the path of the module that it was exported from, "" if it is not known.
    bias: the initializer that is added to the result, "" if there is none.
    """

    node: str
    op: str
    layer: int
    role: str
    input: str
    output: str
    weight: str
    inputs: int
    outputs: int
    parts: tuple[tuple[str, int, int], ...] = ()
    bits: int = 32
    trainable: bool = True
    shared: bool = False
    module: str = ""
    bias: str = ""


def unreached(model: onnx.ModelProto, logits: str) -> int:
    """How many products of a stored weight do not reach the scores."""
    nodes, held = list(model.graph.node), {each.name for each in model.graph.initializer}
    reached = {node.output[0] for node in needed(nodes, [logits])}
    places = [(node, facts_of(node).stored) for node in nodes if node.op_type not in TABLES]
    return sum(
        index is not None and index < len(node.input) and node.input[index] in held and node.output[0] not in reached
        for node, index in places
    )


class _ProductSearch:
    def __init__(self, graph: Graph, tokens: str, logits: str):
        self._graph, self._tokens, self._logits = graph, tokens, logits
        self._found: dict[str, WeightProduct] = {}  # by result, as all of these
        self._roles, self._parts = dict[str, str](), dict[str, tuple[tuple[str, int, int], ...]]()
        for node in graph.nodes():
            if (product := self._product(node)) is not None:
                self._found[product.output] = product

    def products(self) -> Iterator[WeightProduct]:
        """All of them, with their roles and layers."""
        attentions = list(self._attentions())
        roles = self._roles
        for node, operands in attentions:
            self._name_operands(node, operands)
            for product in self._behind(node.output[0]):
                roles.setdefault(product, "o")
        head = self._before(self._logits, (*BETWEEN, "Tanh"))  # a softcap stands behind it
        roles |= dict.fromkeys(head, "head")
        self._name_others()
        mixers = attentions + [(node, node.input[:1]) for node in self._graph.nodes() if node.op_type in CONVOLUTIONS]
        before = {name for _, operands in mixers for each in operands for name in self._before(each)}
        following = self._following({id(node) for node, _ in mixers})
        count, weights = max(following.values(), default=0), Counter(each.weight for each in self._found.values())
        # Names of weights begin with a module that is in no path where others call its parts instead of itself.
        named = [each for each in self._found.values() if each.weight.endswith(f".{each.module}.weight")]
        paths = {each.module.partition(".")[0]: each.weight.removesuffix(f"{each.module}.weight") for each in named}
        for name, found in self._found.items():
            role = roles.get(name, "other")
            layer = count - following.get(name, 0) - (name not in before)
            outside = role in ("head", "embedding") or not mixers
            layer, shared = -1 if outside else layer, weights[found.weight] > 1
            module = paths.get(found.module.partition(".")[0], "") + found.module
            yield replace(found, role=role, layer=layer, parts=self._parts.get(name, ()), shared=shared, module=module)

    # --- single products ---

    def _product(self, node: onnx.NodeProto) -> WeightProduct | None:
        index = facts_of(node).stored
        if node.op_type == "MatMulInteger":
            return self._dynamic(node)
        if index is None or len(node.input) <= index:
            return None
        weight = self._stored(node.input[index])
        if weight is None:
            return None
        tensor, given = self._graph.initializers[weight], attributes_of(node)
        sizes = self._sizes(node, index, given)
        if sizes is None or (node.op_type in TABLES and not self._is_lookup(node)):
            return None
        operand, bits = node.input[1 if node.op_type in TABLES else 0], given.get("bits")
        if not isinstance(bits, int):
            bits = BITS.get(tensor.data_type, 8)
        return WeightProduct(
            node=node.name, op=node.op_type, layer=-1, role="other", input=operand, output=node.output[0],
            weight=weight, inputs=sizes[0], outputs=sizes[1], bits=bits,
            trainable=tensor.data_type in FLOATS and weight == node.input[index], module=module_path(node) or "",
            bias=self._bias(node),
        )  # fmt: skip

    def _dynamic(self, node: onnx.NodeProto) -> WeightProduct | None:
        """A product of bytes whose operand is quantized while it runs: from the floats before that to those behind."""
        operand, weight = self._graph.maker(node.input[0], "DynamicQuantizeLinear"), node.input[1]
        cast, sizes = self._graph.reader(node.output[0], "Cast"), self._graph.known(weight)
        scaled = None if cast is None else self._graph.reader(cast.output[0], "Mul")
        if operand is None or scaled is None or weight not in self._graph.initializers or len(sizes or ()) != 2:
            return None
        inputs, outputs = sizes or (0, 0)
        return WeightProduct(
            node=node.name, op=node.op_type, layer=-1, role="other", input=operand.input[0], output=scaled.output[0],
            weight=weight, inputs=inputs, outputs=outputs, bits=8, trainable=False, module=module_path(node) or "",
            bias=self._bias(scaled),
        )  # fmt: skip

    def _bias(self, node: onnx.NodeProto) -> str:
        index = facts_of(node).bias
        sums = [each for each in self._graph.readers.get(node.output[0], ()) if each.op_type == "Add"]
        added = [*(node.input[index : index + 1] if index else ()), *(name for each in sums for name in each.input)]
        return next((name for name in added if name in self._graph.initializers), "")

    def _stored(self, name: str) -> str | None:
        """The initializer that a weight is, or is made of."""
        while name not in self._graph.initializers:
            node = self._graph.producers.get(name)
            if node is None or node.op_type not in THROUGH or not node.input:
                return None
            name = node.input[0]
        return name

    def _sizes(self, node: onnx.NodeProto, index: int, given: Mapping[str, object]) -> tuple[int, int] | None:
        """The sizes of the last axes of operand and result."""
        if node.op_type == "MatMulNBits":
            k, n = given.get("K"), given.get("N")
            return (k, n) if isinstance(k, int) and isinstance(n, int) else None
        if node.op_type == "GatherBlockQuantized":
            stored = self._graph.known(node.input[0])
            packed = self._graph.element_type(node.input[0]) == TensorProto.UINT8
            bits = given.get("bits", 4)
            each = 8 // bits if packed and isinstance(bits, int) else 1
            return None if stored is None else (stored[0], math.prod(stored[1:]) * each)
        sizes = self._graph.known(node.input[index])
        if sizes is None or len(sizes) < 2 or (node.op_type != "Conv" and len(sizes) > 2):
            return None
        if node.op_type == "Conv":
            return (sizes[1], sizes[0]) if given.get("group", 1) == 1 and sizes[2:] == [1, 1] else None
        if given.get("transA", 0) or given.get("transBatchA", 0) or given.get("transBatchB", 0):
            return None
        return (sizes[1], sizes[0]) if given.get("transB", 0) else (sizes[0], sizes[1])

    def _is_lookup(self, node: onnx.NodeProto) -> bool:
        return node.input[1] == self._tokens or self._tokens in self._graph.before(node.input[1])

    # --- attention ---

    def _attentions(self) -> Iterator[tuple[onnx.NodeProto, Sequence[str]]]:
        """Nodes of attention with the names of queries, keys and values; the second of two products otherwise."""
        for node in self._graph.nodes():
            if node.op_type in ATTENTION and domain_of(node) in ("", MICROSOFT):
                packed = node.op_type == "Attention" and domain_of(node) == MICROSOFT
                yield node, [each for each in node.input[: 1 if packed else 3] if each]
            elif node.op_type in PRODUCTS and self._stored(node.input[1]) is None:
                scores = self._scores(node.input[0])
                if scores is not None:
                    yield node, [*scores.input[:2], node.input[1]]

    def _scores(self, name: str) -> onnx.NodeProto | None:
        """The product of queries and keys behind whose softmax a value stands."""
        softmax, steps = False, ("Softmax", "Add", "Mul", "Div", "Tanh", "Where", "Dropout", *MOVING, "Cast", *SINKS)
        for _ in range(24):
            node = self._graph.producers.get(name)
            if node is None:
                return None
            if node.op_type in PRODUCTS:
                return node if softmax and self._stored(node.input[1]) is None else None
            if node.op_type not in steps:
                return None
            softmax = softmax or node.op_type == "Softmax"
            name = node.input[0]
            if node.op_type == "Where":  # instead of what is masked, or is no number, a constant stands
                name = next((each for each in node.input[1:] if not self._is_fixed(each)), node.input[1])
        return None

    def _is_fixed(self, name: str) -> bool:
        """Whether a value is the same whatever the tokens are, be it a constant in another shape."""
        while (node := self._graph.producers.get(name)) is not None and node.op_type in THROUGH:
            name = node.input[0]
        return self._graph.constant(name) is not None

    def _name_operands(self, node: onnx.NodeProto, operands: Sequence[str]) -> None:
        """Note the roles of the products whose results are queries, keys and values."""
        found = [next(iter(self._before(each)), None) for each in operands]
        if len(found) == 3 and len(set(found)) == 3:
            self._roles |= {name: role for name, role in zip(found, "qkv", strict=True) if name is not None}
            return
        name = found[0] if found else None
        if name is None:
            return
        self._roles[name] = "qkv"
        sizes, columns = None, self._found[name].outputs
        if len(found) == 3:
            sizes = self._split_sizes(name)
        else:  # attention takes them whole
            given = attributes_of(node)
            heads, shared = given.get("num_heads"), given.get("kv_num_heads", given.get("num_heads"))
            if isinstance(heads, int) and isinstance(shared, int) and columns % (heads + 2 * shared) == 0:
                head = columns // (heads + 2 * shared)
                sizes = [heads * head, shared * head, shared * head]
        if sizes is not None and sum(sizes) == columns:
            ends = [sum(sizes[: index + 1]) for index in range(3)]
            bounds = zip("qkv", ends, sizes, strict=True)
            self._parts[name] = tuple((role, end - size, end) for role, end, size in bounds)

    def _split_sizes(self, name: str) -> list[int] | None:
        """The sizes of queries, keys and values that a Split node makes of a product's result, perhaps with a bias."""
        for _ in range(3):
            for node in self._graph.readers.get(name, []):
                if node.op_type == "Split" and len(node.output) == 3:
                    last = [(self._graph.sizes(each) or [None])[-1] for each in node.output]
                    sizes = [size for size in last if isinstance(size, int)]
                    return sizes if len(sizes) == len(last) else None
            following = [node for node in self._graph.readers.get(name, []) if node.op_type in ("Add", "Reshape")]
            if len(following) != 1:
                return None
            name = following[0].output[0]
        return None

    def _before(self, name: str, between: Sequence[str] = BETWEEN) -> list[str]:
        """The results of the nearest products before a value, through operators that may stand between."""
        seen, waiting, found = set[str](), [name], []
        while waiting:
            each = waiting.pop(0)
            if each in seen:
                continue
            seen.add(each)
            if each in self._found and self._found[each].op not in TABLES:
                found.append(each)
            elif (node := self._graph.producers.get(each)) is not None and node.op_type in between:
                waiting += list(node.input)
        return found

    def _behind(self, name: str) -> list[str]:
        """The result of the product that reads the result of attention, perhaps reshaped."""
        for _ in range(12):
            if found := [each.output for each in self._found.values() if each.input == name and each.op not in TABLES]:
                return found[:1]
            readers = self._graph.readers.get(name, [])
            moved = [node for node in readers if node.op_type in (*MOVING, "Cast", "Mul")]
            if len(moved) != 1:
                return []
            name = moved[0].output[0]
        return []

    # --- the others ---

    def _name_others(self) -> None:
        """Note the roles of tables, and of the products of multi-layer perceptrons: of two of which one is activated,
        that is the gate; the one that reads what comes of them is `down`."""
        roles = self._roles
        for name, product in self._found.items():
            if product.op in TABLES:
                roles[name] = "embedding"
            elif name not in roles and self._is_activated(name):
                roles[name] = "gate"
        for name, product in self._found.items():
            if name in roles:
                continue
            nearest = self._before(product.input, ELEMENTWISE)
            before = [each for each in nearest if roles.get(each, "gate") in ("gate", "up")]
            if gates := [each for each in before if roles.get(each) == "gate"]:
                roles[name] = "down"
                roles |= {each: "up" for each in before if each not in gates}
                if len(before) == 1:
                    roles[before[0]] = "up"  # an activation without a gate

    def _is_activated(self, name: str) -> bool:
        """Whether an activation reads a product's result, perhaps with a bias."""
        readers = list(self._graph.readers.get(name, []))
        for node in readers:
            if node.op_type in ROUNDING or (node.op_type == "Add" and name in (node.input[0], node.input[1])):
                readers += self._graph.readers.get(node.output[0], [])
        return any(node.op_type in ACTIVATIONS for node in readers)

    def _following(self, mixers: set[int]) -> dict[str, int]:
        """By value, how many nodes in which tokens act on others stand on the longest way from it."""
        found: dict[str, int] = {}
        for node in reversed(list(self._graph.nodes())):
            count = max((found.get(name, 0) for name in node.output), default=0) + (id(node) in mixers)
            for name in node.input:
                found[name] = max(found.get(name, 0), count)
        return found


def find_products(model: onnx.ModelProto, tokens: str, logits: str) -> tuple[WeightProduct, ...]:
    """The products of a model from tokens to scores, in the order of its nodes."""
    return tuple(_ProductSearch(Graph(copied(model)), tokens, logits).products())
