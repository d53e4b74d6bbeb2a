"""Tensors stay PyTorch's own: what opgrad has read or made can be resized, written over and given back."""

import pytest
from processes import run_processes

import opgrad
from opgrad import post_ops
from opgrad.ops.reference.dropout import Dropout

torch = pytest.importorskip("torch")
functional = torch.nn.functional

import opgrad.torch  # noqa: E402


def resizable(*several):
    """Whether PyTorch may resize each tensor, in place and as the result of its own functions."""
    for each in several:
        size = 2 * each.numel() + 8
        torch.zeros(size, dtype=each.dtype, out=each)
        each.resize_(2 * size)
    return True


def of_rows():
    x, dy = torch.randn(4, 6), torch.randn(4, 6)
    y, out = opgrad.softmax(x), torch.empty_like(x)
    assert opgrad.softmax_grad(dy, y, out=out) is out
    return x, dy, y, out


def of_a_loss():
    logits, labels, weight = torch.randn(5, 7), torch.tensor([0, 1, 2, 3, 6]), torch.rand(7)
    return *opgrad.softmax_cross_entropy_loss_and_grad(logits, labels, weight), logits, labels, weight


def of_slices():
    x, indices = torch.randn(5, 3), torch.tensor([[4, 0], [2, 2]])
    y = opgrad.gather(x, indices)
    return x, indices, y, opgrad.gather_grad((5, 3), indices, y)


def of_autograd():
    x, dy = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    y = opgrad.torch.softmax(x)
    return *torch.autograd.grad(y, x, dy), x, y, dy


def of_a_general_call():
    x, gate, row = (torch.rand(shape, requires_grad=True) for shape in ((4, 6), (4, 6), (6,)))
    mask, dropout = torch.rand(4, 6) < 0.8, Dropout(0.25, seed=3, mask=True)
    chain = [post_ops.mul(gate), post_ops.mul(row)]
    results = opgrad.softmax(x, where=mask, post_ops=chain, dropout=dropout, stats=True)
    return *torch.autograd.grad(results[0].sum(), (x, gate, row)), *results, mask, x, gate, row


@pytest.mark.parametrize("call", [of_rows, of_a_loss, of_slices, of_autograd, of_a_general_call])
def test_arguments_and_results_stay_resizable(call):
    for _ in range(2):  # a new signature, and a known one
        assert resizable(*(each.detach() for each in call()))


def test_copied_arguments_stay_resizable():
    """Labels that lie anyhow are copied for the kernels, and so is an `out` they cannot write."""
    logits = torch.randn(6, 5)
    labels, weight = torch.arange(12)[::2] % 5, torch.rand(10)[::2]
    every = opgrad.softmax_cross_entropy_loss(logits, labels, weight)
    expected = functional.cross_entropy(logits, labels, weight)
    torch.testing.assert_close(every[0], expected)
    assert resizable(*every, logits)
    assert resizable(labels, weight)
    out = torch.empty(6, 4)[:, ::2].t()
    x = torch.randn(6, 2).t()
    assert torch.equal(opgrad.softmax(x, 0, out=out), opgrad.softmax(x.contiguous(), 0))


def test_offsets_and_strides():
    memory = torch.randn(3, 50)
    for x in (memory[1:, 7:31], memory[:, 1::2], memory.t()[5:], memory[2:, 3:].t(), memory[1]):
        torch.testing.assert_close(opgrad.softmax(x), torch.softmax(x, -1))
        out = (
            torch.empty(100, 100)[: x.shape[0], 1 : 1 + x.shape[-1]] if x.dim() > 1 else torch.empty(99)[3 : 3 + len(x)]
        )
        assert torch.equal(opgrad.softmax(x, out=out), opgrad.softmax(x))


def test_inference_tensors_and_empty_ones():
    with torch.inference_mode():
        x = torch.randn(2, 5)
    torch.testing.assert_close(opgrad.softmax(x), torch.softmax(x, -1))
    for shape in [(0, 5), (5, 0)]:
        empty = torch.empty(shape)
        assert opgrad.relu(empty).shape == shape
        assert opgrad.relu(empty, out=empty) is empty


def test_overlap_is_settled_element_by_element():
    memory = torch.randn(4, 10)
    even, odd = memory[:, ::2], memory[:, 1::2]
    expected = torch.relu(even)
    assert torch.equal(opgrad.relu(even, out=odd), expected)  # the spans meet, the elements do not
    with pytest.raises(ValueError, match=r"^relu: out for y overlaps x, expected x itself or separate memory"):
        opgrad.relu(memory[:, :5], out=memory[:, 1:6])
    with pytest.raises(ValueError, match=r"^softmax_grad: out for dx overlaps dy"):
        opgrad.softmax_grad(memory[:3], memory[:3].clone(), out=memory[1:])


def test_overlap_among_more_operands_than_native_code_takes_one_by_one():
    x, *operands = torch.randn(10, 6, 50)
    several = [post_ops.add(each) for each in operands]
    expected = opgrad.softmax(x.numpy(), post_ops=[post_ops.add(each.numpy()) for each in operands])
    assert torch.equal(opgrad.softmax(x, post_ops=several), torch.from_numpy(expected))
    with pytest.raises(ValueError, match=r"overlaps post_ops\[3\]'s operand, expected separate memory"):
        opgrad.softmax(x, post_ops=several, out=operands[3])


def test_tensors_without_memory_are_refused():
    x, y = torch.randn(3, 4), torch.rand(3, 4)
    opgrad.softmax_grad(x, y)
    y.untyped_storage().resize_(0)
    for out in (None, torch.empty(3, 4)):
        with pytest.raises(ValueError, match=r"^softmax_grad: y has no memory, expected an array whose storage is all"):
            opgrad.softmax_grad(x, y, out=out)


def test_gradients_with_the_negative_bit():
    x = torch.randn(3, 4, requires_grad=True)
    dy = torch.randn(3, 4, dtype=torch.complex64).conj().imag
    assert dy.is_neg()
    for call in (lambda x: opgrad.softmax(x), lambda x: opgrad.softmax(x, logit_scale=0.5)):
        (found,) = torch.autograd.grad(call(x), x, dy)
        (expected,) = torch.autograd.grad(call(x), x, dy.resolve_neg())
        assert torch.equal(found, expected)


class Model(torch.nn.Module):
    def __init__(self, embed):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last, self.embed = torch.nn.Parameter(torch.randn(10, 4)), torch.nn.Linear(4, 3), embed

    def forward(self, indices):
        return self.last(self.embed(indices, self.table))


def trained(embed, wrap):
    """The parameters after three steps."""
    model = wrap(Model(embed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[1, step], [5, 9]])).square().sum().backward()
        optimizer.step()
    return [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in model.parameters()]


def train_sharded(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    ours = trained(opgrad.torch.embedding, lambda model: fully_shard(model, mesh=mesh))
    for mine, other in zip(ours, trained(functional.embedding, lambda model: model), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch is built without torch.distributed")
def test_fully_sharded_parameters(tmp_path):
    run_processes(train_sharded, 1, str(tmp_path))
