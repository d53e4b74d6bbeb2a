"""The benchmark on CUDA without a device: tensors on the CPU, and a clock of its own in the place of the device's."""

import importlib.machinery
import itertools
import json
import math
import sys
import time
import types
from functools import partial

import pytest
import report
from bench_cells import TINY
from bench_command import run_bench
from host_clock import HostClock
from samples import each_kind

from bench.cells import Cell, Workload
from bench.figures import figures, machine_line, read
from bench.measure import GIVEN, LACKING, NEW
from bench.peers import LONGEST_NOTE, installed, reason
from bench.run import run
from bench.tables import full_table, left_out
from opgrad.cli import machine
from opgrad.cli.examples.arguments import error_in_ulp, reference
from opgrad.ops import operators

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bench import cuda as target  # noqa: E402
from bench.cuda import LENGTHS, SMALL, Cuda, TensorCase, workloads  # noqa: E402
from opgrad.call.libraries.torch_tensors import download  # noqa: E402

H200, SMALL_CARD = 150_109_880_320, 16 << 30  # bytes of memory
DEVICE = {"name": "A device", "multiprocessors": 2, "memory": 1 << 30, "l2": 1 << 20, "driver": "1.2", "cuda": "13.0"}
TOLERANCE = 8  # ulp
SIMILAR = {"quick_gelu", "quick_gelu_grad"}  # of which torch has the case alpha = 1
RETURNING = {"softmax_cross_entropy_loss_only"}


@pytest.fixture
def stand_in(monkeypatch):
    """A target on the CPU, which the command takes for CUDA."""
    found = Cuda(target.TimedDevice("cpu", l2=1 << 16, memory=1 << 22, clock=HostClock()))
    monkeypatch.setattr(machine, "cuda_problem", lambda: "")
    monkeypatch.setattr(machine, "cuda_device", lambda: DEVICE)
    monkeypatch.setattr(Cuda, "current", lambda: found)
    monkeypatch.setattr(torch, "compile", eager)
    return found


def eager(function, **_):
    return function


def tiny(op, dtype="float32"):
    return [TensorCase(Cell(op, workload, dtype), "cpu") for workload in TINY[op.kind]]


def case_of(name, shape, dtype="float32", **options):
    return TensorCase(Cell(operators()[name], Workload(shape, **options), dtype), "cpu")


# --- cells ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [H200, SMALL_CARD])
def test_workloads_fit_the_memory(memory):
    found = workloads(memory)
    assert set(found) == {op.kind for op in operators().values()}
    for kind, table in found.items():
        assert any(workload.quick for workload in table)
        assert any(workload.headline for workload in table)
        largest = max(math.prod(workload.shape) for workload in table)
        assert largest * 8 * (3 if kind == "slices" else 8) <= memory
    matrices = [workload.shape for workload in found["rows"] if len(workload.shape) == 2]
    lengths = {length: count for count, length in matrices if (count, length) not in ((1, 1000), (100, 10))}
    assert set(LENGTHS) | {1000, 1001, 50256, 50257, 50304, 10, 128256} == set(lengths)
    assert lengths[1000] == lengths[1001] == lengths[1024]
    assert lengths[50256] == lengths[50257] == lengths[50304]


def test_no_class_workload_has_an_axis():
    assert not any(workload.attributes for workload in workloads(H200)["classes"])


# --- cases ----------------------------------------------------------------------------------------------------------


@each_kind
def test_our_call_writes_the_results(op):
    for case in tiny(op, "float32"):
        for tensor in case.results.values():
            tensor.fill_(77)
        case.call()()
        assert case.error() < 64


@each_kind
def test_a_sample_of_large_results_is_compared(monkeypatch, op):
    monkeypatch.setattr("bench.case.CHECKED", 16)
    monkeypatch.setattr("bench.cuda.REFERENCE_ELEMENTS", 16)
    for case in tiny(op):
        case.call()()
        assert case.error() < 64


def test_wrong_results_have_a_large_error():
    for name in ("relu", "softmax_cross_entropy_loss_only"):
        case = case_of(name, (9, 5))
        case.call()()
        result = next(iter(case.results.values()))
        result += 1
        assert case.error() > 1e5


