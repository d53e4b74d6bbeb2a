"""Cases of attention, and of operators of com.microsoft."""

import numpy as np
from gradient_case import add, contrib, ints, numbers

SMALL, SCALE, BIAS = numbers(2, 3), numbers(4, low=0.5), numbers(4, seed=1)

# --- attention ---
HEADS = [numbers(1, 2, 3, 4, seed=seed) for seed in range(3)]
add("Attention", (23, 24), *HEADS)
add("Attention", 23, *HEADS, is_causal=1, scale=0.4, form="causal")
add("Attention", 23, *HEADS, np.array([[0, -np.inf, 0], [0, 0, -np.inf], [0, 0, 0]]), wanted=(0, 1, 2), form="mask")
FLAT = [numbers(2, 3, 4, seed=seed) for seed in range(3)]
add("Attention", 23, *FLAT, q_num_heads=2, kv_num_heads=2, form="three axes")
GROUPED = numbers(1, 4, 3, 2), numbers(1, 2, 3, 2, seed=1), numbers(1, 2, 3, 2, seed=2)
add("Attention", 23, *GROUPED, softcap=2.0, form="grouped heads, softcap")
ANGLES = [np.cos(numbers(3, 2)), np.sin(numbers(3, 2))]
add("RotaryEmbedding", 23, numbers(1, 2, 3, 4), *ANGLES, ints(0, 1, 2).reshape(1, 3), wanted=(0,))
PART = [np.stack([each[:, :1]] * 2) for each in ANGLES]
rotary = {"interleaved": 1, "rotary_embedding_dim": 2, "wanted": (0,)}
add("RotaryEmbedding", 23, numbers(2, 2, 3, 4), *PART, form="part of a head", **rotary)
rotary = {"num_heads": 2, "wanted": (0,)}
add("RotaryEmbedding", 23, numbers(1, 3, 8), *ANGLES, ints(2, 1, 1).reshape(1, 3), form="three axes", **rotary)
TURNED = numbers(2, 2, 2, 4)
for form, positions in {"positions": ints(0, 1, 2, 1).reshape(2, 2), "first position": ints(1)}.items():
    contrib("RotaryEmbedding", TURNED, positions, *ANGLES, form=form, wanted=(0,))
contrib("RotaryEmbeddingTraining", TURNED, *ANGLES, wanted=(0,))

# --- com.microsoft ---
TOKENS, WIDE = numbers(2, 3, 4), numbers(2, 3, 8)
for op in ("Gelu", "QuickGelu", "FastGelu"):
    contrib(op, TOKENS)
contrib("QuickGelu", TOKENS, alpha=1.2, form="alpha")
for op in ("BiasGelu", "FastGelu"):
    contrib(op, TOKENS, numbers(4), form="bias")
contrib("FusedMatMul", numbers(2, 4, 3), numbers(2, 5, 4), transA=1, transB=1, alpha=0.5)
contrib("BiasSoftmax", TOKENS, numbers(1, 3, 4), axis=2, is_inner_broadcast=0)
contrib("BiasSoftmax", numbers(6, 4), numbers(2, 4), axis=1, is_inner_broadcast=1, form="rows")
SKIPPED = TOKENS, numbers(2, 3, 4, seed=1), numbers(4, low=0.5)
contrib("FusedMatMul", numbers(3, 2, 4), numbers(2, 4, 5), transBatchA=1, form="transBatchA")
contrib("FusedGemm", numbers(3, 4), numbers(2, 4), numbers(2), transB=1, activation="LeakyRelu", activation_alpha=0.2)
FILTER = numbers(1, 2, 5, 4), numbers(3, 2, 3, 3, seed=1), BIAS[:3]
contrib("FusedConv", *FILTER, activation="HardSigmoid", activation_params=[0.1, 0.5])
WORDS = ints(0, 2, 2, 1, 1, 0).reshape(2, 3).astype(np.int32)
TABLES = [numbers(3, 4, seed=seed) for seed in range(3)]
contrib("EmbedLayerNormalization", WORDS, 2 - WORDS, *TABLES, SCALE, BIAS, outputs=2, epsilon=1e-5)
contrib("SkipLayerNormalization", *SKIPPED, BIAS, SCALE, epsilon=1e-5)
contrib("SkipSimplifiedLayerNormalization", *SKIPPED, BIAS, epsilon=1e-5)
QUERIES = [numbers(2, 3, 8, seed=seed) for seed in range(3)]
contrib("MultiHeadAttention", *QUERIES, numbers(24), num_heads=2)
contrib("MultiHeadAttention", *QUERIES, num_heads=2, scale=0.3, form="scale")
packed = {"num_heads": 2}
LENGTHS, KEYS = np.array([2, 3], np.int32), np.array([[1, 1, 0], [1, 0, 1]], np.int32)
MASKS = {"lengths": LENGTHS, "mask of keys": KEYS, "mask of each query": np.stack([KEYS, 1 - KEYS, KEYS * 0 + 1], 1)}
for form, mask in MASKS.items():
    contrib("MultiHeadAttention", *QUERIES, None, mask, form=form, **packed)
PAST = numbers(2, 2, 2, 4, seed=3), numbers(2, 2, 2, 4, seed=4)
SCORES = numbers(2, 2, 3, 5, seed=5)
given = {"unidirectional": 1, "outputs": 3, **packed}
contrib("MultiHeadAttention", *QUERIES, None, None, SCORES, *PAST, form="past, bias, unidirectional", **given)
PACKED = WIDE, numbers(8, 24, low=-0.5, high=0.5), numbers(24)
contrib("Attention", *PACKED, **packed)
for form, mask in MASKS.items():
    contrib("Attention", *PACKED, mask, form=form, **packed)
past = numbers(2, 2, 2, 2, 4, seed=6)
given = {"unidirectional": 1, "outputs": 2, "form": "past, unidirectional", **packed}
contrib("Attention", *PACKED, None, past, wanted=(0, 1, 4), **given)
OWN = WIDE, numbers(8, 20, low=-0.5, high=0.5), numbers(20)
contrib("Attention", *OWN, qkv_hidden_sizes=[8, 8, 4], form="qkv_hidden_sizes", **packed)
contrib("ConcatTraining", SMALL, numbers(2, 2), axis=1)
shares = np.abs(numbers(3, 4)) / np.abs(numbers(3, 4)).sum(1, keepdims=True)
for reduction in ("mean", "sum"):
    contrib("SoftmaxCrossEntropy", numbers(3, 4), shares, reduction=reduction, form=reduction, wanted=(0,))
