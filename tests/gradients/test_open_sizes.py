"""Pictures of any height and width, and values of any rank: gradients have the shape of x when the graph runs."""

import numpy as np
import onnxruntime
import pytest
from differences import build, computed
from gradient_cases import numbers

from opgrad.gradients import gradients
from opgrad.onnx.graph.messages import copied
from opgrad.onnxruntime import InferenceSession, lower
from opgrad.training import ArtifactSet, Trainer
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

POOLS = {
    "MaxPool": "kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]",
    "MaxPool, one row": "kernel_shape = [5, 5], strides = [1, 1], pads = [2, 2, 2, 2]",
    "MaxPool, SAME": 'kernel_shape = [2, 3], strides = [2, 2], auto_pad = "SAME_UPPER"',
    "MaxPool, ceil": "kernel_shape = [3, 2], strides = [2, 3], ceil_mode = 1",
    "MaxPool, columns": "kernel_shape = [3, 3], strides = [2, 2], storage_order = 1",
    "AveragePool": "kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]",
    "AveragePool, pads that count":
        "kernel_shape = [3, 3], strides = [2, 1], pads = [1, 0, 2, 1], count_include_pad = 1",
    "AveragePool, ceil": "kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1",
    "AveragePool, ceil, pads that count":
        "kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1], ceil_mode = 1, count_include_pad = 1",
    "AveragePool, SAME": 'kernel_shape = [2, 3], strides = [2, 2], auto_pad = "SAME_LOWER"',
    "AveragePool, SAME, pads that count":
        'kernel_shape = [4, 3], strides = [2, 2], auto_pad = "SAME_UPPER", count_include_pad = 1',
    "AveragePool, dilations": "kernel_shape = [2, 2], strides = [1, 2], dilations = [2, 1]",
}  # fmt: skip
HEIGHTS = (8, 8), (8, 11), (8, 5)


def floats(*shape, seed=0):
    return numbers(*shape, seed=seed).astype(np.float32)


def model_of(name, sizes):
    op = name.partition(",")[0]
    return build(f"g (float[{sizes}] x) => (float[] y) {{ p = {op} <{POOLS[name]}> (x)\n y = Mul(p, p) }}", 19)


@pytest.mark.parametrize("form", ["session", "plain", "lowered"])
@pytest.mark.parametrize("name", POOLS)
def test_the_gradient_has_the_shape_of_x(name, form):
    found = gradients(model_of(name, "N, 2, H, W"), "y", "x", plain=form == "plain")
    found = lower(found) if form == "lowered" else found
    session = (InferenceSession if form == "session" else onnxruntime.InferenceSession)(found.SerializeToString())
    for sizes in HEIGHTS:
        x = floats(3, 2, *sizes)
        expected = computed(gradients(model_of(name, ", ".join(map(str, x.shape))), "y", "x"), {"x": x}, plain=False)
        for mine, theirs in zip(session.run(None, {"x": x}), expected, strict=True):
            assert mine.shape == theirs.shape
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_pictures_of_any_size_are_trained(tmp_path):
    """Two steps on pictures of two sizes are those of artifacts in which the sizes are numbers."""
    losses = {}
    for sizes in ("H, W", "8, 12"):
        text = f"""g (float[N, 2, {sizes}] x) => (float[N, 3] y) {{
            c = Conv <pads = [1, 1, 1, 1]> (x, filters)\n m = MaxPool <kernel_shape = [3, 3], strides = [2, 2]> (c)
            a = AveragePool <kernel_shape = [2, 2], ceil_mode = 1, strides = [2, 2]> (m)
            p = GlobalAveragePool(a)\n y = Flatten(p) }}"""
        model = build(text, constants={"filters": floats(3, 2, 3, 3)})
        folder = tmp_path / sizes[0]
        folder.mkdir()
        generate_artifacts(model, ["filters"], None, LossType.MSELoss, OptimType.SGD, folder)
        trainer, heights = Trainer(ArtifactSet.load(folder), 1e-1), HEIGHTS if sizes == "H, W" else ()
        batches = [{"x": floats(3, 2, *each), "target": floats(3, 3, seed=1)} for each in ((8, 12), (8, 12), *heights)]
        losses[sizes] = [trainer.step(batch) for batch in batches]
    free, fixed = losses.values()
    np.testing.assert_allclose(free[:2], fixed, rtol=1e-5)
    assert free[1] < free[0]
    assert np.isfinite(free).all()


