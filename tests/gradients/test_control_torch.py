"""Branches, loops and rows that pad, as PyTorch's exporters write them, and LinearAttention, against autograd."""

import functools
import io
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from differences import build, computed

from opgrad.gradients import gradients

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

TOLERANCE = 1e-4  # of float32 sums that are formed in another order


class Scripted(torch.nn.Module):
    """An LSTM whose steps a scripted loop makes, with a list of its states."""

    def __init__(self):
        super().__init__()
        self.cell = torch.nn.LSTMCell(3, 4)
        self.out = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor):
        h = torch.zeros(x.size(1), 4)
        c = torch.zeros(x.size(1), 4)
        states: list[torch.Tensor] = []
        for step in range(x.size(0)):
            h, c = self.cell(x[step], (h, c))
            states.append(h)
        return self.out(torch.stack(states))


class Reversed(torch.nn.Module):
    """A recurrent layer whose scripted loop goes backwards, and branches in each step."""

    def __init__(self):
        super().__init__()
        self.inputs = torch.nn.Linear(3, 4)
        self.states = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor):
        h = torch.zeros(x.size(1), 4)
        for step in range(x.size(0)):
            new = torch.tanh(self.inputs(x[x.size(0) - 1 - step]) + self.states(h))
            if bool(new.sum() > 0):  # noqa: SIM108
                h = new * new
            else:
                h = new + h
        return h


class Conditional(torch.nn.Module):
    """Two layers, of which the data chooses one."""

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(3, 4)
        self.other = torch.nn.Linear(3, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: torch.tanh(self.one(x)), lambda x: self.other(x) ** 2, (x,))


class Repeated(torch.nn.Module):
    """A layer that is applied until its results are large."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        def go_on(turn, h):
            return (turn < 6) & (h.abs().sum() < 100)

        def turn(turn, h):
            return turn + 1, torch.tanh(self.layer(h)) + h

        return torch._higher_order_ops.while_loop(go_on, turn, (torch.tensor(0), x))[1]


class Unrolled(Repeated):
    """The same in Python, which autograd differentiates."""

    def forward(self, x):
        turn = 0
        while turn < 6 and x.abs().sum() < 100:
            turn, x = turn + 1, torch.tanh(self.layer(x)) + x
        return x


class Scanned(torch.nn.Module):
    """A recurrent layer by torch's scan."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        from torch._higher_order_ops.scan import scan

        weight = self.layer.weight

        def step(h, element):
            new = torch.tanh(h @ weight + element)
            return new, new * 2

        last, rows = scan(step, torch.ones(2, 3), x)
        return rows * last


class Stepped(Scanned):
    """The same in Python."""

    def forward(self, x):
        h, rows = torch.ones(2, 3), []
        for element in x:
            h = torch.tanh(h @ self.layer.weight + element)
            rows.append(h * 2)
        return torch.stack(rows) * h


class Padded(torch.nn.Module):
    """A table of rows, of which the one that pads is not learned."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(3, 4, padding_idx=1)

    def forward(self, x):
        return self.words(x.argmax(-1)) * x.sum(-1, keepdim=True)


class Detached(torch.nn.Module):
    """A layer that is rounded straight through, and multiplied by what it gives, which counts as a constant."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, x):
        y = self.layer(x)
        return (y + (torch.round(y) - y).detach()) * y.detach()


def scripted(model, x):
    """The export of a scripted model, of any number of steps and rows."""
    file = io.BytesIO()
    torch.onnx.export(
        torch.jit.script(model), (x,), file, dynamo=False, opset_version=17, do_constant_folding=False,
        input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "steps", 1: "rows"}},
    )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def traced(model, x, **options):
    return torch.onnx.export(model, (x,), dynamo=True, verbose=False, **options).model_proto


@pytest.mark.parametrize(
    ("model", "eager", "export", "shape"),
    [
        (Scripted, Scripted, scripted, (5, 2, 3)),
        (Reversed, Reversed, scripted, (5, 2, 3)),
        (Conditional, Conditional, traced, (2, 3)),
        (Repeated, Unrolled, traced, (2, 3)),
        (Scanned, Stepped, traced, (5, 2, 3)),
        (Padded, Padded, traced, (5, 2, 3)),
        (Detached, Detached, functools.partial(traced, optimize=False), (2, 3)),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.one_in(2)
def test_exports_have_the_gradients_of_autograd(model, eager, export, shape):
    torch.manual_seed(0)
    whole, reference = model(), eager()
    reference.load_state_dict(whole.state_dict())
    x = torch.randn(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = export(whole, x)
    known = {each.name for each in exported.graph.initializer}
    parameters = {name: each for name, each in reference.named_parameters() if name in known}
    assert parameters
    graph = gradients(exported, exported.graph.output[0].name, ["x", *parameters], plain=True)
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    for given in (x, -x):
        given = given.clone().requires_grad_()
        result = reference(given)
        expected = torch.autograd.grad(result.sum(), [given, *parameters.values()], allow_unused=True)
        found = session.run(None, {"x": given.detach().numpy()})
        np.testing.assert_allclose(found[0], result.detach(), rtol=TOLERANCE, atol=TOLERANCE)
        for name, mine, other in zip(["x", *parameters], found[1:], expected, strict=True):
            other = np.zeros_like(mine) if other is None else other.numpy()
            np.testing.assert_allclose(mine, other, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


# --- LinearAttention, which ONNX defines by a Scan ---


def test_convolutions_and_pools_inside_of_a_loop():
    model = build("""g (float[1, 2, 5, 5] x, float[2, 2, 3, 3] w) => (float[1, 2, 5, 5] y) {
        t = Constant <value = bool {1}> ()  n = Constant <value = int64 {3}> ()
        y = Loop (n, t, x) <body = b (int64 i, bool c, float[1, 2, 5, 5] h) => (bool d, float[1, 2, 5, 5] o) {
            d = Identity(c)  a = Conv <pads = [1, 1, 1, 1]> (h, w)
            m = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a)  o = Tanh(m) }>
    }""")
    torch.manual_seed(0)
    x, w = torch.randn(1, 2, 5, 5, requires_grad=True), torch.randn(2, 2, 3, 3, requires_grad=True)
    y = x
    for _ in range(3):
        y = torch.tanh(torch.nn.functional.max_pool2d(torch.nn.functional.conv2d(y, w, padding=1), 3, 1, 1))
    expected = [y, *torch.autograd.grad(y.sum(), [x, w])]
    feeds = {"x": x.detach().numpy(), "w": w.detach().numpy()}
    for plain in (True, False):
        found = computed(gradients(model, "y", ["x", "w"], plain=plain), feeds, plain)
        for mine, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, other.detach(), rtol=TOLERANCE, atol=TOLERANCE)