def test_copies_have_memory_of_their_own():
    case = case_of("softmax_grad", (4, 6))
    first, second, third = case.copies(3)
    assert first is case
    places = {tensor.data_ptr() for each in (first, second, third) for tensor in each.arrays.values()}
    assert len(places) == 9
    for name in ("dy", "y"):
        assert torch.equal(second.values[name], case.values[name])
    second.call()()
    assert second.error() < 64


# --- peers ----------------------------------------------------------------------------------------------------------


def compared(case, call):
    """The largest error in ulp of what a call returns."""
    got = call()
    several = got if isinstance(got, tuple) else (got,)
    given = case.values.items()
    values = {name: case.numpy(value) if isinstance(value, torch.Tensor) else value for name, value in given}
    exact = list(reference(case.op, values).values())[-len(several) :]
    return max(error_in_ulp(download(each), wanted) for each, wanted in zip(several, exact, strict=True))


@each_kind
def test_torch_compile_computes_operators(monkeypatch, op):
    """Traced as for a device, without what would then be compiled."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for case in tiny(op):
        found, notes = target.calls(case.copies(2), ["torch.compile"], NEW, int)
        assert not notes
        assert [compared(case, call) < TOLERANCE for call in found["torch.compile"]] == [True, True]


def test_torch_computes_every_operator(op):
    for case in tiny(op):
        found, notes = target.calls(case.copies(2), ["torch"], NEW, int)
        assert [compared(case, call) < TOLERANCE for call in found["torch"]] == [True, True] or op.name in SIMILAR
        assert not notes
        for tensor in case.results.values():
            tensor.fill_(77)
        found, notes = target.calls([case], ["torch", "torch.compile", "liger"], GIVEN, int)
        assert set(notes.values()) <= {LACKING[GIVEN]}
        found["torch"][0]()
        assert op.name in RETURNING or not any((tensor == 77).all() for tensor in case.results.values() if tensor.ndim)
        assert not any(value.requires_grad for value in case.arrays.values())


def with_module(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def overwriting_loss(logits, labels):
    """As Liger-Kernel's: the gradient takes the place of the logits."""
    loss = torch.nn.functional.cross_entropy(logits, labels)
    logits.data.zero_()
    return loss


@pytest.fixture
def libraries(monkeypatch):
    """A stand-in for Liger-Kernel."""
    given = {"liger_softmax": partial(torch.softmax, dim=-1), "liger_cross_entropy": overwriting_loss}
    with_module(monkeypatch, "liger_kernel")
    with_module(monkeypatch, "liger_kernel.transformers")
    with_module(monkeypatch, "liger_kernel.transformers.functional", **given)


@pytest.mark.usefixtures("libraries")
def test_libraries_that_take_matrices():
    assert installed(target.PEERS) == list(target.PEERS)
    for name in ("softmax", "softmax_grad", "softmax_cross_entropy_loss_only"):
        case = case_of(name, (6, 7))
        found, notes = target.calls([case], ["liger"], NEW, int)
        assert not notes
        assert name.endswith("only") or compared(case, found["liger"][0]) < TOLERANCE
    case = case_of("softmax_cross_entropy_loss_and_grad", (6, 7))
    before = case.values["logits"].clone()
    found, notes = target.calls(case.copies(2), ["liger"], NEW, int)
    assert (len(found["liger"]), notes) == (2, {})
    assert torch.equal(case.values["logits"], before)


@pytest.mark.usefixtures("libraries")
def test_what_a_library_does_not_take_is_noted(monkeypatch):
    case = case_of("softmax", (2, 3, 4, 4), attributes={"axis": 1})
    found, notes = target.calls([case], ["liger"], NEW, int)
    assert not found
    assert notes == {"liger": "takes matrices alone, whose rows it reduces"}
    assert target.calls([case_of("relu", (9,))], ["liger"], NEW, int) == ({}, {})

    def refuse(*_):
        raise AssertionError("Unsupported dtype\nmore of it")

    monkeypatch.setattr(sys.modules["liger_kernel.transformers.functional"], "liger_softmax", refuse)
    case = case_of("softmax", (4, 5))
    assert target.calls([case], ["liger"], NEW, int) == ({}, {"liger": "AssertionError: Unsupported dtype"})
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", None)
    assert target.calls([case], ["liger"], NEW, int)[1]["liger"].startswith("ModuleNotFoundError: ")


def test_long_reasons_are_cut():
    assert len(reason(ValueError("x" * 1000))) == LONGEST_NOTE
    assert reason(ValueError()) == "ValueError: "


