"""A language model read from a file: its graph without caches, its products, and the loss of the tokens that follow."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.halves import compute_in_float32
from opgrad.onnx.graph.loading import place_of, read_model
from opgrad.onnx.graph.messages import FLOATS, copied
from opgrad.training.files.tensor_values import Held, array_of, taken_apart
from opgrad.tune.language.caches import without_caches
from opgrad.tune.language.loss import EACH, LOSS, add_loss
from opgrad.tune.language.products import WeightProduct, find_products, unreached
from opgrad.tune.language.shared_tables import reshaped
from opgrad.tune.tokenizer import read_json

WHO = "tune"
CONFIGS = ("config.json", "genai_config.json")  # that name the architecture
FLOAT_ACCURACY = 1  # of MatMulNBits: operands stay float32
INTEGERS = (TensorProto.INT64, TensorProto.INT32)
TOKENS = ("input_ids", "tokens", "input")
LOGITS = "logits"  # the output with scores
ENCODED = ("last_hidden_state", "token_embeddings", "hidden_states")  # an encoder's output for each token
Choose = Callable[[Mapping[str, int]], str]


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
        return sum({self.place_of(name): _nbytes(held) for name, held in stored.items()}.values())

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
        `trained`, something is added to the scores, or `with_scores` asks for them. With `each` the output is the loss
        of each token, [batch * length].
        """
        model = copied(self.model)
        add_loss(model, self.hidden, self.logits, trained, with_scores, weighted, each)
        return replace(self, model=model, loss=EACH if each else LOSS)


def read(path: str | PathLike[str], choose: Choose | None = None) -> LanguageModel:
    """Read a language model from its file, or an encoder.

    choose: names the output of an encoder that is trained, given the number of axes of each output of floats; then
    `logits` is that, masks and types of tokens stay inputs, and there need be no product with scores.
    Raises FileNotFoundError, ValueError for a damaged model or one that is no language
    model, NotImplementedError for caches that cannot be taken out.
    """
    path = Path(path)
    source = read_model(path, WHO, outside=False)
    places = {each.name: place_of(each, path.parent) for each in source.graph.initializer if uses_external_data(each)}
    files = {
        name: (path.parent / place.location, place.offset or 0, place.length or 0) for name, place in places.items()
    }
    values = taken_apart(source, path, WHO)
    what = f"{WHO}: {path}"
    graph = Graph(copied(source))
    tokens, ranks = _tokens(graph, what), _ranks(graph)
    logits = _logits(ranks, what) if choose is None else choose(ranks)
    model = without_caches(source, tokens, logits, what, is_encoder=choose is not None)
    _compute_in_floats(model)
    values = reshaped(model, values)
    compute_in_float32(model)
    products = find_products(model, tokens, logits if choose is None or ranks[logits] == 2 else "")
    head = next((each for each in products if each.role == "head"), None)
    if head is None and (choose is None or logits == LOGITS):
        raise ValueError(f"{what} computes {logits!r} by no product with a weight, expected a language model")
    last = (graph.sizes(logits) or [None])[-1]
    width = last if isinstance(last, int) else 0
    return LanguageModel(
        source=source, model=model, values=values, files=files, tokens=tokens, logits=logits,
        hidden=head.input if head else logits, vocabulary=head.outputs if head else 0,
        width=head.inputs if head else width, products=products,
        unreached=0 if choose else unreached(source, logits), architecture=_architecture(path.parent),
    )  # fmt: skip


def _architecture(folder: Path) -> str:
    """The architecture of the model in a folder, as the files beside it name it."""
    configs = [read_json(place / name) for place in (folder, folder.parent) for name in CONFIGS]
    named = [each.get("model_type") or (each.get("model") or {}).get("type") for each in configs]
    return next((each for each in named if isinstance(each, str)), "")


def _nbytes(held: Held) -> int:
    """The bytes of a stored tensor of any type; fields other than raw_data take about as many in the message."""
    return len(held.raw_data) or held.ByteSize() if isinstance(held, TensorProto) else held.nbytes


def _compute_in_floats(model: onnx.ModelProto) -> None:
    """Let products of quantized weights take floats: builders let them quantize the other operand, too, to 8 bits."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = FLOAT_ACCURACY


def _tokens(graph: Graph, what: str) -> str:
    """The input for tokens."""
    found = [
        each.name
        for each in graph.graph.input
        if each.type.tensor_type.elem_type in INTEGERS and len(graph.sizes(each.name) or ()) == 2
    ]
    looked_up = [name for name in found if any(node.op_type.startswith("Gather") for node in _readers(graph, name))]
    chosen = [name for name in TOKENS if name in found] or looked_up
    if not chosen:
        names = ", ".join(each.name for each in graph.graph.input)
        raise ValueError(f"{what} has the inputs {names}, expected input_ids, integers of shape [batch, length]")
    return chosen[0]


def _readers(graph: Graph, name: str) -> list[onnx.NodeProto]:
    return graph.readers.get(name, [])


def _ranks(graph: Graph) -> dict[str, int]:
    """The number of axes of each output of floats, by name."""
    kinds = {each.name: each.type.tensor_type for each in graph.graph.output}
    return {name: len(graph.sizes(name) or kind.shape.dim) for name, kind in kinds.items() if kind.elem_type in FLOATS}


def _logits(ranks: Mapping[str, int], what: str) -> str:
    """The output with the scores."""
    named = [name for name in ranks if name == LOGITS]
    three = [name for name, rank in ranks.items() if rank == 3 and name not in ENCODED]
    if not (chosen := named or three):
        raise ValueError(
            f"{what} has the outputs {', '.join(ranks)}, expected logits [batch, length, vocabulary]; "
            "an encoder is trained by --task embed, classify or rank"
        )
    return chosen[0]
