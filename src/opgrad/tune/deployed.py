"""Trained adapters for inference: beside the base as inputs with defaults, as nodes with their values, or merged."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.halves import rounded
from opgrad.onnx.graph.messages import attribute_of, copied
from opgrad.onnx.graph.nodes import captured, reads_values
from opgrad.training.files.checkpoint_tables import ELEMENT_TYPES
from opgrad.training.files.tensor_values import Held, array_of, is_placeholder, placeholder, tensor_of
from opgrad.tune.dora import factors
from opgrad.tune.insertion import insert
from opgrad.tune.language.model import WHO, LanguageModel
from opgrad.tune.lora import Adapter

PRODUCTS = ("MatMul", "Gemm", "Gather", "Conv", "FusedMatMul")  # whose weights adapters can be merged into


def with_inputs(base: LanguageModel, adapters: Sequence[Adapter]) -> onnx.ModelProto:
    """The base with its adapters as inputs; without values for them it computes what the base does."""
    model, kinds = copied(base.source), _kinds(base, adapters)
    insert(model, adapters, scaled=True)
    for adapter in adapters:
        for name, shape in _shapes(adapter).items():
            sizes = [size if size is not None else f"{adapter.name}.rank" for size in shape]
            kind = kinds[adapter.name]
            model.graph.input.append(helper.make_tensor_value_info(name, kind, sizes))
            if name == adapter.magnitude:
                model.graph.initializer.append(tensor_of(name, np.ones(adapter.outputs, ELEMENT_TYPES[kind])))
            else:
                dims = [size or 0 for size in shape]
                model.graph.initializer.append(TensorProto(name=name, data_type=kind, dims=dims))
    return model


def _shapes(adapter: Adapter) -> dict[str, tuple[int | None, ...]]:
    """The shapes of A, B and factors by name, None in the place of the rank."""
    (a, a_shape), (b, b_shape), *more = adapter.shapes.items()
    if adapter.product.op == "Conv":
        return {a: (None, *a_shape[1:]), b: (b_shape[0], None, 1, 1)}
    return {a: (a_shape[0], None), b: (None, b_shape[1]), **dict(more)}


def _kinds(base: LanguageModel, adapters: Iterable[Adapter]) -> dict[str, int]:
    """The TensorProto.DataType of what each adapter adds to, by the adapter's name."""
    kind = Graph(copied(base.source)).element_type
    return {each.name: kind(each.product.output) or kind(each.product.input) or TensorProto.FLOAT for each in adapters}


def scaled(base: LanguageModel, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What adapters have as the base with inputs takes it: B holds the scale, all in the type of the base."""
    kinds = _kinds(base, adapters)
    found = {}
    for adapter in adapters:
        dtype = ELEMENT_TYPES[kinds[adapter.name]]
        found[adapter.a] = values[adapter.a].astype(dtype)
        found[adapter.b] = (values[adapter.b] * np.float32(adapter.lora.scale)).astype(dtype)
        if adapter.lora.dora:
            found[adapter.magnitude] = factors(base, adapter, values).astype(dtype)
    return found


def replaced(base: LanguageModel, values: Mapping[str, np.ndarray]) -> tuple[onnx.ModelProto, dict[str, Held]]:
    """The base with other values of its weights, and the values of its placeholders."""
    kinds = {each.name: each.data_type for each in base.source.graph.initializer}
    changed = {name: rounded(array, kinds[name], f"{WHO}: the weight {name!r}") for name, array in values.items()}
    return _with_values(base, _held(base), changed)


def _held(base: LanguageModel) -> dict[str, Held]:
    """The values of the base's tensors by name."""
    return {each.name: each for each in base.source.graph.initializer} | dict(base.values)


def _with_values(
    base: LanguageModel, held: Mapping[str, Held], changed: Mapping[str, np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, Held]]:
    """The base with some values changed, and the values of its placeholders."""
    model = copied(base.source)
    for tensor in model.graph.initializer:
        if tensor.name in changed:
            tensor.CopyFrom(placeholder(tensor.name, changed[tensor.name]))
    names = {each.name for each in model.graph.initializer if is_placeholder(each)}
    return model, {name: changed.get(name, held[name]) for name in names}


def merged(
    base: LanguageModel, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, Held]]:
    """The base with the adapters added to its weights, or as nodes beside those that are quantized or shared.

    values: those of adapters, and of weights that were trained themselves.

    Returns the model and the values of its placeholders.
    """
    changed, held = dict[str, np.ndarray](), _held(base)
    nodes = {node.output[0]: node for node in base.source.graph.node if node.output}
    readers = Counter(name for node in filter(reads_values, base.source.graph.node) for name in captured(node))
    apart: list[Adapter] = []
    for adapter in adapters:
        weight, node = adapter.product.weight, nodes[adapter.product.output]
        if weight not in held or readers[weight] > 1 or not _takes(adapter, node):
            apart.append(adapter)
            continue
        if weight not in changed:
            changed[weight] = array_of(held[weight]).astype(np.float32)
        factor = factors(base, adapter, values) if adapter.lora.dora else None
        _add(changed[weight], adapter, node, values, factor)
    changed |= {name: array for name, array in values.items() if name in held}
    model, found = replaced(base, changed)
    insert(model, apart, scaled=True)
    model.graph.initializer.extend(tensor_of(*each) for each in scaled(base, apart, values).items())
    return model, found


def _takes(adapter: Adapter, node: onnx.NodeProto) -> bool:
    """Whether the weight of an adapter's product is one to which the adapter's product can be added."""
    plain = dict(map(attribute_of, node.attribute)).get("alpha", 1.0) == 1
    return plain and adapter.product.op in PRODUCTS and adapter.product.trainable


def _add(
    weight: np.ndarray, adapter: Adapter, node: onnx.NodeProto, values: Mapping[str, np.ndarray],
    factor: np.ndarray | None,
) -> None:  # fmt: skip
    """Add an adapter's product to some columns of a weight, and multiply each with its factor."""
    a, b = values[adapter.a], values[adapter.b] * np.float32(adapter.lora.scale)
    if adapter.product.op == "Conv":
        weight += np.einsum("or,rikl->oikl", b[:, :, 0, 0], a)
        return
    given = dict(map(attribute_of, node.attribute))
    columns = weight.T if given.get("transB") else weight
    own = columns[:, adapter.first : adapter.last]
    own += (a @ b).astype(np.float32)
    if factor is not None:
        own *= factor