# --- time -----------------------------------------------------------------------------------------------------------


def test_contestants_share_the_rotation():
    used = []
    calls = {name: [partial(used.append, (name, copy)) for copy in range(3)] for name in ("a", "b")}
    clock = HostClock()
    times = target.interleaved(calls, 0, clock, small=False)
    assert set(times) == {"a", "b"}
    assert all(set(taken) == {"median", "minimum", "samples", "host"} for taken in times.values())
    after_warm_up = [copy for _, copy in used[-target.QUEUE :]]
    assert all(following == (copy + 1) % 3 for copy, following in itertools.pairwise(after_warm_up))
    assert {name for name, _ in used} == {"a", "b"}
    assert clock.held
    assert max(clock.held) <= target.LONGEST_HOLD


def test_long_calls_are_timed_one_by_one():
    clock = HostClock()
    taken = target.interleaved({"a": [partial(time.sleep, 0.002)]}, 0, clock, small=False)["a"]
    assert taken["median"] == pytest.approx(0.002, rel=0.5)
    assert taken["samples"] >= 3


def test_results_are_kept_for_a_round():
    contestant = target.Contestant([lambda: "first", lambda: "second"], itertools.count(), HostClock())
    contestant.run(1, 1)
    assert contestant.results == [None, "second"]
    contestant.run(2, 2)
    assert contestant.results == ["first", "second"]


def test_small_calls_are_timed_by_the_host():
    clock = HostClock()
    taken = target.interleaved({"a": [lambda: None]}, 0, clock, small=True)["a"]
    assert not clock.held
    assert 0 < taken["minimum"] <= taken["median"] < 1e-4


# --- results --------------------------------------------------------------------------------------------------------


def test_a_round_moves_more_than_the_cache_twice(stand_in):
    stand_in.device = target.TimedDevice("cpu", l2=50 << 20, memory=0, clock=HostClock())
    for traffic in (SMALL, 8 << 20, 50 << 20, 100 << 20, 1 << 30):
        assert stand_in.copies(traffic) * traffic > 100 << 20
    assert stand_in.copies(1 << 30) == 1
    assert stand_in.copies(SMALL - 1) == 1


@each_kind
@pytest.mark.one_in(2)
def test_a_cell_is_measured(stand_in, op, monkeypatch):
    monkeypatch.setattr("bench.cuda.SMALL", 64)
    cell = Cell(op, TINY[op.kind][0], "bfloat16")
    measured = stand_in.measure(cell, ["torch", "torch.compile"], 0)
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured
    assert set(measured["ways"][NEW]["times"]) == {"opgrad", "torch", "torch.compile"}
    assert set(measured["ways"][GIVEN]["times"]) == {"opgrad", "torch"}
    assert measured["copies"] * measured["bytes"] > 2 << 16
    assert measured["copied_bytes"] in (measured["bytes"], measured["bytes"] - 1)
    assert measured["error_ulp"] < 64
    assert measured["clock"] == "device"
    assert measured["regime"]
    assert measured["ways"][NEW]["notes"] == {}
    assert measured["ways"][GIVEN]["notes"] == {"torch.compile": LACKING[GIVEN]}


def test_what_cannot_be_measured_is_left_out(stand_in, monkeypatch):
    relu = operators()["relu"]
    ours = TensorCase.call

    def too_large(case, *way):
        if case.shape == (9,):
            raise torch.OutOfMemoryError("no memory left\nat all")
        return ours(case, *way)

    monkeypatch.setattr(TensorCase, "call", too_large)
    result = run(stand_in, [Cell(relu, Workload((n,)), "float32") for n in (8, 9)], [], 0, {}, lambda *_: None)
    assert [cell["workload"] for cell in result["cells"]] == ["8"]
    assert left_out(result) == ["relu 9 float32: OutOfMemoryError: no memory left"]
    assert "* left out: relu 9 float32: OutOfMemoryError: no memory left" in full_table(result)


