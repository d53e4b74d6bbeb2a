"""Attention on the CPU against its reference, and the reference against softmax between two products."""

import numpy as np
import pytest
from accuracy import check_slopes
from attention_cases import check_gradient
from relayouts import reversed_rows, spaced_planes, spaced_rows, unaligned

import opgrad
from opgrad.contract import DTYPES, FLOATS, Spec, reference
from opgrad.contract.signature import prepare
from opgrad.cpu.kernels.attention.forward import KEYS
from opgrad.cpu.kernels.gemm import CHUNK
from opgrad.ops import graph_operators
from opgrad.ops.reference.dropout import keep_mask

INF, NAN = np.inf, np.nan
OPERATORS = graph_operators()


def normal(rng, shape, dtype="float32", scale=1.0):
    return (scale * rng.normal(size=shape)).astype(DTYPES[dtype])


def arrays(rng, sizes, dtype="float32"):
    """q, k, v and dy for sizes as (batch, heads, heads of keys, length, length of keys, size, size of v's heads)."""
    b, h, kv, n, m, d, e = sizes
    shapes = {"q": (b, h, n, d), "k": (b, kv, m, d), "v": (b, kv, m, e), "dy": (b, h, n, e)}
    found = {name: normal(rng, shape, dtype) for name, shape in shapes.items()}
    return found, found.pop("dy")


SIZES = [
    *((1, 1, 1, 5, 7, size, size) for size in (1, 3, 31, 63, 64, 65, 127, 128, 129, 255, 256)),
    (1, 2, 2, 3, 4, 1, 256),
    (1, 2, 1, 3, 4, 256, 1),
    *((1, 1, 1, length, length + 1, 8, 8) for length in (1, 5, 6, 7, CHUNK - 1, CHUNK, CHUNK + 1, 191, 192, 193)),
    *((1, 1, 1, 4, length, 5, 3) for length in (1, 31, 32, 33, 63, 65, KEYS - 1, KEYS, KEYS + 1, 2 * KEYS + 5)),
    (2, 6, 2, 70, 90, 12, 10),
    (3, 5, 1, 100, 33, 16, 16),
    (1, 300, 1, 2, 9, 4, 4),
    (1, 1, 1, 2 * KEYS + 3, KEYS + 9, 6, 6),
]


@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes, causal, rng):
    given, dy = arrays(rng, sizes)
    check_gradient(given | {"causal": causal}, dy)


OPTIONS = {
    "scale": {"scale": -0.4},
    "no scale": {"scale": 0.0},
    "softcap": {"softcap": 1.5, "scale": 1.0},
    "window": {"window": (20, 30)},
    "left window": {"causal": True, "window": (0, None)},
    "window of the end": {"causal": "bottom_right", "window": (50, 5)},
    "lengths": {"key_lengths": np.array([33, 0])},
    "lengths and causality": {"key_lengths": np.array([150, 70], np.int32), "causal": "bottom_right"},
    "dropout": {"dropout": 0.2, "seed": 3},
    "dropout with offset": {"dropout": 0.7, "seed": np.array([2**40 + 1]), "offset": -5, "causal": True},
    "all dropped": {"dropout": 1.0},
    "all of them": {"dropout": 0.1, "seed": 1, "softcap": 3.0, "window": (90, 10), "key_lengths": np.array([140, 101])},
}
MASKS = [None, (2, 4, 130, 150), (1, 1, 130, 150), (4, 1, 1), (2, 1, 1, 150), (2, 4, 130, 1), (150,), ()]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, mask, rng):
    given, dy = arrays(rng, (2, 4, 2, 130, 150, 9, 11))
    given |= options | {"sink": normal(rng, 4)}
    if mask is not None:
        given["mask"] = normal(rng, mask)
    check_gradient(given, dy, normal(rng, dy.shape[:3]))


@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
def test_bool_masks(mask, rng):
    given, dy = arrays(rng, (2, 4, 2, 130, 150, 9, 11))
    check_gradient(given | {"mask": rng.random(mask) > 0.5}, dy)


ALL = OPTIONS["all of them"] | {"key_lengths": np.array([80, 61])}


