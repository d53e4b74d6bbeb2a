"""The memory of large results on the CPU: PyTorch's own storages, never used again while anybody holds one."""

import copy
import io

import numpy as np
import pytest
from callers import call_at_once

torch = pytest.importorskip("torch")

import opgrad  # noqa: E402
from opgrad.call.libraries import torch_tensors  # noqa: E402
from opgrad.cpu.runtime import pool  # noqa: E402

SIZE = 1 << 20  # bytes
X = torch.linspace(-1, 1, SIZE // 4)


@pytest.fixture(autouse=True)
def fresh():
    opgrad.empty_pool()
    yield
    opgrad.empty_pool()
    assert not torch_tensors._kept


def made(x=X):
    return opgrad.relu(x)


def test_results_take_the_storage_of_a_released_one():
    y = made()
    place = y.data_ptr()
    assert made().data_ptr() != place
    del y
    y, z = made(), made()
    assert place in {y.data_ptr(), z.data_ptr()}
    assert torch.equal(y, X.clamp_min(0))
    assert (y._base, y.is_leaf, y.untyped_storage().nbytes()) == (None, True, SIZE)
    places = {y.data_ptr(), z.data_ptr()}
    del y, z
    columns = opgrad.relu(X.view(512, 512).t())
    assert columns.stride() == (1, 512)
    assert columns.data_ptr() in places


@pytest.mark.parametrize(
    "hold",
    [
        lambda y: y[5:].t(),
        lambda y: y.untyped_storage(),
        lambda y: y.numpy(),
        lambda y: memoryview(y.numpy()),
        lambda y: torch.utils.dlpack.to_dlpack(y),
        lambda y: (torch.ones_like(y, requires_grad=True) * y).sum(),
        lambda y: torch.nn.Parameter(y).data,
    ],
)
def test_whatever_holds_a_result_keeps_its_memory(hold):
    y = made()
    place = y.data_ptr()
    held = hold(y)
    del y
    others = [made() for _ in range(3)]
    assert place not in {other.data_ptr() for other in others}
    assert held is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.resize_(SIZE),
        lambda y: y.untyped_storage().resize_(0),
        lambda y: y.share_memory_(),
        lambda y: y.numpy(),
    ],
)
def test_what_a_user_changed_is_not_used_again(change):
    y = made()
    change(y)
    del y
    other = made()
    storage = other.untyped_storage()
    assert (storage.resizable(), storage.nbytes(), storage.is_shared()) == (True, SIZE, False)
    assert [address for _, address in torch_tensors._kept[SIZE]] == [other.data_ptr()]


def test_a_lazy_clone_keeps_what_it_shows():
    y = made()
    clone = torch._lazy_clone(y)
    del y
    other = made(-X)
    assert torch.equal(clone, X.clamp_min(0))
    assert torch.equal(other, (-X).clamp_min(0))


def test_results_are_resized_saved_and_copied_like_any_tensor():
    made()
    y = made()
    file = io.BytesIO()
    torch.save(y, file)
    assert len(file.getvalue()) < SIZE + 4096
    assert torch.equal(copy.deepcopy(y), y)
    y.resize_(SIZE)
    assert torch.equal(y[: X.numel()], X.clamp_min(0))


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(pool, "bound", lambda: 4 * SIZE)
    live = [made() for _ in range(7)]
    assert torch_tensors._held() == 4 * SIZE
    larger = made(X.repeat(2))
    assert torch_tensors._held() <= 4 * SIZE
    assert larger.numel() == 2 * X.numel()
    assert len({y.data_ptr() for y in live}) == 7


def test_threads_never_share_storages():
    wrong = []

    def work(number):
        for step in range(60):
            y = made()
            y.fill_(number * 100 + step)
            z = made()
            wrong.extend([number] * bool((y != number * 100 + step).any()))
            del y, z

    call_at_once(3, work)
    assert not wrong


def test_small_results_and_old_releases_are_left_to_torch(monkeypatch):
    assert opgrad.relu(X[:1000]).numel() == 1000
    monkeypatch.setattr(torch_tensors, "_references", None)
    y = torch_tensors.maker((SIZE,), (1,), torch.float32)()
    assert (y.shape, y.dtype, torch_tensors._kept) == ((SIZE,), torch.float32, {})
    np.testing.assert_array_equal(made(X[:9]).numpy(), X[:9].clamp_min(0).numpy())