@pytest.mark.usefixtures("stand_in")
def test_the_command_measures_cuda(tmp_path):
    result_file, plot_file = tmp_path / "result.json", tmp_path / "plot.png"
    options = ["--device", "cuda", "--ops", "relu,softmax", "--dtypes", "float32", "--shapes", "8x9"]
    options += ["--seconds", "0", "--peers", "torch,torch.compile"]
    done = run_bench(*options, "--json", result_file, "--plot", plot_file)
    assert done.exit_code == 0, done.output
    assert "host" in done.output
    assert "A device" in done.output
    result = read(result_file)
    assert result["device"] == DEVICE
    assert result["options"]["device"] == "cuda"
    assert result["versions"]["torch"] == torch.__version__
    assert {"triton", "liger-kernel"} <= set(result["versions"])
    assert [cell["operator"] for cell in result["cells"]] == ["relu", "softmax"]
    assert all(cell.first.host_seconds for cell in figures(result))
    assert plot_file.read_bytes().startswith(b"\x89PNG")


def cuda_result(stand_in):
    cell = Cell(operators()["softmax"], Workload((8, 9), headline=True), "float32")
    result = run(stand_in, [cell], ["torch"], 0, {}, lambda *_: None)
    result["cells"][0]["ways"][NEW]["notes"] = {"liger": "takes no such thing"}
    return result


def test_the_report_has_cpu_and_cuda_apart(stand_in, tmp_path):
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "explain").mkdir(parents=True)
    assert report.cuda_speed(tmp_path, tmp_path) == report.cuda_benchmark(tmp_path, tmp_path) == report.NOT_MEASURED
    result = cuda_result(stand_in)
    (tmp_path / "bench" / "results" / "a-device.json").write_text(json.dumps(result))
    assert report.benchmark(tmp_path, tmp_path) == report.result_pages(tmp_path, tmp_path) == report.NO_RESULT
    text = report.cuda_benchmark(tmp_path, tmp_path / "docs")
    line = "A device (2 multiprocessors, L2 1 MiB, memory 1 GiB), driver 1.2, CUDA 13.0; on "
    assert f"### Operators on A device\n\n{line}" in text
    assert "* left out: liger in softmax 8x9 float32: takes no such thing" in text
    assert report.cuda_speed(tmp_path, tmp_path).startswith("On CUDA, A device: Over 1 cells, ")
    (tmp_path / "README.md").write_text("<!-- cuda-speed:begin -->\n<!-- cuda-speed:end -->\n")
    report.write(tmp_path)
    assert (tmp_path / "docs" / "explain" / "benchmark-cuda.png").is_file()
    assert not (tmp_path / "docs" / "explain" / "benchmark.png").exists()


def test_a_line_names_device_and_versions(stand_in):
    line = machine_line(cuda_result(stand_in) | {"date": "today", "versions": {"torch": "2", "liger": None}})
    assert line.endswith("; torch 2; today.")


# --- errors ---------------------------------------------------------------------------------------------------------


def without(*names):
    def find_spec(name):
        return None if name in names else importlib.machinery.ModuleSpec(name, None)

    return find_spec


@pytest.mark.parametrize(
    ("missing", "devices", "cuda", "usable", "message"),
    [
        (("torch",), 1, "13.0", True, "PyTorch is not installed: install it for CUDA, see https://pytorch.org/"),
        (("triton",), 1, "13.0", True, 'Triton is not installed: pip install "opgrad[cuda]"'),
        ((), None, "13.0", True, "there is no NVIDIA driver here: install it, so that nvidia-smi lists the device"),
        ((), 0, "13.0", True, "the NVIDIA driver shows no device: see nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ((), 1, None, False, f"PyTorch {torch.__version__} is built without CUDA: see https://pytorch.org/"),
        ((), 1, "13.0", False, f"PyTorch {torch.__version__} cannot use it: its CUDA 13.0 may need a newer driver"),
        ((), 1, "13.0", True, None),
    ],
)
def test_what_keeps_cuda_from_running_is_told_in_a_line(monkeypatch, missing, devices, cuda, usable, message):
    monkeypatch.setattr(machine.importlib.util, "find_spec", without(*missing))
    monkeypatch.setattr(machine, "_cuda_devices", lambda: devices)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    if message is None:
        assert machine.cuda_problem() == ""
        return
    done = run_bench("--device", "cuda")
    assert (done.exit_code, done.output.count("\n")) == (1, 0)
    assert done.output.startswith(f"bench: device is 'cuda', but {message}")


@pytest.mark.usefixtures("stand_in")
def test_unknown_peers_are_refused():
    done = run_bench("--device", "cuda", "--peers", "scipy")
    assert done.exit_code == 1
    assert done.output.startswith("bench: peer is 'scipy', expected one installed of torch, torch.compile")
