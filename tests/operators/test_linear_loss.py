"""Cross-entropy of a linear layer as an operator of graphs: chunks, labels, gradients of models, what is refused."""

import numpy as np
import pytest
import torch
from differences import build
from onnx import numpy_helper
from runtime_cases import session_of
from runtime_cases_packed import packed

import opgrad
from opgrad.contract import reference
from opgrad.cpu.programs import loss as programs
from opgrad.gradients import gradients
from opgrad.onnxruntime import InferenceSession, lower

NAME = "linear_cross_entropy_loss_and_grad"
TOKENS, SIZE, CLASSES = 10, 64, 33


def arrays(rng, tokens=TOKENS, size=SIZE, classes=CLASSES):
    labels = rng.integers(0, classes, tokens)
    labels[::4] = -100
    w = (rng.normal(size=(classes, size)) / np.sqrt(size)).astype(np.float32)
    return {"x": rng.normal(size=(tokens, size)).astype(np.float32), "b": w, "labels": labels}


def given(values):
    return {**values, "N": values["b"].shape[0], "K": values["b"].shape[1]}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_is_that_of_pytorch(reduction, rng):
    values = arrays(rng)
    x = torch.tensor(values["x"], dtype=torch.float64, requires_grad=True)
    logits, labels = x @ torch.tensor(values["b"], dtype=torch.float64).T, torch.tensor(values["labels"])
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
    expected.sum().backward()
    loss, dx = opgrad.linear_cross_entropy_loss_and_grad(**given(values), reduction=reduction)
    np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-4, atol=1e-6)
    alone = opgrad.linear_cross_entropy_loss(**given(values), reduction=reduction)
    np.testing.assert_allclose(alone, loss, rtol=1e-6)


def test_chunks_of_tokens_give_what_all_together_give(monkeypatch, rng):
    monkeypatch.setattr(programs, "CHUNK_BYTES", 24 * 4 * 70)
    values = arrays(rng, 101, 40, 70)
    loss, dx = opgrad.linear_cross_entropy_loss_and_grad(**given(values))
    every, _ = opgrad.linear_cross_entropy_loss_and_grad(**given(values), reduction="none")
    assert every.sum() / (values["labels"] >= 0).sum() == pytest.approx(loss, rel=1e-6)
    exact = {name: each.astype("f8") if each.dtype.kind == "f" else each for name, each in values.items()}
    expected, slope = reference(NAME)(**given(exact))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(dx, slope, rtol=1e-4, atol=1e-7)


def test_no_token_that_counts_and_none_at_all(rng):
    values = arrays(rng)
    values["labels"][:] = -100
    values["x"][0] = np.nan
    loss, dx = opgrad.linear_cross_entropy_loss_and_grad(**given(values))
    assert loss == 0
    assert dx.tobytes() == bytes(dx.nbytes)
    for tokens, classes in ((0, 5), (3, 0)):
        empty = arrays(rng, tokens, 8, max(classes, 1))
        empty = {**empty, "b": empty["b"][:classes], "labels": empty["labels"] * 0 - 100}
        for reduction in ("mean", "none"):
            loss, dx = opgrad.linear_cross_entropy_loss_and_grad(**given(empty), reduction=reduction)
            assert not loss.any()
            assert not dx.any()


def test_the_bits_do_not_depend_on_threads(rng, threads):
    values = arrays(rng, 200, 96, 1000)
    threads(lambda: opgrad.linear_cross_entropy_loss_and_grad(**given(values)), (1, 2, 4))


# --- in models ---

HEADS = {
    "floats, by class": ("b", "MatMul(x, bt)"),
    "4 bits": ("q, labels, s", "com.microsoft.MatMulNBits <N = 33, K = 64, bits = 4, block_size = 32> (x, q, s)"),
    "8 bits with zero points": (
        "q8, labels, s, z",
        "com.microsoft.MatMulNBits <N = 33, K = 64, bits = 8, block_size = 32> (x, q8, s, z)",
    ),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("head", HEADS)
def test_gradients_in_models_are_those_of_the_product_and_its_loss(head, reduction, rng):
    values = arrays(rng)
    inputs, product = HEADS[head]
    inputs = inputs if "labels" in inputs else f"{inputs}, labels"
    bits = 8 if "8" in head else 4 if "4" in head else 0
    more = f", bits = {bits}, column_block = 32, zero_point = {2.0 ** (bits - 1)}" if bits else ""
    more += f', reduction = "{reduction}"'
    fused = f"loss = com.microsoft.LinearCrossEntropyLoss <N = 33, K = 64{more}> (x, {inputs})"
    attributes = f'ignore_index = -100, reduction = "{reduction}"'
    plain = f"logits = {product} loss = SoftmaxCrossEntropyLoss <{attributes}> (logits, labels)"
    z = packed(rng.integers(0, 256, (CLASSES, 2)), 8)
    constants = {
        "b": values["b"], "bt": np.ascontiguousarray(values["b"].T), "half": np.float32(0.5),
        "q": packed(rng.integers(0, 16, (CLASSES, 2, 32)), 4), "s": rng.uniform(0.02, 0.04, (CLASSES, 2)).astype("f4"),
        "q8": rng.integers(0, 256, (CLASSES, 2, 32)).astype(np.uint8), "z": z,
    }  # fmt: skip
    constants["s"] = (constants["s"] * (16 / 256 if bits == 8 else 1)).astype(np.float32)
    feeds, found = {"u": values["x"], "labels": values["labels"]}, []
    for text in (plain, fused):
        model = build(
            f"m (float[tokens, 64] u, int64[tokens] labels) => (float twice) {{ x = Mul(u, half) {text}"
            " squares = Mul(loss, loss) twice = ReduceSum <keepdims = 0> (squares) }",
            21,
        )
        model.ir_version = 10
        own = {name for node in model.graph.node for name in node.input}
        model.graph.initializer.extend(
            numpy_helper.from_array(each, key) for key, each in constants.items() if key in own
        )
        found.append(gradients(model, "twice", "u"))
    expected = session_of(lower(found[0])).run(None, feeds)
    assert "LinearCrossEntropyLossAndGrad" in {node.op_type for node in found[1].graph.node}
    sessions = InferenceSession(found[1].SerializeToString()), session_of(lower(found[1]))
    for session in sessions:
        for mine, other in zip(session.run(None, feeds), expected, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)


def test_weights_that_are_trained_are_refused():
    model = build(
        "m (float[tokens, 64] x, float[33, 64] w, int64[tokens] labels) => (float loss)"
        " { loss = com.microsoft.LinearCrossEntropyLoss <N = 33, K = 64> (x, w, labels) }",
        21,
    )
    with pytest.raises(NotImplementedError, match="its weights are trained; write it as a product"):
        gradients(model, "loss", "w")
