"""Models with branches and loops, from artifacts to the exported model, against PyTorch."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from small_models import build, normal, set_of

from opgrad.cli.inspection import inspect
from opgrad.training import Trainer
from opgrad.training.artifacts import LossType, generate_artifacts

STEPS, ROWS, WORDS, RATE = 20, 8, 5, 0.2
WEIGHTS = normal(w=(4, 6), r=(6, 6), gate=(6,), o=(6, 3), bias=(3,))
RTOL = 1e-4  # of losses in float32 whose sums are formed in another order, after some steps
# A recurrent layer over a batch of any size. If the states of all rows are positive on average, they pass a gate.
TEXT = """g (float[batch, words, 4] x) => (float[batch, 3] scores) {
    always = Constant <value = bool {1}> ()
    zero = Constant <value = float {0}> ()
    first = Constant <value = int64[1] {0}> ()
    width = Constant <value = int64[1] {6}> ()
    one = Constant <value = int64 {1}> ()
    shape = Shape(x)
    rows = Gather(shape, first)
    words = Gather(shape, one)
    sizes = Concat <axis = 0> (rows, width)
    start = ConstantOfShape(sizes)
    h = Loop (words, always, start) <body = step (int64 i, bool go, float[batch, 6] p) => (bool on, float[batch, 6] q) {
        on = Identity(go)
        e = Gather <axis = 1> (x, i)
        u = MatMul(e, w)
        v = MatMul(p, r)
        a = Add(u, v)
        n = Tanh(a)
        mean = ReduceMean <keepdims = 0> (n)
        positive = Greater(mean, zero)
        q = If (positive) <
            then_branch = yes () => (float[batch, 6] y) { s = Sigmoid(gate) y = Mul(n, s) },
            else_branch = no () => (float[batch, 6] z) { z = Identity(n) }
        >
    }>
    scores = Gemm(h, o, bias)
}"""


def batches():
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        x = random.normal(size=(ROWS, WORDS, 4)).astype(np.float32)
        yield {"x": x, "labels": x[:, :, :3].sum(1).argmax(1)}


def scores(weights, x):
    """The same model in PyTorch."""
    h = torch.zeros(len(x), 6)
    for word in x.unbind(1):
        h = torch.tanh(word @ weights["w"] + h @ weights["r"])
        h = h * torch.sigmoid(weights["gate"]) if h.mean() > 0 else h
    return h @ weights["o"] + weights["bias"]


@pytest.fixture(scope="module")
def expected():
    """The losses of PyTorch, and its weights after the last step."""
    weights = {name: torch.tensor(value, requires_grad=True) for name, value in WEIGHTS.items()}
    optimizer, losses = torch.optim.SGD(weights.values(), lr=RATE), []
    for batch in batches():
        x, labels = (torch.tensor(batch[name]) for name in ("x", "labels"))
        loss = torch.nn.functional.cross_entropy(scores(weights, x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights


def made(folder, **settings):
    return set_of(build(TEXT, WEIGHTS), folder, requires_grad=list(WEIGHTS), **settings)


@pytest.mark.parametrize("settings", [{}, {"checkpoint_segments": 2}, {"checkpoint_segments": ["h"]}])
def test_twenty_steps_and_an_export(settings, expected, tmp_path):
    losses, weights = expected
    trainer = Trainer(made(tmp_path, **settings))
    trainer.learning_rate = RATE
    found = [trainer.step(batch) for batch in batches()]
    np.testing.assert_allclose(found, losses, rtol=RTOL)
    assert np.mean(found[-5:]) < np.mean(found[:5])
    trainer.export(tmp_path / "trained.onnx")
    x = next(batches())["x"][:3, :4]
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    np.testing.assert_allclose(
        session.run(None, {"x": x})[0], scores(weights, torch.tensor(x)).detach(), rtol=RTOL, atol=RTOL
    )


def test_batch_normalization_in_a_branch_trains(tmp_path):
    """Its running statistics move where the branch is taken."""
    text = """g (float[b, 4] x) => (float[b, 3] scores) {
        m = ReduceMean <keepdims = 0> (x)
        zero = Constant <value = float {0}> ()
        c = Greater(m, zero)
        h = If (c) <then_branch = yes () => (float[b, 4] p) { p = BatchNormalization(x, scale, bias, mean, var) },
                    else_branch = no () => (float[b, 4] q) { q = Mul(x, scale) }>
        scores = MatMul(h, w)
    }"""
    weights = {**normal(w=(4, 3)), "scale": np.ones(4, np.float32), "bias": np.zeros(4, np.float32)}
    model = build(text, {**weights, "mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)})
    trainer = Trainer(set_of(model, tmp_path, requires_grad=list(weights), batch_norm="train"))
    trainer.learning_rate = RATE
    w, scale, bias = (torch.tensor(each, requires_grad=True) for each in weights.values())
    optimizer, mean, var = torch.optim.SGD([w, scale, bias], lr=RATE), torch.zeros(4), torch.ones(4)
    for step, batch in enumerate(batches()):
        x = batch["x"].mean(1) + np.float32(step % 2 - 0.5)
        given, labels = torch.tensor(x), torch.tensor(batch["labels"])
        normalized = torch.nn.functional.batch_norm(given, mean, var, scale, bias, True) if given.mean() > 0 else None
        h = given * scale if normalized is None else normalized
        loss = torch.nn.functional.cross_entropy(h @ w, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step({"x": x, "labels": batch["labels"]}) == pytest.approx(loss.item(), rel=RTOL)
    trainer.export(tmp_path / "trained.onnx")
    held = {
        each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(tmp_path / "trained.onnx").graph.initializer
    }
    np.testing.assert_allclose(held["mean"], mean, rtol=RTOL)


@pytest.mark.parametrize(
    "condition",
    ["Constant<value=bool {1}>()", "Greater(two, one)", "Equal(sizes, four)", "Equal(size, four)", "Equal(part, four)"],
)
@pytest.mark.parametrize("requires_grad", [None, ["*"]])
def test_weights_of_branches_that_no_run_takes_are_none(condition, requires_grad, tmp_path):
    text = f"""g (float[n, 4] x) => (float[n, 3] y) {{
            one = Constant<value = int64 {{1}}>()  two = Constant<value = int64 {{2}}>()
            four = Constant<value = int64[1] {{4}}>()  sizes = Shape<start = 1>(x)
            last = Constant<value = int64[1] {{-1}}>()  end = Constant<value = int64[1] {{2}}>()
            all = Shape(x)  size = Gather(all, last)  part = Slice(all, last, end)
            yes = {condition}
            h = MatMul(x, w)
            y = If (yes) <then_branch = a () => (float[n, 3] p) {{ p = MatMul(h, v) }},
                          else_branch = b () => (float[n, 3] q) {{ r = MatMul(h, u)  q = Add(r, c) }}>
        }}"""
    model = build(text, normal(w=(4, 3), v=(3, 3), u=(3, 3), c=(3,)))
    made = generate_artifacts(model, requires_grad, loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path)
    assert (made.trainable, made.constants) == (("w", "v"), ("u", "c"))
    onnx.save(model, tmp_path / "model.onnx")
    assert inspect(tmp_path / "model.onnx").training.trainable == ["w", "v"]
