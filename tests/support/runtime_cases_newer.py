"""Operators of newer opsets, of few models, and with weights in bytes."""

import itertools

import numpy as np
import torch
from runtime_cases import added_to
from runtime_cases_packed import packed
from torch.nn import functional

from opgrad.onnx.rules.quantization import TABLES

RANDOM = np.random.default_rng(3)
CASES = {}


def numbers(*shape, kind=np.float32):
    return RANDOM.normal(size=shape).astype(kind)


add = added_to(CASES, terms=64)


# --- ai.onnx ---
given = {"constants": (1, 2), "opset": 18, "domain": ""}
ARRAYS = [numbers(2, 12, 16), np.array([5, 6]), np.array([2, 3])]
add("Col2Im", ARRAYS, lambda x, *_: functional.fold(x, (5, 6), (2, 3)), **given)
given |= {"dilations": [2, 2], "pads": [1, 1, 1, 1], "strides": [2, 2], "form": "strides"}
ARRAYS = [numbers(1, 8, 9), np.array([5, 5]), np.array([2, 2])]
add("Col2Im", ARRAYS, lambda x, *_: functional.fold(x, (5, 5), (2, 2), dilation=2, padding=1, stride=2), **given)
MATRICES = (numbers(2, 3, 3) + 3 * np.eye(3)).astype(np.float32)
add("Det", [MATRICES], torch.linalg.det, domain="", opset=22)
add("Inverse", [MATRICES], torch.linalg.inv, terms=256)

# --- com.microsoft ---
TAPS = [numbers(4, 1, 3), numbers(4)]


def causal(x, w, b=None, past=None, dilation=1, activation=None):
    kept = (w.shape[2] - 1) * dilation
    whole = torch.cat([x.new_zeros(*x.shape[:2], kept) if past is None else past, x], 2)
    y = functional.conv1d(whole, w, b, groups=x.shape[1], dilation=dilation)
    return functional.silu(y) if activation else y, whole[:, :, whole.shape[2] - kept :]


def last(function):
    def of(x, w, b, past):
        return [each.transpose(1, 2) for each in function(x.transpose(1, 2), w, b, past.transpose(1, 2))]

    return of


for form, shape, past, formula, given in (
    ("", (2, 4, 5), None, causal, {}),
    ("past, silu", (2, 4, 5), (2, 4, 2), lambda *x: causal(*x, activation=True), {"activation": "silu"}),
    ("dilation", (2, 4, 5), (2, 4, 4), lambda *x: causal(*x, dilation=2), {"dilation": 2}),
    ("channels last", (2, 5, 4), (2, 2, 4), last(causal), {"channels_last": 1}),
):
    arrays = [numbers(*shape), *TAPS, *([] if past is None else [numbers(*past)])]
    add("CausalConvWithState", arrays, formula, outputs=2, form=form, **given)


def turned(x, positions, cos, sin):
    """Pairs half a head apart, of which the first section turns by the time, the others by height and width."""
    pairs = torch.arange(4)
    stream = torch.tensor([0, 0, 1, 2])
    at = positions[stream].permute(1, 2, 0)
    c, s = (each[at, pairs][:, :, None] for each in (cos, sin))
    split = x.reshape(2, 3, 2, 8)
    a, b = split[..., :4], split[..., 4:]
    return torch.cat([a * c - b * s, b * c + a * s], -1).reshape(2, 3, 16)


ANGLES = numbers(9, 4)
ARRAYS = [numbers(2, 3, 16), RANDOM.integers(0, 9, (3, 2, 3)), np.cos(ANGLES), np.sin(ANGLES)]
add("MRotaryEmbedding", ARRAYS, turned, wanted=(0,), mrope_section=[2, 1, 1], num_heads=2)


# --- weights in bytes ---
for kind, form in ((0, "fp4"), (1, "nf4")):
    WHOLE = RANDOM.integers(0, 16, (6, 32))
    BYTES = packed(WHOLE[:, np.arange(32) ^ 1], 4).reshape(-1)

    def product(a, _, s, w=TABLES[kind][WHOLE]):
        return a @ (torch.tensor(w) * s.repeat_interleave(16).reshape(6, 32)).T

    given = {"K": 32, "N": 6, "block_size": 16, "quant_type": kind, "transB": 1, "form": form}
    add("MatMulBnb4", [numbers(2, 32), BYTES, np.abs(numbers(12))], product, **given)

ROWS, PLACES = RANDOM.integers(0, 16, (7, 64)), np.array([[1, 6, 1], [0, 2, 5]])
ZEROS, EIGHT = RANDOM.integers(0, 16, (7, 2)), RANDOM.integers(0, 256, (7, 64))


