"""A language model read from a file: its graph without caches, its products, and the loss of the tokens that follow."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.external_data_helper import uses_external_data

from opgrad.onnx.graph.conversion import compute_in_float32
from opgrad.onnx.graph.facts import NBITS
from opgrad.onnx.graph.formulas import GraphBody, Value
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.loading import place_of, read_model
from opgrad.onnx.graph.messages import (
    FEW_BITS,
    FLOATS,
    HALVES,
    MICROSOFT,
    copied,
    domain_of,
    free_name,
    import_microsoft,
    keep,
    opset_of,
)
from opgrad.onnx.graph.nodes import attributes_of, names_in, needed, read_by
from opgrad.training.files.tensor_values import Held, array_of, is_placeholder, placeholder, taken_apart, tensor_of
from opgrad.tune.caches import without_caches
from opgrad.tune.products import WeightProduct, find_products, unreached
from opgrad.tune.tokenizer import read_json

CONFIGS = ("config.json", "genai_config.json")  # that name the architecture
FLOAT_ACCURACY = 1  # of MatMulNBits: operands stay float32
INTEGERS = (TensorProto.INT64, TensorProto.INT32)
TOKENS = ("input_ids", "tokens", "input")
LOGITS = "logits"  # the output with scores
ENCODED = ("last_hidden_state", "token_embeddings", "hidden_states")  # an encoder's output for each token
LABELS, WEIGHTS, LOSS = "labels", "weights", "loss"
EACH = "loss/each"  # the losses of tokens
IGNORED = -100  # the label of a token that does not count
WIDTHS = (2, 4, 8)  # bits that opgrad's kernels unpack


def attributes_of_nbits(node: onnx.NodeProto) -> dict[str, Any] | None:
    """The attributes of MatMulNBits as opgrad's operators have them; None for weights that they do not unpack."""
    given = attributes_of(node)
    sizes = {name: given.get(name, default) for name, default in NBITS.items()}
    if given.get("weight_prepacked", 0) or sizes["bits"] not in WIDTHS:
        return None
    sizes["column_block"] = sizes.pop("block_size")
    return {**sizes, "zero_point": 2.0 ** (sizes["bits"] - 1)}


def use_tiles(model: onnx.ModelProto) -> None:
    """Let opgrad's operator compute the products of packed weights whose values are apart from the model.

    y = x · Wᵀ is the gradient of a product with the transpose of W, of which W has the columns in its rows.
    """
    graph, apart = model.graph, {each.name for each in model.graph.initializer if is_placeholder(each)}
    taken, nodes = names_in(graph), list[onnx.NodeProto]()
    for node in graph.node:
        given = attributes_of_nbits(node) if node.op_type == "MatMulNBits" and node.input[1] in apart else None
        if given is None:
            nodes.append(node)
            continue
        *inputs, bias = [*node.input, "", "", ""][:6]
        given["N"], given["K"] = given["K"], given["N"]
        y = free_name(f"{node.output[0]}.product", taken) if bias else node.output[0]
        made = helper.make_node("QuantizedMatMulGrad", inputs, [y], node.name, domain=MICROSOFT, transB=0, **given)
        nodes.append(made)
        if bias:
            nodes.append(helper.make_node("Add", [y, bias], [node.output[0]], free_name(f"{node.name}/Add", taken)))
    keep(graph.node, nodes)


def reshaped(model: onnx.ModelProto, values: Mapping[str, Held]) -> dict[str, Held]:
    """Replace each Reshape of a stored tensor by that tensor in the other shape; onnxruntime would make a copy.

    model: changed. values: those of its placeholders. Returns the values with those of new placeholders.
    """
    graph, found = Graph(model), dict(values)
    for node in list(model.graph.node):
        tensor = graph.initializers.get(node.input[0]) if node.op_type == "Reshape" and node.input else None
        shape = graph.constant(node.input[1]) if tensor is not None else None
        if tensor is None or shape is None or tensor.data_type in FEW_BITS:
            continue
        held = found[tensor.name] if is_placeholder(tensor) else tensor
        sizes = [tensor.dims[index] if size == 0 else int(size) for index, size in enumerate(shape.tolist())]
        array: np.ndarray = array_of(held).reshape(sizes)
        name = node.output[0]
        if is_placeholder(tensor):
            found[name] = array
        model.graph.initializer.append(placeholder(name, array) if name in found else tensor_of(name, array))
        model.graph.node.remove(node)
    read = read_by(model.graph.node)
    keep(model.graph.initializer, [each for each in model.graph.initializer if each.name in read])
    return found


Head = tuple[str, Sequence[str], dict[str, Any]]  # the weight, what else is read behind the labels, and attributes


