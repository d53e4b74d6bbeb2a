"""Low-rank adapters (LoRA): what they are asked to be, and which products of a model get them."""

import math
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from opgrad.base.arguments import ArgumentError, naming
from opgrad.training.make.checks import listed, near
from opgrad.training.make.patterns import fits
from opgrad.tune.language.model import WHO, LanguageModel
from opgrad.tune.language.products import TABLES, WeightProduct
from opgrad.tune.options import parsed, require

ATTENTION = ("q", "k", "v", "o", "qkv")  # roles of the products that get adapters by default
LINEAR = "all-linear"  # a target: every product of layers
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

    name: the module's name as PEFT calls it; `name.lora_A.weight` and `name.lora_B.weight` are the parameters, and with
        DoRA `name.lora_magnitude_vector`.
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
        """The number of columns that it adds to."""
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
        matched = [each for product in base.products for each in _adapters(product, lora)]
        if not matched:
            names = list(modules(base))
            known = f"expected patterns of names such as {listed(names[:4])}{near(lora.target or '', names)}"
            what = "attention, whose products were not found" if lora.target is None else repr(lora.target)
            raise ArgumentError("lora", f"has the target {what}, {known}")
        for each in matched:
            found.setdefault(each.name, each)
    order = list(modules(base))
    return sorted(found.values(), key=lambda each: order.index(each.name))


def _adapters(product: WeightProduct, lora: Lora) -> Iterable[Adapter]:
    """The adapters beside a product, one for each of its parts that is a target."""
    for module, role, (first, last) in slices(product):
        if not _is_target(product, module, role, lora.target):
            continue
        if product.op not in (*MATRICES, *TABLES):
            raise NotImplementedError(f"{WHO}: {product.op} (node {product.node!r}) can have no adapter")
        if lora.dora and product.op not in WITH_DORA:
            raise NotImplementedError(f"{WHO}: {product.op} (node {product.node!r}) can have no adapter with DoRA")
        yield Adapter(module, product, lora, first, last)


def _is_target(product: WeightProduct, module: str, role: str, target: str | None) -> bool:
    if target is None:
        return product.role in ATTENTION
    if target == LINEAR:
        return product.layer >= 0 and product.op not in TABLES
    return _is_named((product.weight, product.node, module, f"{module}.weight", role), target)


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


def as_values(loras: Sequence[Lora]) -> list[Mapping[str, Any]]:
    """Adapters' options as plain values, for JSON."""
    return [asdict(each) for each in loras]
