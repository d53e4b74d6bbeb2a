"""Operators of newer opsets, of few models, and with weights in bytes."""

import itertools

import numpy as np
import torch
from runtime_cases import RuntimeCase
from runtime_cases_packed import packed
from torch.nn import functional

from opgrad.onnx.rules.quantization import TABLES

RANDOM = np.random.default_rng(3)
CASES = {}


def numbers(*shape, kind=np.float32):
    return RANDOM.normal(size=shape).astype(kind)


def added_to(cases):
    """A function that adds a case to these."""

    def add(name, arrays, formula, wanted=None, form="", **options):
        """A case; by default all floats are differentiated."""
        floats = [place for place, array in enumerate(arrays) if array is not None and array.dtype.kind == "f"]
        attributes = {key: options.pop(key) for key in list(options) if key not in RuntimeCase.__dataclass_fields__}
        options.setdefault("terms", 64)
        case = RuntimeCase(name, arrays, formula, tuple(floats if wanted is None else wanted), attributes, **options)
        cases[f"{name}{', ' * bool(form)}{form}"] = case

    return add


add = added_to(CASES)


# --- ai.onnx ---
add(
    "Col2Im",
    [numbers(2, 12, 16), np.array([5, 6]), np.array([2, 3])],
    lambda x, *_: functional.fold(x, (5, 6), (2, 3)),
    constants=(1, 2),
    opset=18,
    domain="",
)
add(
    "Col2Im",
    [numbers(1, 8, 9), np.array([5, 5]), np.array([2, 2])],
    lambda x, *_: functional.fold(x, (5, 5), (2, 2), dilation=2, padding=1, stride=2),
    constants=(1, 2),
    dilations=[2, 2],
    pads=[1, 1, 1, 1],
    strides=[2, 2],
    opset=18,
    domain="",
    form="strides",
)
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


add("CausalConvWithState", [numbers(2, 4, 5), *TAPS], causal, outputs=2)
add(
    "CausalConvWithState",
    [numbers(2, 4, 5), *TAPS, numbers(2, 4, 2)],
    lambda *x: causal(*x, activation=True),
    outputs=2,
    activation="silu",
    form="past, silu",
)
add(
    "CausalConvWithState",
    [numbers(2, 4, 5), *TAPS, numbers(2, 4, 4)],
    lambda *x: causal(*x, dilation=2),
    outputs=2,
    dilation=2,
    form="dilation",
)
add(
    "CausalConvWithState",
    [numbers(2, 5, 4), *TAPS, numbers(2, 2, 4)],
    last(causal),
    outputs=2,
    channels_last=1,
    form="channels last",
)


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
add(
    "MRotaryEmbedding",
    [numbers(2, 3, 16), RANDOM.integers(0, 9, (3, 2, 3)), np.cos(ANGLES), np.sin(ANGLES)],
    turned,
    wanted=(0,),
    mrope_section=[2, 1, 1],
    num_heads=2,
)


# --- weights in bytes ---
for kind, form in ((0, "fp4"), (1, "nf4")):
    WHOLE = RANDOM.integers(0, 16, (6, 32))
    BYTES = packed(WHOLE[:, np.arange(32) ^ 1], 4).reshape(-1)
    add(
        "MatMulBnb4",
        [numbers(2, 32), BYTES, np.abs(numbers(12))],
        lambda a, _, s, w=TABLES[kind][WHOLE]: a @ (torch.tensor(w) * s.repeat_interleave(16).reshape(6, 32)).T,
        K=32,
        N=6,
        block_size=16,
        quant_type=kind,
        transB=1,
        form=form,
    )

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
add("GatherBlockQuantized", [packed(ROWS, 4), PLACES, SCALES], gathered(ROWS, HALF), bits=4, **blocks)
add(
    "GatherBlockQuantized",
    [packed(ROWS, 4), PLACES, SCALES, packed(ZEROS, 4)],
    gathered(ROWS, ZEROS),
    bits=4,
    form="zero points",
    **blocks,
)
add(
    "GatherBlockQuantized",
    [EIGHT.astype(np.uint8), PLACES, SCALES.astype(np.float16)],
    gathered(EIGHT, 16 * HALF),
    bits=8,
    form="8 bits, float16",
    **blocks,
)

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
    form = f"opset {opset}"
    add("DFT", [numbers(2, 6, 1), *column], lambda x, *_: pairs(torch.fft.fft(whole(x))), form=form, **transform)
    add(
        "DFT",
        [numbers(2, 6, 2), *column],
        lambda x, *_: pairs(torch.fft.ifft(whole(x))),
        inverse=1,
        form=f"inverse, {form}",
        **transform,
    )
    add(
        "DFT",
        [numbers(2, 7, 1), *column],
        lambda x, *_: pairs(torch.fft.rfft(x[..., 0])),
        onesided=1,
        form=f"one side, {form}",
        **transform,
    )
    add(
        "DFT",
        [numbers(2, 5, 2), *column],
        lambda x, *_: torch.fft.irfft(whole(x)).unsqueeze(-1),
        inverse=1,
        onesided=1,
        form=f"inverse of one side, {form}",
        **transform,
    )
    for length, dim in itertools.product((1, 2, 6, 7, 8, 13), (1, -2)):
        place = [np.array(length), np.array(dim)] if opset == 20 else [np.array(length)]
        own = {"constants": (1, 2)} if opset == 20 else {"constants": (1,), "axis": dim}
        for inverse, onesided in itertools.product((0, 1), (0, 1)):
            own_size = length // 2 + 1  # with any other onnxruntime 1.32 computes something else than ONNX's reference
            shape = (2, own_size if dim == 1 else 5, own_size if dim == -2 else 3) if onesided & inverse else (2, 5, 3)
            for each in ((1, 2), (1,), (1, 2), (2,))[2 * inverse + onesided]:
                add(
                    "DFT",
                    [numbers(*shape, each), *place],
                    lambda x, *_, n=length, dim=dim, kind=(inverse, onesided): transformed(x, n, dim % 4, *kind),
                    form=f"{length} of numbers along {dim}, {inverse}, {onesided}, {each}, {form}",
                    inverse=inverse,
                    onesided=onesided,
                    **{**transform, **own},
                )
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
