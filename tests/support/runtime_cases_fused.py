"""Operators that do in one kernel what several of ai.onnx do."""

import numpy as np
import torch
from runtime_cases import added_to
from runtime_cases_packed import packed
from torch.nn import functional

RANDOM = np.random.default_rng(2)
CASES = {}


def numbers(*shape, kind=np.float32, low=None):
    """Normal numbers, or uniform ones from `low` to 1.5."""
    return (RANDOM.normal(size=shape) if low is None else RANDOM.uniform(low, 1.5, shape)).astype(kind)


def rms(x, epsilon=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


add, silu = added_to(CASES), functional.silu

# --- gates and normalizations ---
for kind in (np.float32, np.float16):
    form = kind.__name__
    X = numbers(2, 3, 8, kind=kind)
    add("ScaledSiLU", [X], lambda x: silu(0.7 * x), alpha=0.7, form=form)
    add("GatedAdd", [X, numbers(2, 3, 8, kind=kind), numbers(2, 3, 1, kind=kind)], lambda x, y, g: x + y * g, form=form)
    add("GatedRMSNorm", [X, numbers(4, kind=kind), numbers(2, 3, 8, kind=kind)],
        lambda x, scale, g: (rms(x.reshape(2, 3, 2, 4)) * scale).reshape(2, 3, 8) * silu(g), form=form)  # fmt: skip
    add("LinearAttentionGate", [X, numbers(8), numbers(8), numbers(2, 3, 8, kind=kind)],
        lambda a, bias, scale, b: (functional.softplus(a + bias) * scale, torch.sigmoid(b)),
        outputs=2, form=form)  # fmt: skip
add("ScaledSiLU", [numbers(2, 3), numbers()], lambda x, scale: silu(scale * x), form="scale as input")
add("GatedRMSNorm", [numbers(2, 8), numbers(8), numbers(2, 8)], lambda x, scale, g: rms(x) * scale * torch.sigmoid(g),
    activation="sigmoid", form="sigmoid")  # fmt: skip


# --- other names ---
PADS, turned = np.array([1, 0, 0, 2]), {"transA": 1, "transB": 1, "alpha": 0.5}
add("TransposeMatMul", [numbers(2, 4, 3), numbers(2, 5, 4)], lambda a, b: 0.5 * a.mT @ b.mT, **turned)
add("GatherND", [numbers(2, 3), np.array([[0, 1], [1, 2], [0, 1]])], lambda x, at: x[at[:, 0], at[:, 1]])
add("Pad", [numbers(2, 3), PADS, numbers(1)], lambda x, _, v: functional.pad(x - v, (0, 2, 1, 0)) + v, mode="constant")
add("Trilu", [numbers(3, 4), np.array(1)], lambda x, _: torch.triu(x, 1))


# --- mixtures of experts ---
def experts(x, p, w1, b1, w2, b2, w3=None, b3=None, k=1, normalize=False, activation=torch.relu, weights=None):
    shares, chosen = torch.softmax(p, 1).topk(k, 1)
    shares = shares if weights is None else weights.gather(1, chosen)
    shares = shares / shares.sum(1, keepdim=True) if normalize else shares
    rows = []
    for token, row in enumerate(x.reshape(-1, x.shape[-1])):
        parts = []
        for share, e in zip(shares[token], chosen[token], strict=True):
            hidden = row @ w1[e].T + (0 if b1 is None else b1[e])
            other = None if w3 is None else row @ w3[e].T + (0 if b3 is None else b3[e])
            hidden = activation(hidden) if other is None else activation(hidden, other)
            parts.append(share * (hidden @ w2[e].T + (0 if b2 is None else b2[e])))
        rows.append(sum(parts))
    return torch.stack(rows).reshape(x.shape)


def gate(g, u, alpha=1.702, beta=1.0, limit=7.0):
    g, u = torch.clamp(g, max=limit), torch.clamp(u, -limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + beta)


LAYERS = [numbers(4, 6, 8), numbers(4, 6), numbers(4, 8, 6), numbers(4, 8)]
FUSED = [numbers(4, 12, 8), numbers(4, 12), numbers(4, 8, 6), numbers(4, 8)]
TOKENS = [numbers(2, 3, 8), numbers(6, 4)]
clamped = {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 7.0, "terms": 128}
functions = {
    "relu": torch.relu, "gelu": lambda x: functional.gelu(x, approximate="tanh"), "silu": silu, "identity": lambda x: x,
}  # fmt: skip
for name, function in functions.items():
    given = {"k": 2, "activation_type": name, "terms": 128, "form": name}
    add("MoE", [*TOKENS, *LAYERS], lambda *x, f=function: experts(*x, k=2, activation=f), **given)
given = {"k": 3, "normalize_routing_weights": 1, "terms": 128, "form": "rows, normalized"}
add("MoE", [numbers(5, 8), numbers(5, 4), LAYERS[0], None, LAYERS[2]],
    lambda x, p, w, _, v: experts(x, p, w, None, v, None, k=3, normalize=True), **given)  # fmt: skip
add("MoE", [*TOKENS, *FUSED],
    lambda *x: experts(*x, k=2, activation=lambda h: gate(h[0::2], h[1::2])),
    k=2, activation_type="swiglu", swiglu_fusion=1, form="swiglu, interleaved", **clamped)  # fmt: skip


# --- with quantized weights ---
def quantized_experts(bits, block, zeros=False, kind=np.float32, shares=False):
    """A QMoE of gelu's kind with weights of so many bits, with a scale for each row, or for each block."""
    layers, arrays, offsets = [], [], []
    for rows, columns in ((32, 32), (32, 32)):
        whole = RANDOM.integers(0, 2**bits, (4, rows, columns))
        shape = (4, rows, columns // block) if block else (4, rows)
        scales = RANDOM.uniform(0.01, 0.05, shape).astype(kind)
        zero = RANDOM.integers(0, 2**bits, shape) if zeros else np.full(shape, 2 ** (bits - 1))
        layers.append((whole, scales, zero))
        arrays += [packed(whole, bits), scales, numbers(4, rows, kind=kind)]
        offsets.append(packed(zero, bits) if zeros else None)

    def formula(x, p, _, s1, b1, __, s2, b2, *others):
        weights = []
        for (whole, ____, zero), scale in zip(layers, (s1, s2), strict=True):
            q, z, s = torch.tensor(whole).double(), torch.tensor(zero).double(), scale
            z, s = ((each.repeat_interleave(block, 2) if block else each[:, :, None]) for each in (z, s))
            weights.append((q - z) * s)
        given = {"k": 2, "activation": silu, "normalize": True, "weights": others[-1] if shares else None}
        return experts(x, p, weights[0], b1, weights[1], b2, **given)

    given = [numbers(3, 32, kind=kind), numbers(3, 4, kind=kind), *arrays, None, None, None, *offsets]
    given += [None, np.abs(numbers(3, 4, kind=kind))] if shares else []
    attributes = {"k": 2, "activation_type": "silu", "expert_weight_bits": bits, "normalize_routing_weights": 1}
    attributes |= {"block_size": block} if block else {}
    form = f"{bits} bits, blocks of {block}{', zero points' * zeros}{', shares' * shares}, {kind.__name__}"
    wanted = (0, *([14] if shares else [1]), 3, 4, 6, 7)
    add("QMoE", given, formula, form=form, wanted=wanted, terms=512, **attributes)


for bits in (4, 8):
    for block in (0, 16):
        quantized_experts(bits, block)
        quantized_experts(bits, block, zeros=True)
quantized_experts(4, 16, kind=np.float16)
quantized_experts(4, 16, shares=True)