def gathered(whole, offset):
    def of(_, places, scales, *__):
        return (
            (torch.tensor(whole) - torch.tensor(offset).repeat_interleave(32, -1)) * scales.repeat_interleave(32, -1)
        )[places]

    return of


SCALES, HALF = np.abs(numbers(7, 2)), np.full((7, 2), 8)
blocks = {"block_size": 32, "quantize_axis": 1, "gather_axis": 0}
for form, arrays, formula, bits in (
    ("", [packed(ROWS, 4), PLACES, SCALES], gathered(ROWS, HALF), 4),
    ("zero points", [packed(ROWS, 4), PLACES, SCALES, packed(ZEROS, 4)], gathered(ROWS, ZEROS), 4),
    ("8 bits, float16", [EIGHT.astype("u1"), PLACES, SCALES.astype("f2")], gathered(EIGHT, 16 * HALF), 8),
):
    add("GatherBlockQuantized", arrays, formula, bits=bits, form=form, **blocks)

# --- Fourier transforms ---


def pairs(complex_numbers):
    """Complex numbers as pairs along the last axis."""
    return torch.view_as_real(complex_numbers)


def whole(x):
    return torch.complex(x[..., 0], x[..., 1] if x.shape[-1] == 2 else torch.zeros_like(x[..., 0]))


def transformed(x, length, axis, inverse, onesided):
    """A transform of pairs along an axis of a batch."""
    if inverse and onesided:
        return torch.fft.irfft(whole(x), length, axis).unsqueeze(-1)
    if onesided:
        return pairs(torch.fft.rfft(x[..., 0], length, axis))
    return pairs((torch.fft.ifft if inverse else torch.fft.fft)(whole(x), length, axis))


for opset in (17, 20):
    column = [None, np.array(1)] if opset == 20 else []
    axis = {"constants": (2,)} if opset == 20 else {"axis": 1}
    transform = {"domain": "", "opset": opset, "wanted": (0,), "terms": 256, **axis}
    for kind, (words, shape) in {
        (0, 0): ("", (2, 6, 1)),
        (1, 0): ("inverse, ", (2, 6, 2)),
        (0, 1): ("one side, ", (2, 7, 1)),
        (1, 1): ("inverse of one side, ", (2, 5, 2)),
    }.items():
        given = {name: 1 for name, flag in zip(("inverse", "onesided"), kind, strict=True) if flag}
        add("DFT", [numbers(*shape), *column], lambda x, *_, kind=kind: transformed(x, None, -1, *kind),
            form=f"{words}opset {opset}", **given, **transform)  # fmt: skip
    for length, dim in itertools.product((1, 2, 6, 7, 8, 13), (1, -2)):
        place = [np.array(length), np.array(dim)] if opset == 20 else [np.array(length)]
        own = {"constants": (1, 2)} if opset == 20 else {"constants": (1,), "axis": dim}
        for inverse, onesided in itertools.product((0, 1), (0, 1)):
            own_size = length // 2 + 1  # with any other onnxruntime 1.32 computes something else than ONNX's reference
            shape = (2, own_size if dim == 1 else 5, own_size if dim == -2 else 3) if onesided & inverse else (2, 5, 3)
            given = {**transform, **own, "inverse": inverse, "onesided": onesided}
            for each in ((1, 2), (1,), (1, 2), (2,))[2 * inverse + onesided]:
                given["form"] = f"{length} of numbers along {dim}, {inverse}, {onesided}, {each}, opset {opset}"
                add("DFT", [numbers(*shape, each), *place],
                    lambda x, *_, n=length, dim=dim, kind=(inverse, onesided): transformed(x, n, dim % 4, *kind),
                    **given)  # fmt: skip
for length in (5, 9):
    add("DFT", [numbers(2, 7, 1), np.array(length), np.array(-2)],
        lambda x, _, __, n=length: pairs(torch.fft.rfft(x[..., 0], n)), constants=(1, 2), onesided=1,
        domain="", opset=20, wanted=(0,), terms=256, form=f"one side, {length} of 7")  # fmt: skip
SOUND, WINDOW = numbers(2, 20, 1), np.hanning(8).astype(np.float32)


def frames(x, step, window=None, size=None, onesided=True):
    parts = x[..., 0].unfold(1, 8, int(step)) * (1 if window is None else window)
    return pairs(torch.fft.rfft(parts) if onesided else torch.fft.fft(parts))


for opset in (17, 20):
    spectrum = {"domain": "", "opset": opset, "terms": 256}
    add("STFT", [SOUND, np.array(3), WINDOW], frames, form=f"window, opset {opset}", **spectrum)
    add("STFT", [SOUND, np.array(4), None, np.array(8)], lambda *x: frames(*x, onesided=False), onesided=0,
        form=f"both sides, opset {opset}", **spectrum)  # fmt: skip
