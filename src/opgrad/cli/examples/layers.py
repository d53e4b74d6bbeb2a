"""Example arguments for operators of language models, normalization, recurrent layers and losses."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from opgrad.cli.examples.arguments import Cases, Example, random_bytes
from opgrad.contract import REDUCTIONS, Array, Shape, reference

ELEMENTS = ((), (1,), (0, 3), (37,), (3, 65), (2, 3, 4, 5), (2, 1, 3, 2, 33))
ROWS_OF_BIAS = ((1,), (0, 3), (3, 0), (37,), (5, 65), (2, 3, 4, 5), (2, 1, 3, 2, 33), (70, 1))
FAR = 6.0  # a standard deviation of inputs by which some lie where only the tail is left


def normal(rng: np.random.Generator, shape: Shape, deviation: float = 1.0) -> Array:
    return np.asarray(rng.normal(0.0, deviation, shape))


GELUS = [(shape, FAR) for shape in ELEMENTS]


def _gelus(rng: np.random.Generator, cases: Cases = GELUS, *, names: Sequence[str]) -> Iterator[Example]:
    for shape, deviation in cases:
        deviations = {"x": deviation, "dy": 1.0}
        yield Example({name: normal(rng, shape, deviations[name]) for name in names})


gelu, gelu_grad = partial(_gelus, names=("x",)), partial(_gelus, names=("dy", "x"))


def bias_gelu_grad_dx(rng: np.random.Generator, cases: Cases = ROWS_OF_BIAS) -> Iterator[Example]:
    for shape in cases:
        yield Example({"dy": normal(rng, shape), "x": normal(rng, shape, FAR), "bias": normal(rng, shape[-1:])})


fast_gelu, fast_gelu_grad, bias_fast_gelu_grad_dx = gelu, gelu_grad, bias_gelu_grad_dx


GATES = tuple(itertools.product(ELEMENTS[:-1], ("silu", "gelu", "gelu_tanh")))


def _gates(rng: np.random.Generator, cases: Cases = GATES, *, names: Sequence[str]) -> Iterator[Example]:
    for shape, activation in cases:
        yield Example({**{name: normal(rng, shape, 2) for name in names}, "activation": activation})


gated_linear_unit = partial(_gates, names=("gate", "up"))
gated_linear_unit_grad = partial(_gates, names=("dy", "gate", "up"))


# Shapes, with ratio and training_mode.
DROPPED = (
    *((shape, {}) for shape in ((), (0, 3), (37,), (3, 65), (2, 3, 4, 5), (3, 1, 5, 2, 417))),
    *(((5, 33), {"ratio": ratio}) for ratio in (0.0, 0.1, 1.0)),
    ((5, 33), {"ratio": 0.1, "training_mode": False}),
)


def dropout(rng: np.random.Generator, cases: Cases = DROPPED) -> Iterator[Example]:
    for at, (shape, options) in enumerate(cases):
        seed = (np.array(at - 2), 2**62 + at, np.array([at], np.int32))[at % 3]
        yield Example({"x": normal(rng, shape), "seed": seed, **options})


def dropout_grad(rng: np.random.Generator, cases: Cases = DROPPED) -> Iterator[Example]:
    for shape, options in cases:
        yield Example({"dy": normal(rng, shape), "mask": np.asarray(rng.random(shape) > 0.1), **options})


def fake_quant_grad(rng: np.random.Generator, cases: Cases = ELEMENTS) -> Iterator[Example]:
    return dropout_grad(rng, [(shape, {}) for shape in cases])


# Shapes with the axis from which on they are normalized: single elements, tails around vectors, many rows, few long
# ones, empty ones.
ROWS = [
    ((1,), 0),
    ((7,), -1),
    ((5, 1), -1),
    ((3, 31), 1),
    ((2, 3, 4, 5, 6), -2),
    ((70, 33), -1),
    ((17, 64), 1),
    ((3, 2500), -1),
    ((20, 130), 1),
    ((0, 5), -1),
    ((4, 0), 1),
]
# Shapes (N, C, ..): one vector, planes shorter and longer than one, many samples, few channels, empty ones.
CHANNELS = [
    (1, 1),
    (5, 3),
    (130, 40),
    (3, 2, 4),
    (70, 5, 3),
    (3, 4, 9, 7),
    (2, 3, 1, 1, 65),
    (70, 9, 36),
    (1, 2, 20000),
    (0, 3, 2),
    (3, 0, 2),
    (2, 3, 0),
]


def _rows(rng: np.random.Generator, cases: Cases) -> Iterator[tuple[dict[str, Any], int]]:
    """x, scale and axis, with the length of the longest sum."""
    for shape, axis in cases:
        x, scale = rng.normal(1, 2, shape), rng.uniform(0.5, 2, shape[axis:])
        yield {"x": x, "scale": scale, "axis": axis}, max(math.prod(shape[axis:]), math.prod(shape[:axis]))


def _statistics(x: Array, axes: tuple[int, ...], centred: bool = True) -> tuple[Array, Array]:
    count = max(math.prod(x.shape[axis] for axis in axes), 1)
    mean = x.sum(axes, keepdims=True) / count if centred else np.zeros(())
    return mean, 1 / np.sqrt(np.square(x - mean).sum(axes, keepdims=True) / count + 1e-5)


def layer_normalization(rng: np.random.Generator, cases: Cases = ROWS) -> Iterator[Example]:
    for i, (given, terms) in enumerate(_rows(rng, cases)):
        bias = {"bias": rng.normal(size=given["scale"].shape)} if i % 3 < 2 else {}
        yield Example({**given, **bias, "epsilon": 1e-3 if i % 2 else 1e-5}, terms)


def layer_normalization_grad(rng: np.random.Generator, cases: Cases = ROWS) -> Sequence[Example]:
    return [_row_gradient(rng, given, terms, True) for given, terms in _rows(rng, cases)]


def simplified_layer_normalization(rng: np.random.Generator, cases: Cases = ROWS) -> Sequence[Example]:
    return [Example(given, terms) for given, terms in _rows(rng, cases)]


# A row of one element is normalized to 1 or -1, and its gradient is what rounding leaves of 0.
LONGER_ROWS = tuple((shape, axis) for shape, axis in ROWS if math.prod(shape[axis:]) != 1)


def simplified_layer_normalization_grad(rng: np.random.Generator, cases: Cases = LONGER_ROWS) -> Sequence[Example]:
    return [_row_gradient(rng, given, terms, False) for given, terms in _rows(rng, cases)]


def _row_gradient(rng: np.random.Generator, given: dict[str, Any], terms: int, centred: bool) -> Example:
    x, axis = given["x"], given["axis"]
    mean, inv_std = _statistics(x, tuple(range(axis % x.ndim, x.ndim)), centred)
    kept = {"mean": mean, "inv_std": inv_std} if centred else {"inv_std": inv_std}
    return Example({"dy": rng.normal(size=x.shape), **given, **kept}, terms)


def _channels(rng: np.random.Generator, cases: Cases) -> Iterator[tuple[dict[str, Any], tuple[int, ...], int]]:
    """x and scale, the axes of the statistics, and the length of the longest sum."""
    for shape in cases:
        axes = (0, *range(2, len(shape)))
        x, scale = rng.normal(1, 2, shape), rng.uniform(0.5, 2, shape[1])
        yield {"x": x, "scale": scale}, axes, math.prod(shape[axis] for axis in axes)


def batch_norm_internal(rng: np.random.Generator, cases: Cases = CHANNELS) -> Iterator[Example]:
    for i, (given, _, terms) in enumerate(_channels(rng, cases)):
        channels = given["scale"].size
        bias, mean, var = rng.normal(size=channels), rng.normal(size=channels), rng.uniform(0.5, 2, channels)
        given |= {"bias": bias, "running_mean": mean, "running_var": var}
        # Numbers that float32, the type of ONNX attributes, has exactly.
        given |= {"epsilon": 2.0**-10, "momentum": 0.75 if i % 2 else 0.875}
        yield Example(given, terms)
        yield Example({**given, "training_mode": False}, terms)


def batch_normalization_grad(rng: np.random.Generator, cases: Cases = CHANNELS) -> Iterator[Example]:
    for given, axes, terms in _channels(rng, cases):
        mean, inv_std = (statistic.ravel() for statistic in _statistics(given["x"], axes))
        yield Example({"dy": rng.normal(size=given["x"].shape), **given, "mean": mean, "inv_std": inv_std}, terms)


# The shapes of scores and bias, the axis, and is_inner_broadcast.
BIASES = (
    ((37,), (37,), 0, False),
    ((0, 3), (3,), -1, False),
    ((3, 0), (3, 0), -1, True),
    ((6, 5), (5,), -1, False),
    ((6, 65), (2, 65), 1, True),
    ((6, 65), (2, 65), 1, False),
    ((2, 3, 4, 33), (2, 1, 1, 33), 3, True),
    ((2, 3, 4, 33), (1, 1, 4, 33), 3, False),
    ((2, 3, 4, 33), (4, 33), 2, False),
    ((2, 3, 1, 2, 40), (2, 1, 1, 1, 40), -1, True),
)
SOFTMAXES = (((37,), 0), ((0, 3), -1), ((6, 1), -1), ((6, 65), 1), ((2, 3, 4, 33), 3), ((2, 3, 4, 33), 1))


def bias_softmax(rng: np.random.Generator, cases: Cases = BIASES) -> Iterator[Example]:
    for shape, bias, axis, inner in cases:
        arrays = {"x": rng.normal(0, 2, shape), "bias": rng.normal(size=bias)}
        yield Example({**arrays, "axis": axis, "is_inner_broadcast": inner}, terms=math.prod(shape[axis:]))


def softmax_dropout_grad(rng: np.random.Generator, cases: Cases = SOFTMAXES) -> Iterator[Example]:
    for index, (shape, axis) in enumerate(cases):
        e = np.exp(rng.normal(size=shape))
        axes = tuple(range(axis % len(shape), len(shape)))
        dy, mask, y = rng.normal(size=shape), rng.random(shape) > 0.1, e / e.sum(axes, keepdims=True)
        arguments = {"dy": dy, "mask": mask, "y": y, "ratio": (0.1, 0.0, 0.5, 1.0)[index % 4], "axis": axis}
        yield Example(arguments, terms=math.prod(shape[axis:]))


# --- attention: sizes as (batch, heads of q, heads of k, length of q, length of k, size of a head, size of v's) -------

SEQUENCES = {"cu_seqlens_q": np.array([0, 3, 3, 20]), "cu_seqlens_k": np.array([2, 9, 10, 40])}
LENGTHS = np.array([9, 0])
# The sizes, the shape of the mask and whether it is bool, the other options. Together they take all ways of the kernel;
# the first is plain.
ATTENTIONS: tuple[tuple[tuple[int, ...], Any, bool, dict[str, Any]], ...] = (
    ((2, 2, 2, 7, 9, 8, 8), None, False, {}),
    ((1, 4, 2, 65, 70, 16, 5), None, False, {"causal": "bottom_right", "sink": True}),
    ((2, 2, 1, 5, 11, 3, 1), (2, 1, 5, 11), False, {"scale": 0.25, "softcap": 2.0, "key_lengths": LENGTHS}),
    ((1, 2, 2, 9, 9, 1, 65), (1, 9), True, {"causal": "top_left", "layout": "BLHD", "window": (4, 0)}),
    ((1, 4, 1, 20, 40, 17, 17), None, False, {"causal": "top_left", "dropout": 0.25, "seed": 7, **SEQUENCES}),
    ((1, 1, 1, 3, 300, 8, 8), (300,), False, {"window": (100, 150), "dropout": 0.5, "seed": 3, "offset": 5}),
    ((1, 2, 2, 3, 0, 4, 4), None, False, {}),
)


def _of_attention(rng: np.random.Generator, cases: Cases) -> Iterator[tuple[dict[str, Any], int]]:
    """The arguments of attention, and the length of the longest sum."""
    for (batch, heads, kv_heads, queries, keys, size, v_size), mask, is_bool, options in cases:
        shapes = {"q": (batch, heads, queries, size)}
        shapes |= {"k": (batch, kv_heads, keys, size), "v": (batch, kv_heads, keys, v_size)}
        given: dict[str, Any] = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        if "cu_seqlens_q" in options:
            given = {name: each[0].swapaxes(0, 1).copy() for name, each in given.items()}
        elif options.get("layout") == "BLHD":
            given = {name: each.swapaxes(1, 2).copy() for name, each in given.items()}
        if mask is not None:
            given["mask"] = rng.random(mask) > 0.3 if is_bool else rng.normal(size=mask)
        given |= options
        if "sink" in options:
            given["sink"] = rng.normal(size=heads)
        # Each term of a sum over queries or keys is made of products, which are sums over the numbers of a head.
        yield given, max(keys, heads // kv_heads * queries) * (size + v_size)


def attention(rng: np.random.Generator, cases: Cases = ATTENTIONS) -> Iterator[Example]:
    for index, (given, terms) in enumerate(_of_attention(rng, cases)):
        yield Example(given | {"needs": ("y", "lse") if index else ("y",)}, terms)


def attention_grad(rng: np.random.Generator, cases: Cases = ATTENTIONS) -> Iterator[Example]:
    for index, (given, terms) in enumerate(_of_attention(rng, cases)):
        y, lse = reference("attention")(**given, needs=("y", "lse"))
        more = {"dmask": given.get("mask"), "dsink": given.get("sink")}
        needs = ("dq", "dk", "dv", *(name for name, each in more.items() if each is not None and each.dtype != bool))
        kept = {"y": y, "lse": lse} | ({"dlse": rng.normal(size=lse.shape)} if index else {})
        yield Example({"dy": rng.normal(size=y.shape), **given, **kept, "needs": needs}, terms)


SINKS = ((1, 1, 1, 1), (2, 3, 4, 33), (1, 2, 5, 300), (0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (1, 2, 3, 0))


def sink_softmax(rng: np.random.Generator, cases: Cases = SINKS) -> Iterator[Example]:
    for shape in cases:
        yield Example({"x": rng.normal(0, 2, shape), "sink": rng.normal(size=shape[1])}, terms=max(shape[3], 1))


def sink_softmax_grad(rng: np.random.Generator, cases: Cases = SINKS) -> Iterator[Example]:
    for shape in cases:
        x, sink = rng.normal(0, 2, shape), rng.normal(size=shape[1])
        y, lse = reference("sink_softmax")(x, sink)
        arguments = {"dy": rng.normal(size=shape), "y": y, "lse": lse, "sink": sink}
        yield Example(arguments, terms=max(shape[0] * shape[2] + shape[3], 1))


# Shapes, that of the tables before the angles, how many elements are turned, the shape of positions, the attributes:
# both kinds of pairs, parts of a head, every layout, tables by token and by position.
ROTATIONS: tuple[tuple[Shape, Shape, int, Shape, dict[str, Any]], ...] = (
    ((2, 3, 5, 64), (5,), 64, (), {}),
    ((2, 3, 5, 38), (9,), 38, (), {"interleaved": True}),
    ((2, 3, 5, 40), (2, 5), 24, (), {"rotary_embedding_dim": 24}),
    ((2, 5, 3, 18), (1, 5), 6, (), {"rotary_embedding_dim": 6, "interleaved": True, "layout": "BLHD"}),
    ((3, 4, 2 * 10), (7,), 10, (3, 4), {"num_heads": 2}),
    ((2, 1, 4, 8), (6,), 8, (2, 4), {"layout": "BHLD", "num_heads": 1}),
    ((2, 4, 5, 130), (4,), 130, (2, 4), {"layout": "BLHD"}),
    ((0, 2, 3, 4), (3,), 4, (), {}),
)


def _rotated(rng: np.random.Generator, cases: Cases = ROTATIONS, *, name: str) -> Iterator[Example]:
    for index, (shape, rows, turned, named, attributes) in enumerate(cases):
        angles = rng.uniform(0, 7, (*rows, turned // 2))
        arrays = {name: rng.normal(size=shape), "cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}
        integers = rng.integers(-rows[0], rows[0], named, np.int64 if index % 2 else np.int32)
        yield Example({**arrays, **({"position_ids": integers} if named else {}), **attributes}, terms=2)


rotary_embedding, rotary_embedding_grad = partial(_rotated, name="x"), partial(_rotated, name="dy")


LSTM, GRU = 4, 3  # gates
# Steps, sequences, numbers of x and of a state; the direction; which optional arrays are given.
LAYERS = [
    ((3, 2, 4, 5), "forward", ("bias", "initial_h", "initial_c")),
    ((4, 9, 3, 33), "reverse", ("bias", "peepholes")),
    ((3, 3, 40, 6), "bidirectional", ("bias", "initial_h", "initial_c", "peepholes")),
    ((2, 17, 1, 1), "bidirectional", ()),
    ((1, 1, 7, 3), "forward", ("initial_c",)),
    ((0, 2, 3, 4), "forward", ("initial_h", "initial_c")),
    ((2, 0, 3, 4), "bidirectional", ("bias",)),
]


def _layers(rng: np.random.Generator, cases: Cases, gates: int) -> Iterator[dict[str, Any]]:
    """The arguments of layers; weights as small as those of layers that are trained."""
    for (steps, batch, inputs, hidden), direction, given in cases:
        directions = 1 + (direction == "bidirectional")
        state, scale = (directions, batch, hidden), 1 / np.sqrt(max(hidden, inputs))
        arrays = {
            "x": rng.normal(size=(steps, batch, inputs)),
            "w": scale * rng.normal(size=(directions, gates * hidden, inputs)),
            "r": scale * rng.normal(size=(directions, gates * hidden, hidden)),
            "bias": 0.1 * rng.normal(size=(directions, 2 * gates * hidden)),
            "initial_h": rng.uniform(-1, 1, state),
            "initial_c": rng.normal(size=state),
            "peepholes": 0.3 * rng.normal(size=(directions, 3 * hidden)),
        }
        kept = {name: array for name, array in arrays.items() if name in ("x", "w", "r", *given)}
        if gates == GRU:
            kept = {name: array for name, array in kept.items() if name not in ("initial_c", "peepholes")}
        yield {**kept, "direction": direction}


def _terms(given: dict[str, Any], backward: bool = False) -> int:
    """The longest sum, and as many again for each step that hands its errors to the next."""
    steps, batch, inputs = given["x"].shape
    rows, hidden = given["r"].shape[1:]
    products = max(inputs, hidden, rows if backward else 0, steps * batch if backward else 0)
    return int(products + 4 * steps * hidden)


def lstm_training(rng: np.random.Generator, cases: Cases = LAYERS) -> Sequence[Example]:
    return [Example(given, _terms(given)) for given in _layers(rng, cases, LSTM)]


def gru_training(rng: np.random.Generator, cases: Cases = LAYERS) -> Sequence[Example]:
    layers = _layers(rng, cases, GRU)
    return [Example({**given, "linear_before_reset": not i % 2}, _terms(given)) for i, given in enumerate(layers)]


def _recurrent(rng: np.random.Generator, cases: Cases = LAYERS, *, gates: int) -> Iterator[Example]:
    """The gradients of layers; every third has none of the states of the steps, or none of the last states."""
    name, results = ("lstm", ("y", "y_h", "y_c", "cells", "gates")) if gates == LSTM else ("gru", ("y", "y_h", "gates"))
    for number, given in enumerate(_layers(rng, cases, gates)):
        given |= {} if gates == LSTM else {"linear_before_reset": not number % 2}
        saved = dict(zip(results, reference(f"{name}_training")(**given), strict=True))
        upstream = {f"d{each}": rng.normal(size=saved[each].shape) for each in ("y", "y_h", "y_c") if each in saved}
        if number % 3 == 1:
            del upstream["dy"]
        if number % 3 == 2:
            upstream = {"dy": upstream["dy"]}
        terms = _terms(given, backward=True)
        if gates == LSTM:
            given.pop("bias", None)
        kept = {each: saved[each] for each in ("y", "cells", "gates") if each in saved}
        yield Example(given | kept | upstream, terms)


lstm_grad, gru_grad = partial(_recurrent, gates=LSTM), partial(_recurrent, gates=GRU)


LOGITS = ((7,), (0, 5), *2 * ((3, 65), (40, 10), (2, 3, 4), (2, 1, 3, 1, 33)))


def _log_prob(logits: Array) -> Array:
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def _cross_entropies(
    rng: np.random.Generator, cases: Cases = LOGITS, *, sparse: bool, backward: bool
) -> Iterator[Example]:
    """Labels that are classes or probabilities, with weights and without, in all reductions."""
    for index, shape in enumerate(cases):
        given: dict[str, Any] = {"reduction": REDUCTIONS[(index + 1) % 3]}
        if backward:
            given["dy"] = normal(rng, shape[:-1] if given["reduction"] == "none" else ())
            given["log_prob"] = _log_prob(normal(rng, shape))
        else:
            given["logits"] = normal(rng, shape)
        if sparse:
            given["labels"] = rng.integers(0, shape[-1], shape[:-1]).astype(np.int32 if index % 2 else np.int64)
            given |= {"weight": np.asarray(rng.random(shape[:-1]))} if index % 4 < 2 else {}
        else:
            given["labels"] = np.exp(_log_prob(normal(rng, shape)))
        yield Example(given, 1 if backward else shape[-1])


softmax_cross_entropy = partial(_cross_entropies, sparse=False, backward=False)
sparse_softmax_cross_entropy = partial(_cross_entropies, sparse=True, backward=False)
softmax_cross_entropy_grad = partial(_cross_entropies, sparse=False, backward=True)
sparse_softmax_cross_entropy_grad = partial(_cross_entropies, sparse=True, backward=True)


# Tokens, numbers of a token, classes, options: floats in both orders, integers of every width, both reductions.
LINEAR: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (5, 30, 70, {}),
    (130, 64, 9, {"transposed": False, "reduction": "sum"}),
    (7, 33, 65, {"weighted": True}),
    (6, 64, 100, {"bits": 4}),
    (4, 40, 33, {"bits": 8, "zeros": "packed", "weighted": True, "reduction": "sum"}),
    (4, 48, 130, {"bits": 2, "zeros": "floats"}),
    (3, 64, 40, {"bits": 4, "transposed": False}),
    (0, 4, 8, {}),
)


def linear_cross_entropy_loss(rng: np.random.Generator, cases: Cases = LINEAR) -> Sequence[Example]:
    """Tokens have weights or none; some labels are ignored."""
    return [_layer(rng, *sizes, **options) for *sizes, options in cases]


linear_cross_entropy_loss_and_grad = linear_cross_entropy_loss


def _layer(
    rng: np.random.Generator, tokens: int, size: int, classes: int, bits: int = 0, zeros: str = "",
    transposed: bool = True, weighted: bool = False, reduction: str = "mean", block: int = 16,
) -> Example:  # fmt: skip
    rows, columns = (classes, size) if transposed else (size, classes)
    blocks = -(-columns // block)
    labels = rng.integers(0, classes, (2, tokens))
    given: dict[str, Any] = {
        "x": rng.normal(size=(2, tokens, size)),
        "labels": np.where(rng.random(labels.shape) < 0.2, -100, labels),
    }
    if bits:
        given["b"] = random_bytes(rng, rows, blocks * block * bits // 8)
        given["scales"] = rng.uniform(0.2, 1, (rows, blocks)) / 2**bits
    else:
        given["b"] = rng.normal(size=(rows, columns)) / np.sqrt(size)
    if zeros == "packed":
        given["zero_points"] = random_bytes(rng, rows, -(-blocks * bits // 8))
    elif zeros:
        given["zero_points"] = rng.integers(0, 2**bits, (rows, blocks)).astype(np.float64)
    if weighted:
        given["weight"] = rng.uniform(0.5, 2, labels.shape)
    given |= {"N": classes, "K": size, "bits": bits, "column_block": block if bits else 0, "transB": transposed}
    given |= {"zero_point": 2.0 ** (bits - 1) if bits and not zeros else 0.0, "reduction": reduction}
    return Example(given, max(size, classes, tokens))


PAIRS = (
    ((3, 1), 0.5, 1.0, True),
    ((4, 33), 0.5, 2.0, False),
    ((5, 64), 0.0, 1.0, True),
    ((2, 1000), 1.0, 0.5, True),
    ((3, 70), 0.1, 4.0, True),
    ((2, 129), 0.0, 3.0, False),
    ((0, 5), 0.5, 1.0, False),
    ((3, 0), 0.5, 1.0, False),
)


def softmax_divergence_and_grad(rng: np.random.Generator, cases: Cases = PAIRS) -> Iterator[Example]:
    for shape, beta, temperature, with_slope in cases:
        arguments: dict[str, Any] = {"logits": rng.normal(0, 2, shape), "teacher_logits": rng.normal(0, 2, shape)}
        if with_slope:
            arguments["dloss"] = rng.normal(size=shape[0])
        yield Example({**arguments, "beta": beta, "temperature": temperature}, terms=max(shape[1], 1) + 16)


SHARDS = ((0, 5), (3, 0), (1, 1), (5, 67), (9, 130), (4, 33), (3, 300))  # rows, and the classes of a shard
SCALES: tuple[dict[str, float], ...] = ({}, {"softcap": 3.0, "temperature": 0.7}, {"temperature": 2.0})


def _shards(rng: np.random.Generator, cases: Cases) -> Iterator[dict[str, Any]]:
    """The arguments that both operators have: labels of the shard and of others, with weights and without."""
    for index, (samples, n) in enumerate(cases):
        labels = rng.integers(0, n + 20, samples, dtype=np.int32 if index % 2 else np.int64)
        weight = {"weight": rng.random(n) + 0.5} if index % 4 > 1 else {}
        given = {"logits": 3 * rng.normal(size=(samples, n)), "labels": labels, "first": 10}
        yield {**given, **weight, **SCALES[index % 3]}


def cross_entropy_shard(rng: np.random.Generator, cases: Cases = SHARDS) -> Iterator[Example]:
    for index, given in enumerate(_shards(rng, cases)):
        yield Example({**given, "moment": bool(index % 2)}, max(given["logits"].shape[1], 1))


def cross_entropy_shard_grad(rng: np.random.Generator, cases: Cases = SHARDS) -> Iterator[Example]:
    for given in _shards(rng, cases):
        samples = len(given["labels"])
        factors = np.concatenate([3 + rng.random((2, samples)), rng.normal(size=(4, samples))])
        factors[2:, 1::3] = 0  # rows without a gradient
        yield Example({**given, "factors": factors})
