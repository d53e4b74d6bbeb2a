"""Attention beside its reference: how far each result may be off, from the sizes of what it sums up.

A score is a sum over the numbers of a head; its error is relative to the sum of the terms' magnitudes, and an error of
a score is a relative error of its probability. Results are sums of probabilities, or of their gradients, times numbers:
they may be off by the relative errors of all factors, times the sum of the terms' magnitudes.
"""

import numpy as np

import opgrad
from opgrad.cli.examples.arguments import finfo, roundings, widened
from opgrad.contract import reference
from opgrad.contract.arrangement import sum_to
from opgrad.ops.reference import attending as whole

OPTIONS = {
    "mask": None, "sink": None, "key_lengths": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "seed": None,
    "offset": None, "scale": None, "causal": False, "window": None, "softcap": 0.0, "dropout": 0.0, "layout": "BHLD",
}  # fmt: skip
RESULTS = ("dq", "dk", "dv", "dmask", "dsink")


class Magnitudes:
    """The reference's arrays by heads, and the relative error that scores give probabilities."""

    def __init__(self, given):
        self.options = options = whole.AttentionOptions(
            **OPTIONS | {name: given[name] for name in OPTIONS if name in given}
        )
        self.q, self.k, self.v = (whole.by_heads(given[name], options) for name in "qkv")
        heads = self.q.shape[1]
        self.every_k, self.every_v = (whole._repeated(each, heads) for each in (self.k, self.v))
        self.s, self.slope = whole._scores(self.q, self.every_k, options)
        self.scale = abs(self.q.shape[-1] ** -0.5 if options.scale is None else options.scale)
        size = self.scale * (abs(self.q) @ abs(self.every_k).swapaxes(2, 3))
        if options.mask is not None and options.mask.dtype != bool:
            size = size + np.where(np.isfinite(options.mask), abs(options.mask), 0.0)
        largest = np.where(np.isfinite(self.s), size, 0.0).max(-1, initial=0.0, keepdims=True)
        self.of_scores = roundings(self.q.shape[-1]) * (largest + 1)
        self.kept = whole._kept(self.s.shape, options)


def unit(dtype):
    """The distance of 1 and the next number, in the precision of the computation."""
    return float(np.finfo("float64" if dtype == "float64" else "float32").eps)


def assert_within(got, exact, error, name):
    """Besides the error, a result may be off by its rounding."""
    assert got.shape == exact.shape, name
    info = finfo(got.dtype)
    rounded = float(info.eps) * abs(exact) + float(info.smallest_subnormal)
    wrong = ~(abs(got.astype("f8") - exact) <= error + rounded)
    assert not wrong.any(), f"{name}: {wrong.sum()} wrong, at {np.argwhere(wrong)[0]}"


def check_forward(given):
    """(y, lse), held against the reference."""
    wide = {name: widened(value) for name, value in given.items()}
    got = opgrad.attention(**given, needs=("y", "lse"))
    with np.errstate(all="ignore"):
        y, lse = reference("attention")(**wide, needs=("y", "lse"))
        m = Magnitudes(wide)
        p = whole._probabilities(m.s, np.reshape(lse, m.q.shape[:3])) * m.kept
        error = unit(given["q"].dtype.name) * (m.of_scores + roundings(m.k.shape[2]))
        of_y = whole.in_layout(error * (p @ abs(m.every_v)), m.options)
        finite = np.where(np.isfinite(lse), abs(lse), 0.0)
        of_lse = error.reshape(lse.shape) + unit(given["q"].dtype.name) * 4 * finite
    assert_within(got[0], y, of_y, "y")
    same = ~np.isfinite(lse)
    np.testing.assert_array_equal(got[1][same], lse[same])
    assert_within(np.where(same, 0, got[1]), np.where(same, 0.0, lse), of_lse, "lse")
    return got


def check_gradient(given, dy, dlse=None):
    """The gradients of what `check_forward` found, held against the reference; all that there can be."""
    y, lse = check_forward(given)
    mask = given.get("mask")
    needs = ["dq", "dk", "dv"] + ["dmask"] * (mask is not None and mask.dtype != bool)
    needs += ["dsink"] * ("sink" in given)
    given = {"dy": dy, **given, "y": y, "lse": lse, "dlse": dlse, "needs": tuple(needs)}
    got = opgrad.attention_grad(**given)
    wide = {name: widened(value) for name, value in given.items()}
    exact = reference("attention_grad")(**wide)
    for name, found, wanted in zip(needs, got, exact, strict=True):
        assert_within(found, wanted, unit(dy.dtype.name) * _errors(wide)[name], name)
    return got


def _errors(wide):
    """For each gradient, how many units of the computation's precision it may be off."""
    m = Magnitudes(wide)
    dy, y = (abs(whole.by_heads(wide[name], m.options)) for name in ("dy", "y"))
    lse = wide["lse"].reshape(m.q.shape[:3])
    p = whole._probabilities(m.s, lse)
    delta = (dy * y).sum(-1) + (0.0 if wide["dlse"] is None else abs(wide["dlse"]).reshape(lse.shape))
    ds = p * ((dy @ abs(m.every_v).swapaxes(2, 3)) * m.kept + delta[..., None])
    longest = max(m.k.shape[2], m.q.shape[2] * m.q.shape[1] // max(m.k.shape[1], 1)) * m.q.shape[0]
    relative = (m.of_scores + abs(np.where(np.isfinite(lse), lse, 0.0))[..., None] + roundings(longest)).max(
        initial=0.0
    )
    terms = relative + roundings(m.v.shape[-1])
    found = {
        "dq": whole.in_layout(m.scale * (ds @ abs(m.every_k)), m.options),
        "dk": m.scale * (ds.swapaxes(2, 3) @ abs(m.q)),
        "dv": (p * m.kept).swapaxes(2, 3) @ dy,
    }
    for name in ("dk", "dv"):
        found[name] = whole.in_layout(whole._summed(found[name], m.k.shape[1]), m.options)
    if m.options.mask is not None:
        found["dmask"] = sum_to(ds, m.options.mask.shape)
    if m.options.sink is not None:
        found["dsink"] = (np.exp(m.options.sink[:, None] - np.where(lse == -np.inf, 0.0, lse)) * delta).sum((0, 2))
    return {name: terms * each for name, each in found.items()}
