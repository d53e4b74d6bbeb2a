"""Writes a model of an artifact set with operators that every onnxruntime has: others become functions of the model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper

from opgrad.base.arguments import require
from opgrad.contract.quantized import BYTE
from opgrad.onnx.graph.conversion import LEAST, raise_opset
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.messages import MICROSOFT, attribute_of, copied, declared_types, domain_of, keep, opset_of
from opgrad.onnx.graph.nodes import is_known, model_nodes, names_in
from opgrad.onnx.passes.patterns import use_internal_losses
from opgrad.onnx.plain.lowering import DOMAIN
from opgrad.onnx.plain.quantized import DEFAULTS
from opgrad.onnxruntime import LOWERED, lower
from opgrad.training.export.layout import Constants
from opgrad.training.make.outputs import declare_types

# Operators of com.microsoft that onnxruntime, onnxruntime-node and onnxruntime-web all have on the CPU: where a model
# has them, its step has them, too.
STOCK = (
    *("DequantizeLinear", "GatherBlockQuantized", "GroupQueryAttention", "MatMulNBits", "MultiHeadAttention"),
    *("RotaryEmbedding", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
)


def plain_model(model: onnx.ModelProto, opset: int | None) -> onnx.ModelProto:
    """The same model in operators of ai.onnx and of `STOCK`, and functions of those of ai.onnx.

    model: a training or an eval graph, which is not changed. opset: that of the result; None: the model's, or the
        least that functions can be written for.
    Raises NotImplementedError, naming the operator, where there is no such form, ValueError for an older opset.
    """
    require(opset is None or opset >= LEAST, "opset", opset, f"{LEAST} at least")
    typed = inliner.inline_local_functions(model) if model.functions else copied(model)
    declare_types(typed)
    use_internal_losses(typed)
    raise_opset(typed, opset or LEAST)
    least = opset_of(typed)
    require(opset is None or opset >= least, "opset", opset, f"{least} at least, which the graph needs")
    lowered = lower(typed, operators=LOWERED)
    lack = set()
    for node in model_nodes(lowered):
        is_stock = domain_of(node) == MICROSOFT and node.op_type in STOCK
        is_plain = not domain_of(node) and is_known(node.op_type, opset_of(lowered))
        if not is_stock and not is_plain and domain_of(node) != DOMAIN:
            lack.add(":".join(filter(None, (node.domain, node.op_type))))
    if lack:
        raise NotImplementedError(
            f"the graph has {', '.join(sorted(lack))}, of which there is no form of plain ONNX operators: "
            "export the model without fusions, or write the node with operators of ai.onnx"
        )
    return lowered


def only_plain_imports(model: onnx.ModelProto) -> None:
    """Let a model import ai.onnx, and the domains of functions and of `STOCK` where it has such nodes."""
    used = {node.domain for node in model_nodes(model)} | {""}
    keep(model.opset_import, [each for each in model.opset_import if each.domain in used])


BLOCKS = 21  # the first opset whose DequantizeLinear takes blocks, and uint4
KINDS = {4: TensorProto.UINT4, 8: TensorProto.UINT8}  # by bits
LARGEST = 1 << 24  # numbers that are unpacked at once: 64 MB as float32


@dataclass(frozen=True)
class BlockProduct:
    """A node of QuantizedMatMulGrad: dx = dy @ w. rows, columns: of w. blocks: of a row, each of `block` columns."""

    node: onnx.NodeProto
    rows: int
    columns: int
    block: int
    bits: int
    zero_point: int

    @property
    def blocks(self) -> int:
        """How many blocks a row has; the last one may be filled up."""
        return -(-self.columns // self.block)

    @property
    def row_bytes(self) -> int:
        return self.blocks * self.block * self.bits // BYTE


def use_blocks(model: onnx.ModelProto, constants: Constants, opset: int | None) -> None:
    """Write the nodes of QuantizedMatMulGrad whose weights are constants of 4 or 8 bits, in blocks, with others.

    model: a training graph, which is changed, in which large constants are inputs. opset: that of the result, if it is
    told. Other nodes, and all of them below opset 21, stay.
    """
    stored = [each for each in model.graph.initializer if each.data_type == TensorProto.UINT8]
    values = {each.name: numpy_helper.to_array(each) for each in stored}
    values |= {name: each for name, each in constants.arrays.items() if each.dtype == np.uint8}
    products = _products(model, values)
    if not products or (opset is not None and opset < BLOCKS):
        return
    if opset_of(model) < BLOCKS:
        raise_opset(model, opset or BLOCKS)
        products = _products(model, values)
    writer = _BlockWriter(model, constants, values)
    written = {each.node.output[0]: each for each in products}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        product = written.get(node.output[0]) if node.output else None
        nodes.extend([node] if product is None else writer.nodes(product))
    keep(model.graph.node, nodes)
    model.graph.initializer.extend([*writer.body.initializers, *writer.tensors.values()])


def _products(model: onnx.ModelProto, values: Mapping[str, np.ndarray]) -> list[BlockProduct]:
    """The products of a graph. values: those of bytes, of weights and zero points."""
    types = declared_types(model.graph)
    return [found for node in model.graph.node if (found := _product(node, values, types)) is not None]


def _product(
    node: onnx.NodeProto, values: Mapping[str, np.ndarray], types: Mapping[str, onnx.TypeProto]
) -> BlockProduct | None:
    """A node as a product, None for what DequantizeLinear cannot unpack."""
    if node.op_type != "QuantizedMatMulGrad" or domain_of(node) != MICROSOFT:
        return None
    given = DEFAULTS | dict(map(attribute_of, node.attribute))
    inputs = [*node.input, "", ""]
    plain = given["row_block"] == 1 and given["transB"] and not given["signed"] and not inputs[4]
    known = inputs[1] in values and (not inputs[3] or inputs[3] in values) and given["zero_point"] % 1 == 0
    block, declared = given["column_block"], types.get(inputs[0])
    single = declared is None or declared.tensor_type.elem_type == TensorProto.FLOAT
    if not (plain and known and single) or given["bits"] not in KINDS or block < 2:
        return None
    found = BlockProduct(node, given["N"], given["K"], block, given["bits"], int(given["zero_point"]))
    return found if values[inputs[1]].nbytes == found.rows * found.row_bytes else None


class _BlockWriter:
    """Writes products with weights of blocks. tensors: the initializers that it needs."""

    def __init__(self, model: onnx.ModelProto, constants: Constants, values: Mapping[str, np.ndarray]):
        self.body = GraphBody(opset_of(model), names_in(model.graph))
        self.tensors: dict[str, TensorProto] = {}
        self._constants, self._values = constants, values
        self._inputs = {each.name for each in model.graph.input}

    def nodes(self, product: BlockProduct) -> list[onnx.NodeProto]:
        """dx = dy @ w as the sum of products with some rows of w each, as many as `LARGEST` allows."""
        body, node = self.body, product.node
        body.scope(node.name or node.output[0])
        step = max(LARGEST // product.columns, 1)
        bounds = [*range(0, product.rows, step), product.rows]
        dy = Value(body, node.input[0], TensorProto.FLOAT)
        pieces = [dy]
        if len(bounds) > 2:
            pieces = body.nodes_of("Split", len(bounds) - 1, dy, body.ints(np.diff(bounds).tolist()), axis=-1)
        # The shape depends on dy, though it is always the same: weights are unpacked when dy is there, and not before.
        shape = body.ints([product.rows, product.blocks]) + (dy.size() < 0).cast(TensorProto.INT64)
        scales = Value(body, node.input[2], TensorProto.FLOAT).reshape(shape)
        terms = []
        for piece, first, last in zip(pieces, bounds, bounds[1:], strict=False):
            some = scales if len(bounds) == 2 else scales.slice(first, last)
            stored, zeros = (part(product, first, last) for part in (self._weights, self._zeros))
            w = body.node("DequantizeLinear", stored, some, zeros, axis=1, block_size=product.block)
            terms.append(body.node("MatMul", piece, w))
        dx = terms[0] if len(terms) == 1 else body.node("Sum", *terms)
        if product.columns % product.block:
            dx = dx.slice(0, product.columns, -1)
        made, body.nodes = body.nodes, []
        return [*made, helper.make_node("Identity", [dx.name], [node.output[0]], node.name)]

    def _weights(self, product: BlockProduct, first: int, last: int) -> Value:
        """Some rows of the stored numbers, as a matrix."""
        source, kind = product.node.input[1], KINDS[product.bits]
        sizes = last - first, product.blocks * product.block
        place = first * product.row_bytes, last * product.row_bytes

        def made(name: str) -> TensorProto:
            if source in self._inputs:
                return self._constants.part(name, source, kind, sizes, *place)
            content = self._values[source].reshape(-1)[slice(*place)].tobytes()
            return helper.make_tensor(name, kind, sizes, content, raw=True)

        return self._once(f"{source}/rows.{first}.{last}", kind, made)

    def _zeros(self, product: BlockProduct, first: int, last: int) -> Value:
        """The zero points of some rows' blocks."""
        source, kind = [*product.node.input, ""][3], KINDS[product.bits]
        rows, blocks = last - first, product.blocks

        def made(name: str) -> TensorProto:
            numbers = np.full((rows, blocks), product.zero_point, np.uint8)
            if source:
                numbers = self._values[source].reshape(product.rows, -1)[first:last]
                if product.bits < BYTE:
                    numbers = np.stack([numbers & 15, numbers >> 4], 2).reshape(rows, -1)[:, :blocks]
            return helper.make_tensor(name, kind, (rows, blocks), _packed(numbers, product.bits), raw=True)

        key = f"{source}/rows.{first}.{last}" if source else f"zero_points.{product.zero_point}.{rows}.{blocks}"
        return self._once(key, kind, made)

    def _once(self, key: str, dtype: int, made: Callable[[str], TensorProto]) -> Value:
        """The initializer that is made with a name like this one; it is made when it is first asked for."""
        if key not in self.tensors:
            self.tensors[key] = made(self.body.free(key))
        return Value(self.body, self.tensors[key].name, dtype)


def _packed(numbers: np.ndarray, bits: int) -> bytes:
    """Numbers as ONNX stores tensors of so many bits: behind each other, the lower half of a byte first."""
    if bits == BYTE:
        return numbers.astype(np.uint8).tobytes()
    flat = np.append(numbers.reshape(-1), np.zeros(numbers.size % 2, numbers.dtype)).reshape(-1, 2).astype(np.uint8)
    return bytes((flat[:, 0] | flat[:, 1] << 4).tobytes())
