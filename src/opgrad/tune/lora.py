"""Low-rank adapters (LoRA): what they are asked to be, which products get them, and the nodes that compute them.

With DoRA they also learn the length of each column of a weight, m:
y = (x · W + x · A · B · scale) · m / |W + A · B · scale|, where the norm of each column counts as a constant for
gradients. |w + a b|² = |w|² + 2 b · (aᵀ w) + b · (aᵀ a) b needs norms of W and Aᵀ · W alone: W stays as it lies.
"""

import math
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import onnx
from onnx import TensorProto

from opgrad.base.arguments import ArgumentError, naming, require
from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.messages import keep, opset_of
from opgrad.onnx.graph.nodes import attributes_of, names_in, rename, rename_inputs
from opgrad.ops.quantized import floats_of
from opgrad.training.files.tensor_values import array_of
from opgrad.training.make.checks import listed, near
from opgrad.training.make.tensors import fits
from opgrad.tune.language_model import LanguageModel, attributes_of_nbits
from opgrad.tune.options import parsed
from opgrad.tune.products import TABLES, WeightProduct

ATTENTION = ("q", "k", "v", "o", "qkv")  # roles of the products that get adapters by default
LINEAR = "all-linear"  # a target: every product of layers
EXPERTS = ("MoE", "QMoE")
MATRICES = ("MatMul", "Gemm", "MatMulNBits", "FusedMatMul", "MatMulInteger", "Conv")
WITH_DORA = ("MatMul", "Gemm", "MatMulNBits", "FusedMatMul")


@dataclass(frozen=True)
class Lora:
    """Adapters of one kind: to a product x · W they add (x · A) · B · scale.

    rank: the columns of A, r. alpha: scale is alpha / r, or with `rslora` alpha / sqrt(r).
    target: patterns with "|" between them, of names of weights, of nodes, of modules such as `*q_proj`, or roles such
        as q; "all-linear" is every product of the layers; None is the products of attention.
    dropout: the share of x that is dropped in training, before A; nothing is dropped of tokens that a table looks up.
    dora: whether the length of each column of the whole weight is learned, too; see `dora`.

    Source: LoRA, arXiv 2106.09685; rsLoRA, arXiv 2312.03732; DoRA, arXiv 2402.09353.
    """

    rank: int = 8
    alpha: float = 16.0
    target: str | None = None
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False

    @naming("Lora")
    def __post_init__(self) -> None:
        require(type(self.rank) is int and 1 <= self.rank <= 4096, "rank", self.rank, "a whole number from 1 to 4096")
        number = isinstance(self.alpha, int | float) and 0 < self.alpha <= sys.float_info.max
        require(number, "alpha", self.alpha, "a number above 0")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "a number from 0 to below 1")

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @classmethod
    @naming("Lora")
    def parse(cls, text: str) -> "Lora":
        """Adapters by a text such as `rank=8, alpha=16, target=*q_proj*|*v_proj*`. Raises ArgumentError."""
        return parsed(cls, text, "lora")


@dataclass(frozen=True)
class Adapter:
    """An adapter beside a product, or beside some columns of its result.

    name: the module's, as PEFT has it: `name.lora_A.weight`, `name.lora_B.weight`, DoRA's `name.lora_magnitude_vector`.
    product: the product. lora: what it is. first, last: the columns of the result that it adds to, the last excluded.
    norms: with DoRA, the squared norms of the columns of the weight, float64 [outputs].
    """

    name: str
    product: WeightProduct
    lora: Lora
    first: int
    last: int
    norms: np.ndarray | None = field(default=None, compare=False)

    @property
    def a(self) -> str:
        """The name of A, [inputs, rank]; of a table [rows, rank]; of a convolution [rank, inputs, 1, 1]."""
        return f"{self.name}.lora_A.weight"

    @property
    def b(self) -> str:
        """The name of B, [rank, outputs]; of a convolution [outputs, rank, 1, 1]."""
        return f"{self.name}.lora_B.weight"

    @property
    def magnitude(self) -> str:
        """The name of the columns' lengths, [outputs]; deployed it is their share of what they are without it."""
        return f"{self.name}.lora_magnitude_vector"

    @property
    def outputs(self) -> int:
        return self.last - self.first

    @property
    def is_table(self) -> bool:
        """Whether it is beside a table, from which rows are looked up."""
        return self.product.op in TABLES

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of A and B by name, and those of the columns' lengths."""
        rank = self.lora.rank
        lengths: dict[str, tuple[int, ...]] = {self.magnitude: (self.outputs,)} if self.lora.dora else {}
        if self.product.op == "Conv":
            return {self.a: (rank, self.product.inputs, 1, 1), self.b: (self.outputs, rank, 1, 1)}
        return {self.a: (self.product.inputs, rank), self.b: (rank, self.outputs), **lengths}

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        """The values at the start, float32: one factor is uniform within ±1 / sqrt(inputs), or normal for a table, and
        the other is 0, so that the model computes what it did. Without the columns' lengths."""
        generator = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        (a, a_shape), (b, b_shape) = list(self.shapes.items())[:2]
        if self.is_table:
            return {a: np.zeros(a_shape, np.float32), b: generator.standard_normal(b_shape, np.float32)}
        bound = 1 / math.sqrt(self.product.inputs)
        return {a: generator.uniform(-bound, bound, a_shape).astype(np.float32), b: np.zeros(b_shape, np.float32)}


