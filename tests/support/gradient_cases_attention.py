"""Cases of attention, and of operators of com.microsoft."""

import numpy as np
from gradient_case import MICROSOFT, add, ints, numbers

SMALL, SCALE, BIAS = numbers(2, 3), numbers(4, low=0.5), numbers(4, seed=1)

# --- attention ---
HEADS = [numbers(1, 2, 3, 4, seed=seed) for seed in range(3)]
add("Attention", (23, 24), *HEADS, wanted=(0, 1, 2))
add("Attention", 23, *HEADS, is_causal=1, scale=0.4, wanted=(0, 1, 2), form="causal")
add("Attention", 23, *HEADS, np.array([[0, -np.inf, 0], [0, 0, -np.inf], [0, 0, 0]]), wanted=(0, 1, 2), form="mask")
add(
    "Attention",
    23,
    *(numbers(2, 3, 4, seed=seed) for seed in range(3)),
    q_num_heads=2,
    kv_num_heads=2,
    wanted=(0, 1, 2),
    form="three axes",
)
add(
    "Attention",
    23,
    numbers(1, 4, 3, 2),
    numbers(1, 2, 3, 2, seed=1),
    numbers(1, 2, 3, 2, seed=2),
    softcap=2.0,
    wanted=(0, 1, 2),
    form="grouped heads, softcap",
)
ANGLES = [np.cos(numbers(3, 2)), np.sin(numbers(3, 2))]
add("RotaryEmbedding", 23, numbers(1, 2, 3, 4), *ANGLES, ints(0, 1, 2).reshape(1, 3), wanted=(0,))
PART = [each[:, :1] for each in ANGLES]
rotary = {"interleaved": 1, "rotary_embedding_dim": 2, "wanted": (0,)}
add(
    "RotaryEmbedding",
    23,
    numbers(2, 2, 3, 4),
    *(np.stack([each] * 2) for each in PART),
    form="part of a head",
    **rotary,
)
add("RotaryEmbedding", 23, numbers(1, 3, 8), *ANGLES, ints(2, 1, 1).reshape(1, 3), num_heads=2, form="three axes")
TURNED = numbers(2, 2, 2, 4)
for form, positions in {"positions": ints(0, 1, 2, 1).reshape(2, 2), "first position": ints(1)}.items():
    add("RotaryEmbedding", 17, TURNED, positions, *ANGLES, domain=MICROSOFT, form=form)
add("RotaryEmbeddingTraining", 17, TURNED, *ANGLES, domain=MICROSOFT)

# --- com.microsoft ---
TOKENS, WIDE = numbers(2, 3, 4), numbers(2, 3, 8)
for op in ("Gelu", "QuickGelu", "FastGelu"):
    add(op, 17, TOKENS, domain=MICROSOFT)
add("QuickGelu", 17, TOKENS, alpha=1.2, domain=MICROSOFT, form="alpha")
for op in ("BiasGelu", "FastGelu"):
    add(op, 17, TOKENS, numbers(4), wanted=(0, 1), domain=MICROSOFT, form="bias")