def _head(graph: Graph, hidden: str, logits: str, trained: Collection[str]) -> Head | None:
    """The last product as the loss takes it, if its weights stay as they are and nothing stands behind it."""
    while (copy := graph.maker(logits, "Identity", "Cast")) is not None:
        logits = copy.input[0]
    node = graph.producers.get(logits)
    if node is None or node.input[0] != hidden or set(node.input).intersection(trained):
        return None
    inputs, given = [*node.input, "", "", ""], attributes_of(node)
    if domain_of(node) == MICROSOFT:
        packed = attributes_of_nbits(node) if node.op_type == "MatMulNBits" else None
        if packed is None or inputs[4] or inputs[5]:
            return None
        return inputs[1], [inputs[2], inputs[3]] if inputs[3] else [inputs[2]], packed
    plain = not given.get("transA", 0) and given.get("alpha", 1.0) == 1 and len(node.input) == 2
    if node.op_type not in ("MatMul", "Gemm") or not plain:
        return None
    weight, transposed = node.input[1], bool(given.get("transB", 0))  # which may be cast or transposed on the way
    while (maker := graph.maker(weight, "Cast", "Transpose", "Identity")) is not None:
        transposed ^= maker.op_type == "Transpose"
        weight = maker.input[0]
    sizes, is_float = graph.known(weight), graph.element_type(weight) in (TensorProto.FLOAT, *HALVES)
    if weight not in graph.initializers or sizes is None or len(sizes) != 2 or not is_float or weight in trained:
        return None
    n, k = sizes if transposed else reversed(sizes)
    return weight, [], {"N": n, "K": k, "transB": int(transposed)}


@dataclass(frozen=True)
class LanguageModel:
    """A language model.

    source: as it was read, with caches; large initializers are placeholders, and `values` has theirs.
    model: the graph from tokens to scores alone; names of values and nodes are those of the source. It computes in
        float32 what the source computes in float16 or bfloat16, with weights stored as they are.
    values: large tensors by name, mapped from the files where they lie.
    files: for tensors in other files than the model's: the file, the first byte, and the number of bytes.
    tokens: the input for tokens, [batch, length]. logits: the output with the scores of the token that follows each,
        [batch, length, vocabulary]. hidden: what the last product computes the scores from.
    vocabulary: the number of scores. width: that of `hidden`.
    products: those with weights, in the graph's order.
    loss: the loss, a number, in a model that `with_loss` made; else "".
    unreached: how many products of the source do not reach the scores.
    architecture: as genai_config.json or config.json beside the file names it, "" without these.
    """

    source: onnx.ModelProto
    model: onnx.ModelProto
    values: Mapping[str, Held]
    files: Mapping[str, tuple[Path, int, int]]
    tokens: str
    logits: str
    hidden: str
    vocabulary: int
    width: int
    products: tuple[WeightProduct, ...]
    loss: str = ""
    unreached: int = 0
    architecture: str = ""

    @property
    def head(self) -> WeightProduct:
        """The product that computes the scores."""
        return next(each for each in self.products if each.role == "head")

    def place_of(self, name: str) -> object:
        """What identifies the memory of a tensor: a table and the last product may share theirs under two names."""
        held = self.values.get(name)
        return name if held is None else array_of(held).__array_interface__["data"][0]

    def file_of(self, array: np.ndarray) -> tuple[Path, int, int] | None:
        """Where the values of a large tensor lie in a file, under whatever name; None if they lie in none."""
        here = array.__array_interface__["data"][0]
        return next((self.files[name] for name in self.files if self.place_of(name) == here), None)

    @property
    def bytes(self) -> int:
        """The bytes of what the graph stores; tensors that share their memory count once."""
        stored = {each.name: self.values.get(each.name, each) for each in self.model.graph.initializer}
        sizes = {}
        for name, held in stored.items():  # fields other than raw_data take about as many bytes in the message
            in_message = isinstance(held, TensorProto)
            sizes[self.place_of(name)] = len(held.raw_data) or held.ByteSize() if in_message else held.nbytes
        return sum(sizes.values())

    def axes(self, batch_size: int, length: int) -> dict[str, int]:
        """The sizes of the axes of a batch of so many rows and tokens, by the names that the graph has for them."""
        kind = next(each.type.tensor_type for each in self.model.graph.input if each.name == self.tokens)
        names = [axis.dim_param for axis in kind.shape.dim]
        return {**dict(zip(names, (batch_size, length), strict=True)), "batch": batch_size, "length": length}

    def with_loss(
        self, trained: Collection[str] = (), with_scores: bool = False, weighted: bool = False, each: bool = False
    ) -> "LanguageModel":  # fmt: skip
        """The same model with its loss as the only output: the mean over all labels that count.

        It gets the input `labels`, int64 [batch, length]: for each token the one that shall follow, or -100; with
        `weighted`, the mean is over `weights`, float32 [batch, length], which are 0 where no label counts. The last
        product and the loss become one node, whose scores are never whole in memory, unless its weight is among
        `trained`, something is added to the scores, or `with_scores` asks for them. each: the loss of each token.
        """
        model = copied(self.model)
        graph, body = Graph(model), GraphBody(opset_of(model), names_in(model.graph))
        head = None if with_scores else _head(graph, self.hidden, self.logits, trained)
        body.scope(LOSS)

        def flat(name: str, dtype: int) -> Value:
            """A new input for each token, as [tokens]."""
            model.graph.input.append(helper.make_tensor_value_info(name, dtype, ["batch", "length"]))
            return Value(body, name, dtype).reshape([-1])

        labels, weights = flat(LABELS, TensorProto.INT64), flat(WEIGHTS, TensorProto.FLOAT) if weighted else None
        scores, width = (self.logits, graph.sizes(self.logits)) if head is None else (self.hidden, [head[2]["K"]])
        last = (width or [None])[-1]
        rows = Value(body, scores, TensorProto.FLOAT).reshape([-1, last if isinstance(last, int) else 0])
        apart = each or (weighted and head is None)
        given: dict[str, Any] = {"ignore_index": IGNORED, **({"reduction": "none"} if apart else {})}
        if head is None:
            loss = body.node("SoftmaxCrossEntropyLoss", rows, labels, **given)
        else:
            weight, more, attributes = head
            stored = [Value(body, name) for name in (weight, *more)]
            inputs: list[Value | None] = [rows, stored[0], labels, *stored[1:]]
            inputs += [*[None] * (5 - len(inputs)), weights] if weighted else []
            loss = body.microsoft("LinearCrossEntropyLoss", *inputs, **attributes, **given)
            import_microsoft(model)
        if weights is not None and apart and not each:
            loss = (loss * weights).sum(keepdims=False) / weights.sum(keepdims=False)
        result = EACH if each else LOSS
        finish(model, loss, result, ["tokens"] if each else [])
        return replace(self, model=model, loss=result)


