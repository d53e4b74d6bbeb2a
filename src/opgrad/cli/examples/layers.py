"""Example arguments for operators of language models, normalization, recurrent layers and losses."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from opgrad.cli.examples.arguments import Example, random_bytes
from opgrad.contract import REDUCTIONS, Array, Shape, reference

ELEMENTS = ((), (1,), (0, 3), (37,), (3, 65), (2, 3, 4, 5), (2, 1, 3, 2, 33))
ROWS_OF_BIAS = ((1,), (0, 3), (3, 0), (37,), (5, 65), (2, 3, 4, 5), (2, 1, 3, 2, 33), (70, 1))
LARGE_ELEMENTS = (4096, 1024)  # what a layer of a transformer gives: 16 MiB of float32
LARGE_GATE = (2048, 2816)  # tokens, and what a gated layer has inside: 22 MiB of float32
FAR = 6.0  # the standard deviation of small inputs: some lie where only the tail is left
USUAL = 2.0  # that of large ones, as activations have it


def normal(rng: np.random.Generator, shape: Shape, deviation: float = 1.0) -> Array:
    return np.asarray(rng.normal(0.0, deviation, shape))


def _gelus(rng: np.random.Generator, large: bool, names: Sequence[str]) -> Sequence[Example]:
    shapes, deviation = ([LARGE_ELEMENTS], USUAL) if large else (ELEMENTS, FAR)
    deviations = {"x": deviation, "dy": 1.0}
    return [Example({name: normal(rng, shape, deviations[name]) for name in names}) for shape in shapes]


gelu, gelu_grad = partial(_gelus, names=("x",)), partial(_gelus, names=("dy", "x"))


def bias_gelu_grad_dx(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [
        Example({"dy": normal(rng, shape), "x": normal(rng, shape, FAR), "bias": normal(rng, shape[-1:])})
        for shape in ([LARGE_ELEMENTS] if large else ROWS_OF_BIAS)
    ]


fast_gelu, fast_gelu_grad, bias_fast_gelu_grad_dx = gelu, gelu_grad, bias_gelu_grad_dx


def _gates(rng: np.random.Generator, large: bool, names: Sequence[str]) -> Sequence[Example]:
    activations = ("silu", "gelu", "gelu_tanh")
    pairs = [(LARGE_GATE, "silu")] if large else itertools.product(ELEMENTS[:-1], activations)
    return [Example({**{name: normal(rng, shape, 2) for name in names}, "activation": of}) for shape, of in pairs]


gated_linear_unit = partial(_gates, names=("gate", "up"))
gated_linear_unit_grad = partial(_gates, names=("dy", "gate", "up"))


def dropout(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"x": normal(rng, LARGE_ELEMENTS), "ratio": 0.1, "seed": np.array(7)})]
    given = [Example({"x": normal(rng, shape), "seed": np.array(at - 2)}) for at, shape in enumerate(DROPPED)]
    x = normal(rng, (5, 33))
    more: list[dict[str, Any]] = [{"ratio": ratio, "seed": 2**62 + 1} for ratio in (0.0, 0.1, 1.0)]
    more.append({"training_mode": False, "seed": np.array([3], np.int32)})
    return [*given, *(Example({"x": x, **each}) for each in more)]


DROPPED = ((), (0, 3), (37,), (3, 65), (2, 3, 4, 5), (3, 1, 5, 2, 417))


def dropout_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    if large:
        mask = rng.random(LARGE_ELEMENTS) > 0.1
        return [Example({"dy": normal(rng, LARGE_ELEMENTS), "mask": mask, "ratio": 0.1})]
    given = [Example({"dy": normal(rng, s), "mask": np.asarray(normal(rng, s) > 0.0)}) for s in DROPPED]
    both = {"dy": normal(rng, (5, 33)), "mask": rng.random((5, 33)) > 0.1}
    more = [{"ratio": 0.0}, {"ratio": 0.1}, {"ratio": 1.0}, {"ratio": 0.1, "training_mode": False}]
    return [*given, *(Example({**both, **each}) for each in more)]


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
LARGE_ROWS = (8192, 768)
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
LARGE_CHANNELS = (32, 128, 28, 28)


def _rows(rng: np.random.Generator, large: bool, single: bool = True) -> list[tuple[dict[str, Any], int]]:
    """x, scale and axis, with the length of the longest sum; `single`: rows of one element are among them."""
    found = []
    for shape, axis in [(LARGE_ROWS, -1)] if large else ROWS:
        if math.prod(shape[axis:]) == 1 and not single:
            continue
        x, scale = rng.normal(1, 2, shape), rng.uniform(0.5, 2, shape[axis:])
        terms = max(math.prod(shape[axis:]), math.prod(shape[:axis]))
        found.append(({"x": x, "scale": scale, "axis": axis}, terms))
    return found


def _statistics(x: Array, axes: tuple[int, ...], centred: bool = True) -> tuple[Array, Array]:
    count = max(math.prod(x.shape[axis] for axis in axes), 1)
    mean = x.sum(axes, keepdims=True) / count if centred else np.zeros(())
    return mean, 1 / np.sqrt(np.square(x - mean).sum(axes, keepdims=True) / count + 1e-5)


def layer_normalization(rng: np.random.Generator, large: bool) -> Iterator[Example]:
    for i, (given, terms) in enumerate(_rows(rng, large)):
        bias = {"bias": rng.normal(size=given["scale"].shape)} if large or i % 3 else {}
        yield Example({**given, **bias, "epsilon": 1e-3 if i % 2 else 1e-5}, terms)


def layer_normalization_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [_row_gradient(rng, given, terms, True) for given, terms in _rows(rng, large)]


def simplified_layer_normalization(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [Example(given, terms) for given, terms in _rows(rng, large)]


def simplified_layer_normalization_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    # A row of one element is normalized to 1 or -1, and its gradient is what rounding leaves of 0.
    return [_row_gradient(rng, given, terms, False) for given, terms in _rows(rng, large, single=False)]


def _row_gradient(rng: np.random.Generator, given: dict[str, Any], terms: int, centred: bool) -> Example:
    x, axis = given["x"], given["axis"]
    mean, inv_std = _statistics(x, tuple(range(axis % x.ndim, x.ndim)), centred)
    kept = {"mean": mean, "inv_std": inv_std} if centred else {"inv_std": inv_std}
    return Example({"dy": rng.normal(size=x.shape), **given, **kept}, terms)


def _channels(rng: np.random.Generator, large: bool) -> list[tuple[dict[str, Any], tuple[int, ...], int]]:
    """x and scale, the axes of the statistics, and the length of the longest sum."""
    found = []
    for shape in [LARGE_CHANNELS] if large else CHANNELS:
        axes = (0, *range(2, len(shape)))
        x, scale = rng.normal(1, 2, shape), rng.uniform(0.5, 2, shape[1])
        found.append(({"x": x, "scale": scale}, axes, math.prod(shape[axis] for axis in axes)))
    return found


def batch_norm_internal(rng: np.random.Generator, large: bool) -> Iterator[Example]:
    for i, (given, _, terms) in enumerate(_channels(rng, large)):
        channels = given["scale"].size
        bias, mean, var = rng.normal(size=channels), rng.normal(size=channels), rng.uniform(0.5, 2, channels)
        given |= {"bias": bias, "running_mean": mean, "running_var": var}
        # Numbers that float32, the type of ONNX attributes, has exactly.
        given |= {"epsilon": 2.0**-10, "momentum": 0.75 if i % 2 else 0.875}
        yield Example(given, terms)
        if not large:
            yield Example({**given, "training_mode": False}, terms)


def batch_normalization_grad(rng: np.random.Generator, large: bool) -> Iterator[Example]:
    for given, axes, terms in _channels(rng, large):
        mean, inv_std = (statistic.ravel() for statistic in _statistics(given["x"], axes))
        yield Example({"dy": rng.normal(size=given["x"].shape), **given, "mean": mean, "inv_std": inv_std}, terms)


LARGE_SCORES = (4, 16, 256, 256)  # samples, heads, queries, keys: 16 MiB of float32
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


def bias_softmax(rng: np.random.Generator, large: bool) -> Iterator[Example]:
    cases = [(LARGE_SCORES, (LARGE_SCORES[0], 1, 1, LARGE_SCORES[3]), 3, True)] if large else BIASES
    for shape, bias, axis, inner in cases:
        arrays = {"x": rng.normal(0, 2, shape), "bias": rng.normal(size=bias)}
        yield Example({**arrays, "axis": axis, "is_inner_broadcast": inner}, terms=math.prod(shape[axis:]))


def softmax_dropout_grad(rng: np.random.Generator, large: bool) -> Iterator[Example]:
    for place, (shape, axis) in enumerate([(LARGE_SCORES, 3)] if large else SOFTMAXES):
        e = np.exp(rng.normal(size=shape))
        axes = tuple(range(axis % len(shape), len(shape)))
        dy, mask, y = rng.normal(size=shape), rng.random(shape) > 0.1, e / e.sum(axes, keepdims=True)
        arguments = {"dy": dy, "mask": mask, "y": y, "ratio": (0.1, 0.0, 0.5, 1.0)[place % 4], "axis": axis}
        yield Example(arguments, terms=math.prod(shape[axis:]))


# --- attention: sizes as (batch, heads of q, heads of k, length of q, length of k, size of a head, size of v's) -------

LARGE_ATTENTION = (1, 12, 12, 1024, 1024, 64, 64)
SEQUENCES = {"cu_seqlens_q": np.array([0, 3, 3, 20]), "cu_seqlens_k": np.array([2, 9, 10, 40])}
LENGTHS = np.array([9, 0])
# The sizes, the shape of the mask and whether it is bool, the other options. Together they take all ways of the kernel.
ATTENTIONS: tuple[tuple[tuple[int, ...], Any, bool, dict[str, Any]], ...] = (
    ((2, 2, 2, 7, 9, 8, 8), None, False, {}),
    ((1, 4, 2, 65, 70, 16, 5), None, False, {"causal": "bottom_right", "sink": True}),
    ((2, 2, 1, 5, 11, 3, 1), (2, 1, 5, 11), False, {"scale": 0.25, "softcap": 2.0, "key_lengths": LENGTHS}),
    ((1, 2, 2, 9, 9, 1, 65), (1, 9), True, {"causal": "top_left", "layout": "BLHD", "window": (4, 0)}),
    ((1, 4, 1, 20, 40, 17, 17), None, False, {"causal": "top_left", "dropout": 0.25, "seed": 7, **SEQUENCES}),
    ((1, 1, 1, 3, 300, 8, 8), (300,), False, {"window": (100, 150), "dropout": 0.5, "seed": 3, "offset": 5}),
    ((1, 2, 2, 3, 0, 4, 4), None, False, {}),
)


def _of_attention(rng: np.random.Generator, large: bool) -> Iterator[tuple[dict[str, Any], int]]:
    """The arguments of attention, and the length of the longest sum."""
    cases = [(LARGE_ATTENTION, None, False, {"causal": True})] if large else ATTENTIONS
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


def attention(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    needs = ("y",) if large else ("y", "lse")
    return [Example(given | {"needs": needs}, terms) for given, terms in _of_attention(rng, large)]


def attention_grad(rng: np.random.Generator, large: bool) -> Iterator[Example]:
    for given, terms in _of_attention(rng, large):
        y, lse = reference("attention")(**given, needs=("y", "lse"))
        more = {"dmask": given.get("mask"), "dsink": given.get("sink")}
        needs = ("dq", "dk", "dv", *(name for name, each in more.items() if each is not None and each.dtype != bool))
        kept = {"y": y, "lse": lse} | ({} if large else {"dlse": rng.normal(size=lse.shape)})
        yield Example({"dy": rng.normal(size=y.shape), **given, **kept, "needs": needs}, terms)


SINKS = ((1, 1, 1, 1), (2, 3, 4, 33), (1, 2, 5, 300), (0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (1, 2, 3, 0))


def sink_softmax(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [
        Example({"x": rng.normal(0, 2, shape), "sink": rng.normal(size=shape[1])}, terms=max(shape[3], 1))
        for shape in ([LARGE_SCORES] if large else SINKS)
    ]


def sink_softmax_grad(rng: np.random.Generator, large: bool) -> Iterator[Example]:
    for shape in [LARGE_SCORES] if large else SINKS:
        x, sink = rng.normal(0, 2, shape), rng.normal(size=shape[1])
        y, lse = reference("sink_softmax")(x, sink)
        arguments = {"dy": rng.normal(size=shape), "y": y, "lse": lse, "sink": sink}
        yield Example(arguments, terms=max(shape[0] * shape[2] + shape[3], 1))


LARGE_HEADS = (4, 32, 512, 128)  # sequences, heads, tokens, size of a head: 32 MiB of float32


def _rotated(rng: np.random.Generator, large: bool, name: str) -> list[Example]:
    """Both kinds of pairs, parts of a head, every layout, tables by token and by position."""
    if large:
        return [_rotation(rng, name, LARGE_HEADS, (LARGE_HEADS[2],), LARGE_HEADS[3])]
    return [
        _rotation(rng, name, (2, 3, 5, 64), (5,), 64),
        _rotation(rng, name, (2, 3, 5, 38), (9,), 38, interleaved=True),
        _rotation(rng, name, (2, 3, 5, 40), (2, 5), 24, rotary_embedding_dim=24),
        _rotation(rng, name, (2, 5, 3, 18), (1, 5), 6, rotary_embedding_dim=6, interleaved=True, layout="BLHD"),
        _rotation(rng, name, (3, 4, 2 * 10), (7,), 10, _positions(rng, 7, 3, 4), num_heads=2),
        _rotation(rng, name, (2, 1, 4, 8), (6,), 8, _positions(rng, 6, 2, 4), layout="BHLD", num_heads=1),
        _rotation(rng, name, (2, 4, 5, 130), (4,), 130, _positions(rng, 4, 2, 4).astype("i4"), layout="BLHD"),
        _rotation(rng, name, (0, 2, 3, 4), (3,), 4),
    ]


rotary_embedding, rotary_embedding_grad = partial(_rotated, name="x"), partial(_rotated, name="dy")


def _positions(rng: np.random.Generator, rows: int, *shape: int) -> np.ndarray:
    return rng.integers(-rows, rows, shape)


def _rotation(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], rows: tuple[int, ...], turned: int,
    positions: np.ndarray | None = None, **attributes: Any,
) -> Example:  # fmt: skip
    angles = rng.uniform(0, 7, (*rows, turned // 2))
    arrays = {name: rng.normal(size=shape), "cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}
    found = {} if positions is None else {"position_ids": positions}
    return Example({**arrays, **found, **attributes}, terms=2)


LSTM, GRU = 4, 3  # gates
LARGE = (64, 32, 256, 256)
# Steps, sequences, numbers of x and of a state; the direction; which optional arrays are given.
SMALL = [
    ((3, 2, 4, 5), "forward", ("bias", "initial_h", "initial_c")),
    ((4, 9, 3, 33), "reverse", ("bias", "peepholes")),
    ((3, 3, 40, 6), "bidirectional", ("bias", "initial_h", "initial_c", "peepholes")),
    ((2, 17, 1, 1), "bidirectional", ()),
    ((1, 1, 7, 3), "forward", ("initial_c",)),
]
EMPTY = [((0, 2, 3, 4), "forward", ("initial_h", "initial_c")), ((2, 0, 3, 4), "bidirectional", ("bias",))]


def _layers(rng: np.random.Generator, large: bool, gates: int) -> list[dict[str, Any]]:
    """The arguments of layers; weights as small as those of layers that are trained."""
    found = []
    for (steps, batch, inputs, hidden), direction, given in [(LARGE, "forward", ("bias",))] if large else SMALL + EMPTY:
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
        found.append({**kept, "direction": direction})
    return found


def _terms(given: dict[str, Any], backward: bool = False) -> int:
    """The longest sum, and as many again for each step that hands its errors to the next."""
    steps, batch, inputs = given["x"].shape
    rows, hidden = given["r"].shape[1:]
    products = max(inputs, hidden, rows if backward else 0, steps * batch if backward else 0)
    return int(products + 4 * steps * hidden)


def lstm_training(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [Example(given, _terms(given)) for given in _layers(rng, large, LSTM)]


def gru_training(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    layers = _layers(rng, large, GRU)
    return [Example({**given, "linear_before_reset": not i % 2}, _terms(given)) for i, given in enumerate(layers)]


def _recurrent(rng: np.random.Generator, large: bool, gates: int) -> Iterator[Example]:
    """The gradients of layers; every third has none of the states of the steps, or none of the last states."""
    name, results = ("lstm", ("y", "y_h", "y_c", "cells", "gates")) if gates == LSTM else ("gru", ("y", "y_h", "gates"))
    for number, given in enumerate(_layers(rng, large, gates)):
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


LARGE_LOGITS = (2048, 4096)  # samples and classes: 32 MiB of float32
LOGITS = ((7,), (0, 5), (3, 65), (40, 10), (2, 3, 4), (2, 1, 3, 1, 33))


def _log_prob(logits: Array) -> Array:
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def _cross_entropies(rng: np.random.Generator, large: bool, sparse: bool, backward: bool) -> Iterator[Example]:
    """Labels that are classes or probabilities, with weights and without, in all reductions."""
    for place, shape in enumerate([LARGE_LOGITS] if large else (*LOGITS, *LOGITS[2:])):
        given: dict[str, Any] = {"reduction": "mean" if large else REDUCTIONS[(place + 1) % 3]}
        if backward:
            given["dy"] = normal(rng, shape[:-1] if given["reduction"] == "none" else ())
            given["log_prob"] = _log_prob(normal(rng, shape))
        else:
            given["logits"] = normal(rng, shape)
        if sparse:
            given["labels"] = rng.integers(0, shape[-1], shape[:-1]).astype(np.int32 if place % 2 else np.int64)
            given |= {"weight": np.asarray(rng.random(shape[:-1]))} if place % 4 < 2 else {}
        else:
            given["labels"] = np.exp(_log_prob(normal(rng, shape)))
        yield Example(given, 1 if backward else shape[-1])


softmax_cross_entropy = partial(_cross_entropies, sparse=False, backward=False)
sparse_softmax_cross_entropy = partial(_cross_entropies, sparse=True, backward=False)
softmax_cross_entropy_grad = partial(_cross_entropies, sparse=False, backward=True)
sparse_softmax_cross_entropy_grad = partial(_cross_entropies, sparse=True, backward=True)


LARGE_LAYER = 512, 512, 32000  # tokens, numbers of a token, classes


def linear_cross_entropy_loss(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    """Floats in both orders, integers of every width, weights of tokens, ignored labels, both reductions."""
    if large:
        return [_layer(rng, *LARGE_LAYER)]
    return [
        _layer(rng, 5, 30, 70),
        _layer(rng, 130, 64, 9, transposed=False, reduction="sum"),
        _layer(rng, 7, 33, 65, weighted=True),
        _layer(rng, 6, 64, 100, bits=4),
        _layer(rng, 4, 40, 33, bits=8, zeros="packed", weighted=True, reduction="sum"),
        _layer(rng, 4, 48, 130, bits=2, zeros="floats"),
        _layer(rng, 3, 64, 40, bits=4, transposed=False),
        _layer(rng, 0, 4, 8),
    ]


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


LARGE_PAIR = (1024, 8192)  # rows, classes: 32 MiB of float32
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


def softmax_divergence_and_grad(rng: np.random.Generator, large: bool) -> Iterator[Example]:
    for shape, beta, temperature, with_slope in [(LARGE_PAIR, 0.5, 1.0, False)] if large else PAIRS:
        arguments: dict[str, Any] = {"logits": rng.normal(0, 2, shape), "teacher_logits": rng.normal(0, 2, shape)}
        if with_slope:
            arguments["dloss"] = rng.normal(size=shape[0])
        yield Example({**arguments, "beta": beta, "temperature": temperature}, terms=max(shape[1], 1) + 16)


LARGE_SHARD = (2048, 16000)  # rows, and the classes of a shard
SHARDS = ((0, 5), (3, 0), (1, 1), (5, 67), (9, 130), (4, 33), (3, 300))
SCALES: tuple[dict[str, float], ...] = ({}, {"softcap": 3.0, "temperature": 0.7}, {"temperature": 2.0})


def _shards(rng: np.random.Generator, large: bool) -> Iterator[dict[str, Any]]:
    """The arguments that both operators have: labels of the shard and of others, with weights and without."""
    for place, (samples, n) in enumerate((LARGE_SHARD,) if large else SHARDS):
        labels = rng.integers(0, n + 20, samples, dtype=np.int32 if place % 2 else np.int64)
        weight = {} if large or place % 2 else {"weight": rng.random(n) + 0.5}
        scale = {} if large else SCALES[place % 3]
        yield {"logits": 3 * rng.normal(size=(samples, n)), "labels": labels, "first": 10, **weight, **scale}


def cross_entropy_shard(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    return [
        Example({**given, "moment": bool(place % 2)}, max(given["logits"].shape[1], 1))
        for place, given in enumerate(_shards(rng, large))
    ]


def cross_entropy_shard_grad(rng: np.random.Generator, large: bool) -> Iterator[Example]:
    for given in _shards(rng, large):
        samples = len(given["labels"])
        factors = np.concatenate([3 + rng.random((2, samples)), rng.normal(size=(4, samples))])
        factors[2:, 1::3] = 0  # rows without a gradient
        yield Example({**given, "factors": factors})
