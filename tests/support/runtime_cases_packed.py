"""Products with weights of a few bits."""

import itertools

import numpy as np
import torch
from language_models import packed
from runtime_cases import RuntimeCase

RANDOM = np.random.default_rng(0)


def product(bits, zeros, kind, indexed=False, depth=40, rows=6, block=16, bias=True, frozen=False):
    """MatMulNBits. zeros: "none", "packed" or "floats"; indexed: whether the block of each column is given.

    frozen: whether scales and zero points have no gradients.
    """
    blocks = -(-depth // block)
    whole = RANDOM.integers(0, 2**bits, (rows, blocks, block))
    scales, offsets = RANDOM.uniform(0.5, 1.5, (rows, blocks)).astype(kind), RANDOM.integers(0, 2**bits, (rows, blocks))
    given = {"none": None, "packed": packed(offsets, bits), "floats": (offsets + 0.25).astype(kind)}[zeros]
    groups = RANDOM.integers(0, blocks, depth).astype(np.int32) if indexed else None
    a, b = RANDOM.normal(size=(2, 3, depth)).astype(kind), RANDOM.normal(size=rows).astype(kind) if bias else None

    def formula(a, _, scales, zero, groups, bias):
        place = torch.arange(depth) // block if groups is None else groups.long()
        offset = {"none": torch.full((rows, blocks), 2 ** (bits - 1)), "packed": torch.tensor(offsets), "floats": zero}
        w = (torch.tensor(whole.reshape(rows, -1)[:, :depth]) - offset[zeros][:, place]) * scales[:, place]
        return a @ w.T if bias is None else a @ w.T + bias

    wanted = (0, *([] if frozen else [2]), *([3] if zeros == "floats" and not frozen else []), *([5] if bias else []))
    attributes = {"K": depth, "N": rows, "bits": bits, "block_size": block}
    arrays = [a, packed(whole, bits), scales, given, groups, b]
    return RuntimeCase("MatMulNBits", arrays, formula, wanted, attributes, terms=64)


CASES = {
    f"MatMulNBits, {bits} bits, zero points: {zeros}, {kind.__name__}": product(bits, zeros, kind)
    for bits, zeros, kind in itertools.product((2, 4, 8), ("none", "packed", "floats"), (np.float32, np.float16))
    if (bits, zeros) != (8, "floats")  # which onnxruntime lacks
}
CASES["MatMulNBits, g_idx"] = product(4, "none", np.float32, indexed=True)
CASES["MatMulNBits, g_idx, zero points: floats"] = product(4, "floats", np.float16, indexed=True, bias=False)
CASES["MatMulNBits, whole blocks"] = product(4, "packed", np.float32, depth=64, block=32, bias=False)
CASES |= {
    f"MatMulNBits, frozen, {bits} bits, zero points: {zeros}": product(bits, zeros, np.float32, frozen=True)
    for bits, zeros in ((2, "packed"), (4, "none"), (4, "floats"), (8, "packed"))
}
CASES["MatMulNBits, frozen, g_idx"] = product(4, "none", np.float16, indexed=True, bias=False, frozen=True)
CASES |= {
    f"MatMulNBits, frozen, {bits} bits, blocks of {block}": product(
        bits, zeros, np.float32, depth=block + 24, block=block, frozen=True
    )
    for bits, zeros in ((2, "none"), (4, "packed"), (8, "none"))
    for block in (16, 64, 128, 256)
}
