"""Arrays that NumPy makes of what other libraries lend: memoryviews, and objects that have nothing but DLPack."""

import numpy as np
import pytest

import opgrad
from opgrad import post_ops


class Lent:
    """An object that lends memory, and does nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Elsewhere(Lent):
    def __dlpack__(self, **options):
        raise BufferError("device 7 is far away")


X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
LABELS = np.array([0, 3, 1])
MASK = X < 1.5


@pytest.fixture(params=[memoryview, Lent])
def lend(request):
    return request.param


def test_inputs(lend):
    for _ in range(2):
        for found, expected in [
            (opgrad.softmax(lend(X)), opgrad.softmax(X)),
            (opgrad.softmax_grad(lend(X), X), opgrad.softmax_grad(X, X)),
            (opgrad.softmax_grad(X, y=lend(X), axis=0), opgrad.softmax_grad(X, X, 0)),
            (opgrad.gather(X, lend(LABELS % 3)), opgrad.gather(X, LABELS % 3)),
            (
                opgrad.softmax_cross_entropy_loss(lend(X), lend(LABELS))[1],
                opgrad.softmax_cross_entropy_loss(X, LABELS)[1],
            ),
        ]:
            np.testing.assert_array_equal(found, expected)
            assert type(found) is np.ndarray


def test_arrays_of_attributes(lend):
    expected = opgrad.softmax(X, where=MASK, post_ops=[post_ops.mul(X)])
    for x, where, operand in [(X, MASK, lend(X)), (lend(X), lend(MASK), lend(X)), (X, lend(MASK), X)]:
        found = opgrad.softmax(x, where=where, post_ops=[post_ops.mul(operand)])
        np.testing.assert_array_equal(found, expected)


def test_lists_and_graph_operators(lend):
    for found, expected in [
        (opgrad.concat_training([lend(X), X])[0], np.concatenate([X, X])),
        (opgrad.concat_training((X, lend(X)), axis=0)[0], np.concatenate([X, X])),
        (opgrad.div_grad(lend(X), X + 5, lend(X + 5))[0], opgrad.div_grad(X, X + 5, X + 5)[0]),
    ]:
        np.testing.assert_array_equal(found, expected)


def test_memory_is_read_anew(lend):
    x = X.copy()
    lent = lend(x)
    opgrad.relu(lent)
    x += 3
    np.testing.assert_array_equal(opgrad.relu(lent), opgrad.relu(x))


def test_what_cannot_be_borrowed(lend):
    with pytest.raises(TypeError, match=rf"^relu: out for y is {lend.__name__}, expected a NumPy array$"):
        opgrad.relu(X, out=lend(X.copy()))
    with pytest.raises(TypeError, match=rf"^relu: out for y is {lend.__name__}, expected a NumPy array$"):
        opgrad.relu(lend(X), out=lend(X.copy()))
    with pytest.raises(TypeError, match=r"^softmax_grad: y is Elsewhere, .* by DLPack: device 7 is far away$"):
        opgrad.softmax_grad(lend(X), Elsewhere(X))
    with pytest.raises(
        TypeError, match=r"^concat_training: arrays\[1\] is Elsewhere, which NumPy cannot take by DLPack"
    ):
        opgrad.concat_training([X, Elsewhere(X)])


def test_mixtures_with_tensors(lend):
    torch = pytest.importorskip("torch")
    for arguments in [(torch.from_numpy(X.copy()), lend(X)), (lend(X), torch.from_numpy(X.copy()))]:
        with pytest.raises(TypeError, match=r"^softmax_grad: (dy|y) is .*, expected a PyTorch tensor, as (dy|y) is$"):
            opgrad.softmax_grad(*arguments)


def test_plans_of_example_calls():
    y = X.copy()
    opgrad.plan(opgrad.softmax, Lent(X), out=y)(X, out=y)
    np.testing.assert_array_equal(y, opgrad.softmax(X))