UNKNOWN_RANK = {
    "Conv": ("y = Conv <pads = [1, 1]> (s, w)", ["x", "w"]),
    "ReduceMean": ("y = ReduceMean <axes = [1], keepdims = 0> (s)", ["x"]),
    "ReduceMean, all": ("y = ReduceMean <keepdims = 0> (s)", ["x"]),
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", UNKNOWN_RANK)
def test_ranks_that_the_graph_does_not_tell(name, plain):
    """Squeeze without axes, which exporters write for squeezing if a size is 1."""
    body, wanted = UNKNOWN_RANK[name]
    found = []
    for squeezed in ("Squeeze(x)", "Squeeze <axes = [1]> (x)"):
        weights = {"w": floats(4, 2, 3)} if "w" in wanted else {}
        model = build(f"g (float[N, A, 2, L] x) => (float[] y) {{ s = {squeezed}\n {body} }}", 11, weights)
        found.append(computed(gradients(model, "y", wanted, plain=plain), {"x": floats(3, 1, 2, 5)}, plain))
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


PRODUCTS = {
    "one": "y = MatMul(s, w)",
    "with a bias": "m = MatMul(s, w)\n y = Add(m, b)",
    "two": "m = MatMul(s, w)\n a = Relu(m)\n k = MatMul(a, v)\n y = Add(k, b)",
    "of open sizes": "c = Concat <axis = 1> (w, more)\n y = MatMul(s, c)",
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_matrix_behind_values_of_any_rank(name, declared, count, plain):
    """Behind an If on a size, as squeezing is exported, whose branches differ in rank."""
    text = f"""g (float[K, 5, 4] x, float[4, M] more) => (float[] y) {{
        zero = Constant <value = int64[1] {{0}}> ()  one = Constant <value = int64[1] {{1}}> ()
        sizes = Shape <start = 0, end = 1> (x)  same = Equal(sizes, one)  flag = Squeeze(same)
        s = If (flag) <then_branch = p () => (t) {{ t = Squeeze(x, zero) }},
                       else_branch = q () => (u) {{ u = Identity(x) }}>
        {PRODUCTS[name]}
    }}"""
    arrays = {"w": floats(4, 3), "v": floats(3, 3, seed=1), "b": floats(3, seed=2)}
    model = build(text, constants=arrays)
    wanted = ["x", "w", *(each for each in "vb" if f" {each})" in PRODUCTS[name])]
    for size in range((3 if count == 2 else 2) * declared):
        model.graph.output[0].type.tensor_type.shape.dim.add().dim_param = f"d{size}"
    x, more = floats(count, 5, 4, seed=3), floats(4, 2, seed=4)
    found = computed(gradients(model, "y", wanted, plain=plain), {"x": x, "more": more}, plain)[1:]
    for key, gradient in zip(wanted, found, strict=True):
        given = {"x": x, **arrays}
        direction, step = np.random.default_rng(0).standard_normal(given[key].shape), 1e-6
        ends = [product(name, {**given, key: given[key] + sign * step * direction}, more) for sign in (1, -1)]
        np.testing.assert_allclose((gradient * direction).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-4)


def product(name, given, more):
    """The sum of the results in float64."""
    x, w, v, b = (np.asarray(given[key], np.float64) for key in "xwvb")
    if name == "of open sizes":
        return (x @ np.concatenate([w, more], 1)).sum()
    y = x @ w + (b if name == "with a bias" else 0)
    return (np.maximum(y, 0) @ v + b).sum() if name == "two" else y.sum()


BEHIND = {
    "normalized": "q = LayerNormalization(r, w)  y = MatMul(q, m)",
    "turned": "t = Transpose <perm = [1, 0]> (r)  h = MatMul(m, t)  y = Tanh(h)",
    "added": "q = LayerNormalization(r, w)  p = Mul(q, w)  y = MatMul(p, m)",
    "joined": "q = LayerNormalization(r, w)  c = Concat <axis = 1> (q, q)  h = MatMul(c, v)  y = Softmax(h)",
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", BEHIND)
def test_ranks_follow_from_declared_outputs(name, plain):
    arrays = {"w": floats(4), "m": floats(4, 4, seed=1), "v": floats(8, 4, seed=2), "four": np.array([-1, 4])}
    found, feeds = [], {"x": floats(4, 1, 4, seed=3), "k": np.array([4, 4])}
    wanted = ["x", "w" if "w)" in BEHIND[name] else "m"]
    for shape in ("k", "four"):
        text = f"g (float[n, 1, 4] x, int64[o] k) => (float[a, b] y) {{ r = Reshape(x, {shape})  {BEHIND[name]} }}"
        model = build(text, constants=arrays)
        found.append(computed(gradients(model, "y", wanted, plain=plain), feeds, plain))
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    unknown = copied(model)
    unknown.graph.node[0].input[1] = "k"
    unknown.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(NotImplementedError, match=r"the rank of '.*' is not known"):
        gradients(unknown, "y", wanted, plain=plain)