def choose(base: LanguageModel, loras: Sequence[Lora]) -> list[Adapter]:
    """The adapters of a model: each product gets those of the first `Lora` whose target it is.

    Raises ValueError for a target that matches nothing, NotImplementedError for one that can have no adapter.
    """
    found: dict[str, Adapter] = {}
    for lora in loras:
        matched = []
        if lora.target is not None and lora.target != LINEAR:
            experts = (node for node in base.model.graph.node if node.op_type in EXPERTS)
            if node := next((each for each in experts if _is_named([each.name, *each.input[2:]], lora.target)), None):
                raise NotImplementedError(f"{node.op_type} (node {node.name!r}) can have no adapter")
        for product in base.products:
            for module, role, (first, last) in slices(product):
                if lora.target is None:
                    is_target = product.role in ATTENTION
                elif lora.target == LINEAR:
                    is_target = product.layer >= 0 and product.op not in TABLES
                else:
                    names = product.weight, product.node, module, f"{module}.weight", role
                    is_target = _is_named(names, lora.target)
                if not is_target:
                    continue
                if product.op not in (*MATRICES, *TABLES) or (lora.dora and product.op not in WITH_DORA):
                    lacking = " with DoRA" if product.op in (*MATRICES, *TABLES) else ""
                    raise NotImplementedError(f"{product.op} (node {product.node!r}) can have no adapter{lacking}")
                matched.append(Adapter(module, product, lora, first, last))
        if not matched:
            every = list(modules(base))
            known = f"expected patterns of names such as {listed(every[:4])}{near(lora.target or '', every)}"
            what = "attention" if lora.target is None else repr(lora.target)
            why = ", whose products were not found" if lora.target in (None, LINEAR) else ""
            raise ArgumentError("lora", f"has the target {what}{why}, {known}")
        for each in matched:
            found.setdefault(each.name, each)
    order = list(modules(base))
    return sorted(found.values(), key=lambda each: order.index(each.name))


def _is_named(names: Sequence[str], target: str) -> bool:
    """Whether one of the patterns fits a name, or is the end of one, as PEFT's target_modules are."""
    patterns = [each.strip() for each in target.split("|")]
    return any(fits(each, names) or any(name.endswith(f".{each}") for name in names) for each in patterns)


def without_adapters(base: LanguageModel, adapters: Sequence[Adapter]) -> list[tuple[str, str]]:
    """Biases that the target of an adapter names, of products that have none, each with the product's weight."""
    targets = {each.lora.target for each in adapters} - {None, LINEAR}
    adapted = {each.product.output for each in adapters}
    others = [each for each in base.products if each.bias and each.output not in adapted]
    return [(each.bias, each.weight) for each in others if any(_is_named([each.bias], str(text)) for text in targets)]


def experts_note(base: LanguageModel, adapters: Sequence[Adapter]) -> tuple[str, ...]:
    """What users are told where adapters beside every product leave out the experts of a model."""
    experts = [node.name for node in base.model.graph.node if node.op_type in EXPERTS]
    told = f"{LINEAR} gives routers adapters and experts none ({listed(experts)}): name products to have other ones"
    return (told,) if experts and any(each.lora.target == LINEAR for each in adapters) else ()


def modules(base: LanguageModel) -> dict[str, WeightProduct]:
    """The modules that can have adapters, in the model's order, each with the product that it is or is part of."""
    return {module: product for product in base.products for module, _, _ in slices(product)}


def slices(product: WeightProduct) -> list[tuple[str, str, tuple[int, int]]]:
    """For each part of a product, the module's name, its role and its columns; one of all columns for a whole one."""
    module = module_of(product)
    if not product.parts:
        return [(module, product.role, (0, product.outputs))]
    before = module.rpartition(".")[0]
    return [(f"{before}.{role}_proj" if before else f"{role}_proj", role, (first, last))
            for role, first, last in product.parts]  # fmt: skip