@pytest.mark.parametrize("options", [{}, ALL, {"causal": True}], ids=["plain", "all", "causal"])
@pytest.mark.parametrize(
    ("dtype", "other"), [*((each, each) for each in FLOATS), ("bfloat16", "float32")], ids=lambda dtype: dtype
)
@pytest.mark.one_in(3)
def test_dtypes(dtype, options, other, rng):
    """Of all arrays, and beside a sink and a mask; those of another dtype have kernels of their own."""
    given, dy = arrays(rng, (2, 4, 2, 70, 90, 40, 72), dtype)
    if dtype == other:
        check_gradient(given | options, dy)
    masked = {"sink": normal(rng, 4, other), "mask": normal(rng, (70, 90), other)}
    check_gradient(given | options | masked, dy)


STARTS = [
    {"cu_seqlens_q": np.array([0, 7, 7, 200, 290])},
    {"cu_seqlens_q": np.array([3, 7, 100, 290], np.int32), "cu_seqlens_k": np.array([0, 90, 90, 333], np.int32)},
    {"cu_seqlens_q": np.arange(0, 291, 5), "cu_seqlens_k": np.arange(0, 291, 5) + 10},
    {"cu_seqlens_q": np.array([0, 290]), "cu_seqlens_k": np.array([0, 400])},
    {"cu_seqlens_q": np.array([5]), "cu_seqlens_k": np.array([7])},
]


@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right", "window": (30, 0)}, {"dropout": 0.3}], ids=str)
@pytest.mark.parametrize("starts", STARTS, ids=lambda starts: str(len(starts["cu_seqlens_q"])))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sequences_behind_each_other(starts, options, dtype, rng):
    keys = 400 if "cu_seqlens_k" in starts else 290
    given, dy = arrays(rng, (1, 4, 2, 290, keys, 9, 11), dtype)
    given = {name: each[0].swapaxes(0, 1).copy() for name, each in given.items()}
    given |= starts | options | {"sink": normal(rng, 4, dtype)}
    check_gradient(given, dy[0].swapaxes(0, 1).copy(), normal(rng, (4, 290)))


def test_layouts_give_the_same_bits(rng):
    given, dy = arrays(rng, (2, 4, 2, 60, 70, 9, 11))
    y, lse = opgrad.attention(**given, causal=True, needs=("y", "lse"))
    expected = opgrad.attention_grad(dy, **given, y=y, lse=lse, causal=True)
    turned = {name: each.swapaxes(1, 2) for name, each in given.items()}
    for arrays_given in (turned, {name: each.copy() for name, each in turned.items()}):
        z, same = opgrad.attention(**arrays_given, causal=True, layout="BLHD", needs=("y", "lse"))
        assert z.tobytes() == y.swapaxes(1, 2).tobytes()
        assert same.tobytes() == lse.tobytes()
        found = opgrad.attention_grad(dy.swapaxes(1, 2), **arrays_given, y=z, lse=lse, causal=True, layout="BLHD")
        for got, wanted in zip(found, expected, strict=True):
            assert got.tobytes() == wanted.swapaxes(1, 2).tobytes()


def test_packed_projections_are_read_and_written_in_place(rng):
    """q, k and v are thirds of one array, and so are their gradients; nothing is copied."""
    packed = normal(rng, (2, 50, 3, 4, 16))
    q, k, v = (packed[:, :, each] for each in range(3))
    op, specs = OPERATORS["attention"], [Spec(each.shape, each.dtype, each.strides) for each in (q, k, v)]
    assert not prepare(op, specs + [None] * (len(op.arrays) - 3), {"layout": "BLHD"}).copies
    y, lse = opgrad.attention(q, k, v, layout="BLHD", needs=("y", "lse"))
    expected = opgrad.attention(*(each.copy() for each in (q, k, v)), layout="BLHD")
    assert y.tobytes() == expected.tobytes()
    gradient, dy = np.full_like(packed, 7), normal(rng, y.shape)
    opgrad.attention_grad(dy, q, k, v, y, lse, layout="BLHD", out=tuple(gradient[:, :, each] for each in range(3)))
    apart = opgrad.attention_grad(dy, *(each.copy() for each in (q, k, v)), y, lse, layout="BLHD")
    for each, wanted in enumerate(apart):
        np.testing.assert_array_equal(gradient[:, :, each], wanted)