def finish(model: onnx.ModelProto, value: Value, name: str, shape: list[Any]) -> None:
    """Append the nodes of a value's body to a model, of which the value, under a name, becomes the only output."""
    assert isinstance(value.body, GraphBody)
    model.graph.initializer.extend(value.body.initializers)
    model.graph.node.extend([*value.body.nodes, helper.make_node("Identity", [value.name], [name], f"{name}/Identity")])
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    keep(model.graph.node, needed(list(model.graph.node), [name]))


def read(path: str | PathLike[str], choose: Callable[[Mapping[str, int]], str] | None = None) -> LanguageModel:
    """Read a language model from its file, or an encoder.

    choose: names the output of an encoder that is trained, given the number of axes of each output of floats; then
    `logits` is that, masks and types of tokens stay inputs, and there need be no product with scores.
    Raises FileNotFoundError, ValueError for a damaged model or one that is no language
    model, NotImplementedError for caches that cannot be taken out.
    """
    path = Path(path)
    source, what = read_model(path, outside=False), str(path)
    places = {each.name: place_of(each, path.parent) for each in source.graph.initializer if uses_external_data(each)}
    files = {name: (path.parent / each.location, each.offset or 0, each.length or 0) for name, each in places.items()}
    values = taken_apart(source, path)
    graph = Graph(copied(source))
    integers = [
        each.name
        for each in source.graph.input
        if each.type.tensor_type.elem_type in INTEGERS and len(graph.sizes(each.name) or ()) == 2
    ]
    gathered = [
        name for name in integers if any(node.op_type.startswith("Gather") for node in graph.readers.get(name, []))
    ]
    tokens = next(iter([*(name for name in TOKENS if name in integers), *gathered]), None)
    if tokens is None:
        names = ", ".join(each.name for each in source.graph.input)
        raise ValueError(f"{what} has the inputs {names}, expected input_ids, integers of shape [batch, length]")
    kinds = {each.name: each.type.tensor_type for each in source.graph.output}
    ranks = {name: len(graph.sizes(name) or kind.shape.dim) for name, kind in kinds.items() if kind.elem_type in FLOATS}
    if choose is not None:
        logits = choose(ranks)
    else:
        three = [name for name, rank in ranks.items() if rank == 3 and name not in ENCODED]
        if LOGITS not in ranks and not three:
            raise ValueError(
                f"{what} has the outputs {', '.join(ranks)}, expected logits [batch, length, vocabulary]; "
                "an encoder is trained by --task embed, classify or rank"
            )
        logits = LOGITS if LOGITS in ranks else three[0]
    model = without_caches(source, tokens, logits, what, is_encoder=choose is not None)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":  # builders let both operands be rounded to 8 bits
                attribute.i = FLOAT_ACCURACY
    values = reshaped(model, values)
    compute_in_float32(model)
    products = find_products(model, tokens, logits if choose is None or ranks[logits] == 2 else "")
    head = next((each for each in products if each.role == "head"), None)
    if head is None and (choose is None or logits == LOGITS):
        raise ValueError(f"{what} computes {logits!r} by no product with a weight, expected a language model")
    last = (graph.sizes(logits) or [None])[-1]
    width = last if isinstance(last, int) else 0
    configs = [read_json(place / name) for place in (path.parent, path.parent.parent) for name in CONFIGS]
    named = [each.get("model_type") or (each.get("model") or {}).get("type") for each in configs]
    return LanguageModel(
        source=source, model=model, values=values, files=files, tokens=tokens, logits=logits,
        hidden=head.input if head else logits, vocabulary=head.outputs if head else 0,
        width=head.inputs if head else width, products=products,
        unreached=0 if choose else unreached(source, logits),
        architecture=next((each for each in named if isinstance(each, str)), ""),
    )  # fmt: skip