def module_of(product: WeightProduct) -> str:
    """The name of the module that a product was exported from, by the names of its weight or of its node.

    Exporters name weights model.layers.0.self_attn.q_proj.weight, or nodes /model/layers.0/self_attn/q_proj/MatMul, or
    write the path beside nodes; the builder of onnxruntime-genai says attn for self_attn.
    """
    weight = re.sub(r"\.(MatMul|Gemm)?\.?q?weight\w*$", "", product.weight)
    node = re.sub(r"/(MatMul|Gemm|Gather|Conv|FusedMatMul)\w*$", "", product.node).strip("/").replace("/", ".")
    # A table and the last product may share a weight, which is named after the table or made for the product.
    shared = product.shared and product.role != "embedding"
    other = shared or (product.role in ("embedding", "head") and not product.trainable)
    name = weight if weight != product.weight and not other else product.module or node or product.weight
    return re.sub(r"(layers\.\d+)\.attn\.", r"\1.self_attn.", name)


COLUMNS = 64  # that are unpacked at once
FLOATS = ("MatMul", "Gemm", "FusedMatMul")


def squared_norms(base: LanguageModel, adapter: Adapter, added: np.ndarray | None = None) -> np.ndarray:
    """The squared norm of each column of the weight to which an adapter adds, float64 [outputs].

    added: what is added to the weight before, [inputs, outputs].
    Raises NotImplementedError for a weight that is no float tensor and none of MatMulNBits.
    """
    norms = np.empty(adapter.outputs)
    for start, columns in columns_of(base, adapter):
        place = slice(start, start + len(columns))
        whole = columns if added is None else columns + added[:, place].T
        np.einsum("oi,oi->o", whole, whole, out=norms[place])
    return norms


