"""What only a real device can show: graphs, streams, tensors of more than 2^31 elements, the same bits every time."""

import pytest
from accuracy import assert_close
from samples import call, sample
from snippets import run

import opgrad

torch = pytest.importorskip("torch")

from tensors import on_tensors  # noqa: E402

pytestmark = pytest.mark.gpu

NEEDED = 16 << 30  # bytes of free device memory for tests of large tensors


def skip_without_memory():
    free = torch.cuda.mem_get_info()[0]
    if free < NEEDED:
        pytest.skip(f"not shown: needs {NEEDED >> 30} GiB of free device memory, {free / (1 << 30):.1f} are free")


def on_device(values):
    """The arguments as CUDA tensors."""
    found = on_tensors(values)
    return {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in found.items()}


def test_every_operator_in_a_cuda_graph(op, rng):
    """A captured call runs again on other values, so nothing in it waits for the host or keeps an old address."""
    first, second = (sample(op, (64, 1001), "float32", rng, indices=(300,)) for _ in range(2))
    arguments = on_device(first)
    out = tuple(torch.empty_like(result) for result in call(op, arguments))
    given = out if len(out) > 1 else out[0]
    call(op, arguments, out=given)  # compiles, which cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(op, arguments, out=given)
    for name, value in on_device(second).items():
        if isinstance(value, torch.Tensor):
            arguments[name].copy_(value)
    graph.replay()
    assert_close(op, second, tuple(result.cpu().numpy() for result in out), "replayed")


def test_calls_run_on_the_callers_stream(op, rng):
    """The result is there when the caller's stream is, although another stream is busy."""
    arguments = on_device(sample(op, (64, 1001), "float32", rng, indices=(300,)))
    expected = call(op, arguments)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results = call(op, arguments)
    stream.synchronize()
    for result, same in zip(results, expected, strict=True):
        assert torch.equal(result, same)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [7, 1000, 128256])
def test_gather_grad_has_the_same_bits_every_time(size, dtype, rng):
    indices = torch.from_numpy(rng.integers(-size, size, 16384)).cuda()
    dy = torch.randn(16384, 256, device="cuda", dtype=getattr(torch, dtype))
    first = opgrad.gather_grad((size, 256), indices, dy)
    for _ in range(5):
        assert torch.equal(opgrad.gather_grad((size, 256), indices, dy), first)


def test_more_than_2_to_the_31_elements():
    """The last row is computed as if it stood alone."""
    skip_without_memory()
    x = torch.randn(70_001, 32_000, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 32_000, (70_001,), device="cuda")
    y = opgrad.softmax(x)
    assert torch.equal(y[-1], opgrad.softmax(x[-1:].clone())[0])
    del y
    loss = opgrad.softmax_cross_entropy_loss_only(x, labels, reduction="none")
    alone = opgrad.softmax_cross_entropy_loss_only(x[-1:].clone(), labels[-1:], reduction="none")
    torch.testing.assert_close(loss[-1:], alone)


def test_wide_offsets_inside_a_row():
    """The elements of a row lie more than 2^31 elements apart."""
    skip_without_memory()
    x = torch.randn(5, 1 << 29, device="cuda", dtype=torch.float16)
    y = opgrad.softmax(x, axis=0)
    torch.testing.assert_close(y[:, -1000:], torch.softmax(x[:, -1000:].float(), 0).half())


def test_labels_and_indices_out_of_range_stay_inside(rng):
    """Wrong labels give NaN rows, wrong indices nothing; nothing around the results changes."""
    x = torch.randn(64, 1001, device="cuda")
    labels = torch.randint(0, 1001, (64,), device="cuda")
    labels[3], labels[5] = 1001, -(2**40)
    memory = torch.full((66, 1001), 7.0, device="cuda")
    loss, dlogits = opgrad.softmax_cross_entropy_loss_and_grad(
        x, labels, reduction="none", out=(torch.empty(64, device="cuda"), memory[1:-1])
    )
    wrong = torch.zeros(64, dtype=torch.bool, device="cuda")
    wrong[3] = wrong[5] = True
    assert torch.equal(torch.isnan(loss), wrong)
    assert torch.equal(torch.isnan(dlogits).all(1), wrong)
    assert torch.equal(memory[0], memory[-1])
    assert (memory[0] == 7).all()

    indices = torch.randint(-100, 100, (500,), device="cuda")
    wild = indices.clone()
    wild[7], wild[11] = 100, -(2**40)
    dy = torch.randn(500, 33, device="cuda")
    muted = dy.clone()
    muted[7] = muted[11] = 0
    torch.testing.assert_close(opgrad.gather_grad((100, 33), wild, dy), opgrad.gather_grad((100, 33), indices, muted))


def test_the_snippets_of_the_document_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("docs/guides/cuda.md", tmp_path)["loss"].is_cuda
    assert run("docs/explain/cuda.md", tmp_path)["kernel"].registers