add(
    "FusedMatMul",
    17,
    numbers(2, 4, 3),
    numbers(2, 5, 4),
    transA=1,
    transB=1,
    alpha=0.5,
    wanted=(0, 1),
    domain=MICROSOFT,
)
add("BiasSoftmax", 17, TOKENS, numbers(1, 3, 4), axis=2, is_inner_broadcast=0, wanted=(0, 1), domain=MICROSOFT)
SKIPPED = TOKENS, numbers(2, 3, 4, seed=1), numbers(4, low=0.5)
everything = (0, 1, 2, 3, 4)
add(
    "FusedMatMul",
    17,
    numbers(3, 2, 4),
    numbers(2, 4, 5),
    transBatchA=1,
    wanted=(0, 1),
    domain=MICROSOFT,
    form="transBatchA",
)
add(
    "FusedGemm",
    17,
    numbers(3, 4),
    numbers(2, 4),
    numbers(2),
    transB=1,
    activation="LeakyRelu",
    activation_alpha=0.2,
    wanted=(0, 1, 2),
    domain=MICROSOFT,
)
FILTER = numbers(1, 2, 5, 4), numbers(3, 2, 3, 3, seed=1), BIAS[:3]
add(
    "FusedConv", 17, *FILTER, activation="HardSigmoid", activation_params=[0.1, 0.5], wanted=(0, 1, 2), domain=MICROSOFT
)
WORDS = ints(0, 2, 2, 1, 1, 0).reshape(2, 3).astype(np.int32)
TABLES = [numbers(3, 4, seed=seed) for seed in range(3)]
add(
    "EmbedLayerNormalization",
    17,
    WORDS,
    2 - WORDS,
    *TABLES,
    SCALE,
    BIAS,
    wanted=(2, 3, 4, 5, 6),
    outputs=2,
    epsilon=1e-5,
    domain=MICROSOFT,
)
add("SkipLayerNormalization", 17, *SKIPPED, BIAS, SCALE, epsilon=1e-5, wanted=everything, domain=MICROSOFT)
add("SkipSimplifiedLayerNormalization", 17, *SKIPPED, BIAS, epsilon=1e-5, wanted=(0, 1, 2, 3), domain=MICROSOFT)
QUERIES = [numbers(2, 3, 8, seed=seed) for seed in range(3)]
add("MultiHeadAttention", 17, *QUERIES, numbers(24), num_heads=2, wanted=(0, 1, 2, 3), domain=MICROSOFT)
add("MultiHeadAttention", 17, *QUERIES, num_heads=2, scale=0.3, wanted=(0, 1, 2), domain=MICROSOFT, form="scale")
packed = {"num_heads": 2, "domain": MICROSOFT}
LENGTHS, KEYS = np.array([2, 3], np.int32), np.array([[1, 1, 0], [1, 0, 1]], np.int32)
MASKS = {"lengths": LENGTHS, "mask of keys": KEYS, "mask of each query": np.stack([KEYS, 1 - KEYS, KEYS * 0 + 1], 1)}
for form, mask in MASKS.items():
    add("MultiHeadAttention", 17, *QUERIES, None, mask, wanted=(0, 1, 2), form=form, **packed)
PAST = numbers(2, 2, 2, 4, seed=3), numbers(2, 2, 2, 4, seed=4)
SCORES = numbers(2, 2, 3, 5, seed=5)
given = {"unidirectional": 1, "outputs": 3, **packed}
add(
    "MultiHeadAttention",
    17,
    *QUERIES,
    None,
    None,
    SCORES,
    *PAST,
    wanted=(0, 1, 2, 5, 6, 7),
    form="past, bias, unidirectional",
    **given,
)
PACKED = WIDE, numbers(8, 24, low=-0.5, high=0.5), numbers(24)
add("Attention", 17, *PACKED, wanted=(0, 1, 2), **packed)
for form, mask in MASKS.items():
    add("Attention", 17, *PACKED, mask, wanted=(0, 1, 2), form=form, **packed)
past = numbers(2, 2, 2, 2, 4, seed=6)
add(
    "Attention",
    17,
    *PACKED,
    None,
    past,
    unidirectional=1,
    outputs=2,
    wanted=(0, 1, 4),
    form="past, unidirectional",
    **packed,
)
OWN = WIDE, numbers(8, 20, low=-0.5, high=0.5), numbers(20)
add("Attention", 17, *OWN, qkv_hidden_sizes=[8, 8, 4], wanted=(0, 1, 2), form="qkv_hidden_sizes", **packed)
add("ConcatTraining", 17, SMALL, numbers(2, 2), axis=1, wanted=(0, 1), domain=MICROSOFT)
shares = np.abs(numbers(3, 4)) / np.abs(numbers(3, 4)).sum(1, keepdims=True)
for reduction in ("mean", "sum"):
    add("SoftmaxCrossEntropy", 17, numbers(3, 4), shares, reduction=reduction, form=reduction, domain=MICROSOFT)