def factors(base: LanguageModel, adapter: Adapter, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """What the results of an adapter's product are multiplied with, float64 [outputs]."""
    low = values[adapter.a].astype(np.float64) @ values[adapter.b] * adapter.lora.scale
    return np.asarray(values[adapter.magnitude] / np.sqrt(squared_norms(base, adapter, low)))


def columns_of(base: LanguageModel, adapter: Adapter) -> Iterator[tuple[int, np.ndarray]]:
    """Some columns of a weight at a time, as rows of float64, each time with the number of the first."""
    held = {each.name: each for each in base.model.graph.initializer} | dict(base.values)
    node = next(node for node in base.model.graph.node if adapter.product.output in node.output)
    packed = attributes_of_nbits(node) if node.op_type == "MatMulNBits" else None
    plain = node.op_type in FLOATS and adapter.product.trainable
    if packed is None and not plain:
        raise NotImplementedError(
            f"{adapter.product.op} (node {node.name!r}) has no weight of floats or of MatMulNBits, beside which "
            "DoRA is done"
        )
    for first in range(adapter.first, adapter.last, COLUMNS):
        last = min(first + COLUMNS, adapter.last)
        if packed is None:
            given, weight = attributes_of(node), array_of(held[adapter.product.weight])
            part = weight[first:last] if given.get("transB") else weight[:, first:last].T
            yield first - adapter.first, part.astype(np.float64) * given.get("alpha", 1.0)
            continue
        # Columns are rows of the bytes of MatMulNBits.
        found = [array_of(held[name]) if name in held else None for name in (*node.input[1:5], "", "", "")[:4]]
        *rows, groups = found
        b, scales, zeros = (
            None if each is None else np.ascontiguousarray(each.reshape(packed["N"], -1)[first:last]) for each in rows
        )
        assert b is not None
        assert scales is not None
        given = {**packed, "N": last - first, "row_block": 1, "transB": True}
        floats = floats_of(b, scales.astype(np.float32), zeros, groups, given, False, packed["zero_point"])
        yield first - adapter.first, floats


DRAW = "draw"  # an input, int64 [1]


class _AdapterWriter:
    """Writes the nodes of adapters. scaled, seed, drawn: see `insert`."""

    def __init__(self, model: onnx.ModelProto, scaled: bool, seed: int | None, drawn: bool):
        self.body = GraphBody(opset_of(model), names_in(model.graph))
        self._scaled, self._seed, self._drawn = scaled, seed, drawn

    def _value(self, name: str) -> Value:
        """A value of the graph, in float32 where it is scaled here."""
        return Value(self.body, name, TensorProto.FLOAT)

    def adapted(self, adapter: Adapter, node: onnx.NodeProto, part: Value) -> Value:
        """What an adapter makes of the columns of a product's result to which it adds."""
        self.body.scope(f"{adapter.name}.lora")
        body, x, a = self.body, self._value(adapter.product.input), self._value(adapter.a)
        op = "Conv" if adapter.product.op == "Conv" else "MatMul"
        if adapter.is_table:
            low = body.node("Gather", a, x)
        else:
            if self._seed is not None and adapter.lora.dropout:
                # What is dropped differs from adapter to adapter and from run to run.
                own = zlib.crc32(f"{self._seed} {adapter.name}".encode())
                ratio = body.constant(np.array(adapter.lora.dropout, np.float32))
                if self._drawn:
                    drawn = Value(body, DRAW, TensorProto.INT64) + body.constant(np.array([own]))
                    x = body.microsoft("DropoutTraining", x, drawn, ratio)
                else:
                    x = body.node("Dropout", x, ratio, body.constant(np.array(True)), seed=own)
            low = body.node(op, x, a, **(attributes_of(node) if op == "Conv" else {}))
        if not self._scaled and adapter.lora.scale != 1:
            low *= adapter.lora.scale
        low = body.node(op, low, self._value(adapter.b))
        if not adapter.lora.dora:
            return part + low
        factor = self._value(adapter.magnitude) if self._scaled else self._factor(adapter, node)
        index = facts_of(node).bias
        name = node.input[index] if index and index < len(node.input) else ""
        if not name:
            return (part + low) * factor
        if attributes_of(node).get("beta", 1.0) != 1:
            raise NotImplementedError(f"{node.op_type} (node {node.name!r}) has a beta, beside which is no DoRA")
        bias = self._columns(self._value(name), adapter, -1)
        return (part - bias + low) * factor + bias

    def _factor(self, adapter: Adapter, node: onnx.NodeProto) -> Value:
        """The lengths of columns over the norms that they have."""
        assert adapter.norms is not None
        a, b = self._value(adapter.a), self._value(adapter.b)
        rows, scale = a.transpose(1, 0), adapter.lora.scale
        weight = map(self._value, node.input[1 : facts_of(node).bias])
        crossed = self.body.node(node.op_type, rows, *weight, domain=node.domain, **attributes_of(node))
        crossed = self._columns(crossed, adapter, 1)
        own = self.body.node("MatMul", self.body.node("MatMul", rows, a), b)
        total = (b * (own * scale + (crossed + crossed))).sum([0], keepdims=False)
        norm = (total * scale + self.body.constant(adapter.norms.astype(np.float32))).apply("Sqrt")
        return self._value(adapter.magnitude) / self.body.microsoft("StopGradient", norm)

    @staticmethod
    def _columns(value: Value, adapter: Adapter, axis: int) -> Value:
        whole = adapter.outputs == adapter.product.outputs
        return value if whole else value.slice(adapter.first, adapter.last, axis)

    def total(self, adapters: list[Adapter], node: onnx.NodeProto) -> Value:
        """The sum of a product's result and of what its adapters add to all columns, or each to some of them."""
        result, columns = self._value(adapters[0].product.output), adapters[0].product.outputs
        if adapters[0].outputs == columns:
            return self.adapted(adapters[0], node, result)
        bounds = sorted({0, columns, *(each.first for each in adapters), *(each.last for each in adapters)})
        self.body.scope(f"{result.name}.lora")
        sizes = self.body.ints(np.diff(bounds).tolist())
        parts = self.body.nodes_of("Split", len(bounds) - 1, result, sizes, axis=-1)
        for adapter in adapters:
            index = bounds.index(adapter.first)
            parts[index] = self.adapted(adapter, node, parts[index])
        return self.body.concat(*parts, axis=-1)


def insert(
    model: onnx.ModelProto, adapters: Iterable[Adapter], scaled: bool = False, seed: int | None = None,
    drawn: bool = False,
) -> None:  # fmt: skip
    """Let the readers of each product's result read the sum of it and of what its adapters compute.

    Where the result is an output of the graph, the sum takes its name, and the result gets another one.
    model: changed. scaled: whether B holds the scale, and the lengths of columns are factors. seed: of dropout; None:
    without it. drawn: whether a number that is an input of the graph, `draw`, decides what is dropped, beside the seed;
    else each run drops something else.
    The factors A and B are not added, only read.
    """
    graph, writer = model.graph, _AdapterWriter(model, scaled, seed, drawn)
    made, body = dict[str, tuple[str, list[onnx.NodeProto]]](), writer.body
    nodes = {node.output[0]: node for node in graph.node if node.output}
    for output, group in groupby(adapters, key=lambda each: each.product.output):
        if output not in nodes:
            raise ValueError(f"the model has no value {output!r}, to which an adapter would be added")
        total = writer.total(list(group), nodes[output])
        made[output], body.nodes = (total.name, body.nodes), []
    graph.initializer.extend(body.initializers)
    new = {output: name for output, (name, _) in made.items()}
    ordered = list[onnx.NodeProto]()
    for node in graph.node:
        rename_inputs(node, new)
        ordered.append(node)
        for output in filter(made.__contains__, node.output):
            for own in made[output][1]:
                rename_inputs(own, {old: name for old, name in new.items() if old != output})
                ordered.append(own)
    keep(graph.node, ordered)
    names: dict[str, str] = {}
    for output in (each.name for each in graph.output if each.name in made):
        names |= {made[output][0]: output, output: body.free(f"{output}.base")}
    for node in graph.node:
        rename(node, names)
