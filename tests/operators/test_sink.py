"""Softmax with a sink: against its reference, as a longer softmax, at the limits, on tensors."""

import numpy as np
import pytest

import opgrad
from opgrad.cli.examples.arguments import finfo, widened
from opgrad.contract import FLOATS, reference


def given(rng, dtype, shape=(2, 3, 5, 70)):
    return (rng.normal(0, 3, size).astype(dtype) for size in (shape, shape[1:2], shape))


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_and_gradients(dtype, rng):
    x, sink, dy = given(rng, dtype)
    y, lse = opgrad.sink_softmax(x, sink)
    exact, sums = reference("sink_softmax")(widened(x), widened(sink))
    unit = 20 * float(finfo(lse.dtype).eps)
    assert (abs(widened(y) - exact) <= unit + float(finfo(y.dtype).eps) * exact).all()
    np.testing.assert_allclose(lse, sums, rtol=unit)
    dx, dsink = opgrad.sink_softmax_grad(dy, y, lse, sink)
    wanted = reference("sink_softmax_grad")(widened(dy), widened(y), widened(lse), widened(sink))
    for got, each in zip((dx, dsink), wanted, strict=True):
        room = unit * 10 * max(1, abs(each).max()) + float(finfo(got.dtype).eps) * abs(each)
        assert (abs(widened(got) - each) <= room).all()
    assert (x.shape, sink.shape) == (dx.shape, dsink.shape)


def test_it_is_the_softmax_of_one_score_more(rng):
    x, sink, _ = given(rng, "float64")
    beside = np.broadcast_to(sink[:, None, None], (*x.shape[:3], 1))
    whole = opgrad.softmax(np.concatenate([x, beside], -1))
    np.testing.assert_allclose(opgrad.sink_softmax(x, sink)[0], whole[..., :-1], rtol=1e-13)


def test_hidden_scores_and_threads(threads, rng):
    x, sink, dy = given(rng, "float32")
    x[0, 0, 0], x[:, 1, :, ::2], x[0, 2, 1], sink[2] = -np.inf, -np.inf, -np.inf, -np.inf
    y, lse = opgrad.sink_softmax(x, sink)
    assert (y[0, 0, 0] == 0).all()
    assert (y[0, 2, 1] == 0).all()
    assert lse[0, 0, 0] == pytest.approx(sink[0])
    assert lse[0, 2, 1] == -np.inf
    found = []
    for count in (1, 2):
        opgrad.set_num_threads(count)
        dx, dsink = opgrad.sink_softmax_grad(dy, y, lse, sink)
        found.append(dx.tobytes() + dsink.tobytes())
        assert np.isfinite(dx).all()
        assert dsink[2] == 0
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by forward_ad itself
def test_on_tensors():
    torch = pytest.importorskip("torch")
    import opgrad.torch

    torch.manual_seed(0)
    x, sink = torch.randn(1, 3, 2, 5).double().requires_grad_(), torch.randn(3).double().requires_grad_()
    torch.autograd.gradcheck(opgrad.torch.sink_softmax, (x, sink), check_forward_ad=True)
    torch.autograd.gradgradcheck(opgrad.torch.sink_softmax, (x, sink), check_fwd_over_rev=True)
    compiled = torch.compile(opgrad.torch.sink_softmax, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, sink), opgrad.torch.sink_softmax(x, sink))
    batch = torch.randn(2, 1, 3, 2, 5).double()
    batched = torch.vmap(opgrad.torch.sink_softmax, (0, None))(batch, sink)
    torch.testing.assert_close(batched[:, 0], opgrad.torch.sink_softmax(batch[:, 0], sink))