@pytest.mark.parametrize("change", [reversed_rows, spaced_rows, spaced_planes, unaligned])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_memory_gives_the_same_bits(change, dtype, rng):
    given, dy = arrays(rng, (2, 4, 2, 60, 70, 9, 11), dtype)
    given["mask"] = normal(rng, (4, 60, 70), dtype)
    y, lse = opgrad.attention(**given, needs=("y", "lse"))
    needs = ("dq", "dk", "dv", "dmask")
    expected = opgrad.attention_grad(dy, **given, y=y, lse=lse, needs=needs)
    moved = {name: change(each) for name, each in given.items()}
    for each in moved.values():
        each.flags.writeable = False
    assert opgrad.attention(**moved, needs=("y", "lse"))[0].tobytes() == y.tobytes()
    found = opgrad.attention_grad(change(dy), **moved, y=change(y), lse=change(lse), needs=needs)
    for got, wanted in zip(found, expected, strict=True):
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("sizes", [(2, 4, 2, 700, 700, 16, 16), (1, 2, 1, 1, 5000, 8, 8), (1, 1, 1, 900, 900, 8, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_number_of_threads_changes_no_bit(sizes, dtype, threads, rng):
    given, dy = arrays(rng, sizes, dtype)
    given |= {"causal": "bottom_right", "dropout": 0.1, "seed": 5, "mask": normal(rng, (sizes[3], 1), dtype)}

    def compute():
        y, lse = opgrad.attention(**given, needs=("y", "lse"))
        return y, lse, *opgrad.attention_grad(dy, **given, y=y, lse=lse, needs=("dq", "dk", "dv", "dmask"))

    threads(compute, (1, 2, 3))


def test_plans(rng):
    given, dy = arrays(rng, (2, 4, 2, 60, 70, 9, 11))
    q, k, v = given.values()
    out = np.empty((2, 4, 60, 11), "f4"), np.empty((2, 4, 60), "f4")
    forward = opgrad.plan(opgrad.attention, q, k, v, dropout=0.25, seed=1, needs=("y", "lse"), out=out)
    gradients = tuple(np.empty_like(each) for each in (q, k, v))
    backward = opgrad.plan(opgrad.attention_grad, dy, q, k, v, *out, dropout=0.25, seed=1, out=gradients)
    for seed in (5, -9):
        forward(q, k, v, np.array(seed), out=out)
        backward(dy, q, k, v, *out, np.array(seed), out=gradients)
        y, lse = opgrad.attention(q, k, v, dropout=0.25, seed=seed, needs=("y", "lse"))
        expected = opgrad.attention_grad(dy, q, k, v, y, lse, dropout=0.25, seed=seed)
        for got, wanted in zip([*out, *gradients], [y, lse, *expected], strict=True):
            assert got.tobytes() == wanted.tobytes()


# --- values at the limits -------------------------------------------------------------------------------------------


def everything(given, dy):
    y, lse = opgrad.attention(**given, needs=("y", "lse"))
    return y, lse, *opgrad.attention_grad(dy, **given, y=y, lse=lse)


@pytest.mark.parametrize(
    "hidden",
    [
        {"mask": np.zeros((60, 70), bool)},
        {"mask": np.full((60, 70), -INF, "f4")},
        {"key_lengths": np.array([0, 0])},
        {"window": (None, 0), "causal": "bottom_right", "key_lengths": np.array([0, 0])},
    ],
    ids=["bool", "-inf", "lengths", "window"],
)
def test_queries_that_see_no_key(hidden, rng):
    given, dy = arrays(rng, (2, 4, 2, 60, 70, 9, 11))
    y, lse, *gradients = everything(given | hidden, dy)
    assert np.isneginf(lse).all()
    assert not any(each.any() for each in (y, *gradients))
    sink = normal(rng, 4)
    y, lse = opgrad.attention(**given, **hidden, sink=sink, needs=("y", "lse"))
    np.testing.assert_allclose(lse, np.broadcast_to(sink[:, None], lse.shape), rtol=1e-6)
    assert not y.any()


def test_some_queries_see_no_key(rng):
    given, dy = arrays(rng, (1, 2, 2, 60, 70, 9, 11))
    mask = normal(rng, (60, 70))
    mask[::3] = -INF
    mask[1::3, :50] = -INF
    check_gradient(given | {"mask": mask}, dy)
    assert not opgrad.attention(**given, mask=mask)[:, :, ::3].any()


def in_float64(q, k, v, mask, dy, sink=None):
    """y, dq, dk, dv, dmask and dsink with whole matrices; scores are rounded as those of the mask's dtype are."""
    wide = [each.astype("f8") for each in (q, k, v, dy)]
    q, k, v, dy = wide
    s = ((q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5).astype(mask.dtype) + mask).astype("f8")
    every = s if sink is None else np.concatenate([s, np.broadcast_to(sink[:, None, None], (*s.shape[:3], 1))], -1)
    e = np.exp(every - every.max(-1, keepdims=True))
    whole = e / e.sum(-1, keepdims=True)
    p = whole[..., : s.shape[-1]]
    y, dp = p @ v, dy @ v.swapaxes(2, 3)
    delta = (dy * y).sum(-1, keepdims=True)
    ds = p * (dp - delta)
    found = [y, ds @ k * q.shape[-1] ** -0.5, ds.swapaxes(2, 3) @ q * q.shape[-1] ** -0.5, p.swapaxes(2, 3) @ dy]
    found.append(ds.sum((0, 1)))
    return found if sink is None else [*found, -(whole[..., -1:] * delta).sum((0, 2, 3))]


@pytest.mark.parametrize("has_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("low", ["-1e9", "-1e30", "-2.5e38", "least"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "sizes", [(1, 2, 2, 5, 7, 8, 8), (2, 4, 2, CHUNK + 3, KEYS + 9, 9, 11), (1, 2, 1, 1, 4 * KEYS, 8, 8)]
)
@pytest.mark.one_in(2)
def test_masks_that_hide_all_keys_alike(sizes, dtype, low, has_sink, rng):
    """The least number of a dtype hides a key beside others; where all are hidden by it, the query sees all."""
    given, dy = arrays(rng, sizes, dtype)
    low = np.finfo(dtype).min if low == "least" else float(low) * (5e269 if dtype == "float64" else 1)
    mask = np.zeros(sizes[3:5], dtype)
    mask[::3], mask[1::3, 3:], mask[:, 1] = low, low, -INF
    sink = np.full(sizes[1], low, dtype) if has_sink else None
    options = {"mask": mask} | ({"sink": sink} if has_sink else {})
    y, lse = opgrad.attention(**given, **options, needs=("y", "lse"))
    needs = ("dq", "dk", "dv", "dmask", *(["dsink"] if has_sink else []))
    found = opgrad.attention_grad(dy, **given, **options, y=y, lse=lse, needs=needs)
    exact = in_float64(*(np.repeat(each, sizes[1] // each.shape[1], 1) for each in given.values()), mask, dy, sink)
    exact[2:4] = (each.reshape(sizes[0], sizes[2], -1, *each.shape[2:]).sum(2) for each in exact[2:4])
    for got, wanted in zip((y, *found), exact, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)
    assert found[2][:, :, 0].all()
    if low > -1e20:  # float64 has digits left for the scores
        return
    reference_y, reference_lse = reference("attention")(**wide_of(given | options), needs=("y", "lse"))
    np.testing.assert_allclose(reference_y, exact[0], rtol=1e-4, atol=2e-5)
    wide = wide_of({"dy": dy, **given, **options, "y": y}) | {"lse": reference_lse, "needs": needs}
    for got, wanted in zip(reference("attention_grad")(**wide), exact[1:], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)


def wide_of(given):
    return {name: value.astype("f8") for name, value in given.items()}


def test_no_keys_no_queries_no_batch(rng):
    for sizes in ((1, 2, 2, 3, 0, 4, 4), (1, 2, 2, 0, 3, 4, 4), (0, 2, 2, 3, 3, 4, 4), (1, 0, 0, 3, 3, 4, 4)):
        given, dy = arrays(rng, sizes)
        given |= {"mask": np.zeros((sizes[3], 1), "f4"), "sink": np.full(sizes[1], -INF, "f4")}
        y, lse = opgrad.attention(**given, needs=("y", "lse"))
        needs = ("dq", "dk", "dv", "dmask", "dsink")
        assert not any(each.any() for each in opgrad.attention_grad(dy, **given, y=y, lse=lse, needs=needs))
        assert not y.any()


@pytest.mark.parametrize("factor", [1e3, 1e10, 1e18])
def test_huge_scores(factor, rng):
    """The largest takes all; none of them is near another."""
    q, k, v = (
        np.ones((1, 1, 3, 1), "f4"),
        np.array([[3.0], [-7.0], [2.0], [5.0]], "f4")[None, None],
        normal(rng, (1, 1, 4, 6)),
    )
    for sign in (1, -1):
        y, lse = opgrad.attention(q, sign * k, v, scale=factor, needs=("y", "lse"))
        best = 3 if sign == 1 else 1
        np.testing.assert_allclose(y, np.broadcast_to(v[:, :, best], y.shape), rtol=3e-7)
        np.testing.assert_allclose(lse, np.full_like(lse, factor * abs(k[0, 0, best, 0])), rtol=1e-6)
        dq, dk, dv = opgrad.attention_grad(
            np.ones_like(y), q, sign * k, v, y, lse, scale=factor, needs=("dq", "dk", "dv")
        )
        assert np.isfinite(dq).all()
        assert np.isfinite(dk).all()
        # An error of lse is a relative error of all probabilities, up to the size from which on it is not used.
        np.testing.assert_allclose(dv[0, 0, best], 3, rtol=2 * np.finfo("f4").eps * min(lse.max(), 1e5))
        assert (dv >= 0).all()
        assert (dv <= 3).all()


def test_scores_that_overflow(rng):
    """A score of inf, like a NaN, makes the query's row NaN and leaves the others alone; one of -inf counts for 0."""
    given, dy = arrays(rng, (1, 1, 1, 9, 500, 4, 4))
    plain = opgrad.attention(**given)
    mask = np.zeros((9, 500), "f4")
    mask[2, 100], mask[4, 499], mask[6, 3:] = INF, NAN, -INF
    y, lse, *gradients = everything(given | {"mask": mask}, dy)
    others = [0, 1, 3, 5, 7, 8]
    np.testing.assert_array_equal(y[:, :, others], plain[:, :, others])
    assert np.isnan(y[:, :, [2, 4]]).all()
    assert np.isnan(lse[:, :, [2, 4]]).all()
    assert np.isfinite(y[:, :, 6]).all()
    assert np.isfinite(gradients[0][:, :, [*others, 6]]).all()


def test_nan_in_queries_keys_and_values(rng):
    given, _ = arrays(rng, (1, 1, 1, 9, 20, 4, 4))
    plain = opgrad.attention(**given)
    q = given["q"].copy()
    q[0, 0, 5, 2] = NAN
    y = opgrad.attention(**given | {"q": q})
    assert np.isnan(y[0, 0, 5]).all()
    np.testing.assert_array_equal(np.delete(y, 5, 2), np.delete(plain, 5, 2))
    k = given["k"].copy()
    k[0, 0, 7, 1] = NAN
    assert np.isnan(opgrad.attention(**given | {"k": k})).all()
    seen = np.arange(20) != 7
    np.testing.assert_array_equal(opgrad.attention(**given | {"k": k}, mask=seen), opgrad.attention(**given, mask=seen))
    v = given["v"].copy()
    v[0, 0, 7, 3] = NAN
    y = opgrad.attention(**given | {"v": v})
    assert np.isnan(y[..., 3]).all()
    np.testing.assert_array_equal(y[..., :3], plain[..., :3])


def test_keys_behind_the_lengths_are_not_read(rng):
    given, dy = arrays(rng, (2, 2, 1, 40, 500, 8, 8))
    lengths = np.array([450, 3])
    expected = everything(given | {"key_lengths": lengths}, dy)
    for name in ("k", "v"):
        for entry, length in enumerate(lengths):
            given[name][entry, :, length:] = NAN
    for got, wanted in zip(everything(given | {"key_lengths": lengths}, dy), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_parts_of_the_keys_are_put_together_by_lse(rng):
    """What those do who split the keys: softmax over the parts' lse weighs the parts' results."""
    given, dy = arrays(rng, (1, 2, 2, 9, 100, 8, 8), "float64")
    parts = [slice(0, 33), slice(33, 100)]
    q, k, v = given.values()
    found = [opgrad.attention(q, k[:, :, part], v[:, :, part], needs=("y", "lse")) for part in parts]
    weights = opgrad.softmax(np.stack([lse for _, lse in found]), 0)
    y, lse = opgrad.attention(**given, needs=("y", "lse"))
    np.testing.assert_allclose(sum(w[..., None] * y for w, (y, _) in zip(weights, found, strict=True)), y, rtol=1e-12)
    expected = opgrad.attention_grad(dy, **given, y=y, lse=lse)
    for place, part in enumerate(parts):
        own, own_lse = found[place]
        w = weights[place][..., None]
        dlse = w[..., 0] * (dy * (own - y)).sum(-1)
        _, dk, dv = opgrad.attention_grad(w * dy, q, k[:, :, part], v[:, :, part], own, own_lse, dlse=dlse)
        np.testing.assert_allclose(dk, expected[1][:, :, part], rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(dv, expected[2][:, :, part], rtol=1e-10, atol=1e-13)


# --- the reference -------------------------------------------------------------------------------------------------


FORWARD, GRADIENT = OPERATORS["attention"].reference, OPERATORS["attention_grad"].reference
NEEDS = ("dq", "dk", "dv", "dmask", "dsink")
B, H, KV, L, S, D, V = 2, 4, 2, 5, 7, 3, 6
LENGTHS = np.array([4, 7])


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_it_is_softmax_between_two_products(rng):
    q, k, v = rng.normal(size=(B, H, L, D)), rng.normal(size=(B, H, S, D)), rng.normal(size=(B, H, S, V))
    s = q @ k.swapaxes(2, 3) / np.sqrt(D)
    y, lse = FORWARD(q, k, v, needs=("y", "lse"))
    np.testing.assert_allclose(y, softmax(s) @ v, rtol=1e-12)
    np.testing.assert_allclose(lse, np.log(np.exp(s).sum(-1)), rtol=1e-12)
    mask = rng.random((B, 1, L, S)) > 0.4
    mask[..., 0] = True
    np.testing.assert_allclose(FORWARD(q, k, v, mask=mask), softmax(np.where(mask, s, -np.inf)) @ v, rtol=1e-12)
    bias = rng.normal(size=(H, 1, S))
    np.testing.assert_allclose(
        FORWARD(q, k, v, mask=bias, softcap=2.0), softmax(2 * np.tanh(s / 2) + bias) @ v, rtol=1e-12
    )
    kept = keep_mask(s.shape, 0.3, 5, 9) / 0.7
    np.testing.assert_allclose(FORWARD(q, k, v, dropout=0.3, seed=5, offset=9), (softmax(s) * kept) @ v, rtol=1e-12)
    with_sink = softmax(
        np.concatenate([s, np.broadcast_to([[[[1.0]], [[2.0]], [[-np.inf]], [[0.0]]]], (B, H, L, 1))], 3)
    )
    np.testing.assert_allclose(
        FORWARD(q, k, v, sink=np.array([1.0, 2.0, -np.inf, 0.0])), with_sink[..., :-1] @ v, rtol=1e-12
    )


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"causal": True}, [[1, 0, 0, 0], [1, 1, 0, 0]]),
        ({"causal": "bottom_right"}, [[1, 1, 1, 0], [1, 1, 1, 1]]),
        ({"causal": "bottom_right", "window": (1, 0)}, [[0, 1, 1, 0], [0, 0, 1, 1]]),
        ({"window": (0, 1)}, [[1, 1, 0, 0], [0, 1, 1, 0]]),
        ({"window": (None, 1)}, [[1, 1, 0, 0], [1, 1, 1, 0]]),
        ({"window": (0, -1)}, [[1, 1, 1, 1], [0, 1, 1, 1]]),
        ({"key_lengths": np.array([3])}, [[1, 1, 1, 0], [1, 1, 1, 0]]),
        ({"key_lengths": np.array([3]), "causal": "bottom_right"}, [[1, 1, 0, 0], [1, 1, 1, 0]]),
        ({"key_lengths": np.array([1]), "causal": "bottom_right"}, [[0, 0, 0, 0], [1, 0, 0, 0]]),
    ],
)
def test_which_keys_a_query_sees(options, seen):
    """Of equal keys each that is seen has the same share, which the unit vectors as values show."""
    zeros, seen = np.zeros((1, 1, 4, 1)), np.array(seen, float)
    y = FORWARD(zeros[:, :, :2], zeros, np.eye(4)[None, None], **options)
    np.testing.assert_allclose(y[0, 0], seen / np.maximum(seen.sum(1, keepdims=True), 1))


def test_layouts_and_packed_sequences(rng):
    q, k, v = (rng.normal(size=(1, heads, 9, D)) for heads in (H, KV, KV))
    y, lse = FORWARD(q, k, v, causal=True, needs=("y", "lse"))
    turned = FORWARD(*(each.swapaxes(1, 2) for each in (q, k, v)), causal=True, layout="BLHD")
    np.testing.assert_array_equal(turned, y.swapaxes(1, 2))
    packed = [each[0].swapaxes(0, 1) for each in (q, k, v)]
    starts = np.array([0, 4, 4, 8])
    z, packed_lse = FORWARD(*packed, causal=True, cu_seqlens_q=starts, needs=("y", "lse"))
    np.testing.assert_allclose(z[:4], turned[0, :4], rtol=1e-12)
    np.testing.assert_allclose(packed_lse[:, :4], lse[0, :, :4], rtol=1e-12)
    own = FORWARD(*(each[:, :, 4:8] for each in (q, k, v)), causal=True)
    np.testing.assert_allclose(z[4:8], own[0].swapaxes(0, 1), rtol=1e-12)
    assert not z[8].any()
    assert np.isneginf(packed_lse[:, 8]).all()


def packed(**more):
    return {"cu_seqlens_q": np.array([0, 2, 2, 5]), "cu_seqlens_k": np.array([1, 4, 5, 7])} | more


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "scale": 0.7},
        {"causal": "bottom_right", "key_lengths": LENGTHS},
        {"window": (1, 2), "softcap": 1.5},
        {"layout": "BLHD", "dropout": 0.3, "seed": 4, "offset": 2},
        packed(),
        packed(causal="bottom_right", dropout=0.4, seed=3),
    ],
)
@pytest.mark.parametrize("mask", [None, (B, H, L, S), (1, 1, S), (B, 1, L, 1), ()])
def test_the_gradient_is_the_derivative(options, mask, rng):
    is_packed, turned = "cu_seqlens_q" in options, options.get("layout") == "BLHD"
    if is_packed and mask is not None:
        return
    shapes = {"q": (B, H, L, D), "k": (B, KV, S, D), "v": (B, KV, S, V)}
    if is_packed or turned:
        shapes = {name: (b, n, h, d)[is_packed:] for name, (b, h, n, d) in shapes.items()}
    shapes |= {"sink": (H,)} | ({} if mask is None else {"mask": mask})
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    y, lse = FORWARD(**arrays, **options, needs=("y", "lse"))
    dy, dlse = rng.normal(size=y.shape), rng.normal(size=lse.shape)
    needs = [each for each in NEEDS if each[1:] in shapes]
    found = GRADIENT(dy=dy, y=y, lse=lse, dlse=dlse, **arrays, **options, needs=needs)

    def total(**arrays):
        y, lse = FORWARD(**arrays, **options, needs=("y", "lse"))
        return (y * dy).sum() + (lse * dlse).sum()

    check_slopes(total, arrays, {each[1:]: gradient for each, gradient in zip(needs, found, strict=True)}, rng)
