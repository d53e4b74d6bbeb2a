"""What every test shares: an empty kernel cache, the operators and dtypes to run over, seeded random numbers.

CUDA kernels run on the GPU if there is one, else in Triton's interpreter; with OPGRAD_PTX=90, or another architecture,
what they are compiled to runs on the CPU (tests/support/ptx).
"""

import ctypes
import functools
import gc
import importlib.metadata
import importlib.util
import os
import re
import tempfile
import zlib
from pathlib import Path

# Threads of PyTorch that wait for work sleep, and NumPy's products are one thread's: where several wait for each other,
# they take the core from the other tests' process. A reference of attention took half of the processor time with one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# XLA compiles what a test calls once: with its own settings that took three times as long. It ends a process that sets
# one which it has not, so they are for releases that have them.
if importlib.util.find_spec("jaxlib") and importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

# Set before opgrad is imported; the suite's subprocesses, pytest's workers too, share one cache. Kernels stay from run
# to run, under the digests of all that makes them; where CI is set the suite starts cold, or with the kernels that
# another one has left in the folder that OPGRAD_TEST_KERNELS names.
if "PYTEST_XDIST_WORKER" not in os.environ:
    if "OPGRAD_TEST_KERNELS" in os.environ:
        os.environ["OPGRAD_CACHE_DIR"] = os.environ["OPGRAD_TEST_KERNELS"]
    elif os.environ.get("CI"):
        _cache = tempfile.TemporaryDirectory(prefix="opgrad-tests-")
        os.environ["OPGRAD_CACHE_DIR"] = _cache.name
    else:
        os.environ["OPGRAD_CACHE_DIR"] = str(Path(__file__).parents[1] / "build" / "kernels")
# Tests compile in their own processes: another one takes two seconds to start, and ends when it has waited for a while.
os.environ.setdefault("OPGRAD_COMPILERS", "0")


def cuda_devices():
    """How many GPUs the driver of CUDA has; 0 if there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0


def usable_gpu():
    """Whether tests can reach a GPU, which they do through PyTorch."""
    if not cuda_devices() or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


# Triton looks at this when it is imported; PyTorch must not be before the stand-in for the driver is there.
if "OPGRAD_PTX" in os.environ:
    from ptx import driver

    os.environ["TRITON_INTERPRET"] = "0"
    driver.start(int(os.environ["OPGRAD_PTX"]))
elif "TRITON_INTERPRET" not in os.environ and not usable_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import pytest  # noqa: E402

import opgrad  # noqa: E402
from opgrad.contract import FLOATS  # noqa: E402
from opgrad.cpu import plans  # noqa: E402
from opgrad.ops import operators  # noqa: E402

# Collection leaves millions of objects that stay; looking through them for garbage took an eighth of the tests' time.
gc.disable()


def pytest_collection_finish():
    """Look for garbage from now on, among what comes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def looking_for_garbage_stays_cheap():
    """What is left when a file's tests have ended is looked through once: a collection among all that the suite keeps
    takes four seconds in the end."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    """Leave out what needs a GPU where there is none; take one test in OPGRAD_SHARE, others for each OPGRAD_TURN: on
    CPUs with all that need its kernels; with OPGRAD_CASES=levels take of a test with several parameters as many cases
    as have every level of each."""
    share, turn = int(os.environ.get("OPGRAD_SHARE", "1")), os.environ.get("OPGRAD_TURN", "")
    left = set()
    if os.environ.get("OPGRAD_CASES") == "levels":
        left |= set(items) - set(_with_every_level(items, turn))
    if share > 1:
        left |= {each for each in items if zlib.crc32(f"{turn} {_shared(each)}".encode()) % share}
    if left:
        config.hook.pytest_deselected(items=[each for each in items if each in left])
        items[:] = [each for each in items if each not in left]
    if os.environ.get("TRITON_INTERPRET", "0") != "0" or "OPGRAD_PTX" in os.environ:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and PyTorch for CUDA"))


def _with_every_level(items, turn):
    """Cases of each test that have every level of each of its parameters: all of those marked `every_case`, one of
    those marked `one_case`, three of those marked `few_cases(3)`, a third of those found of a test marked `one_in(3)`.

    Which levels meet depends on the turn. Of an operator all tests take the same dtypes, so that fewer kernels are
    compiled; then cases that have more new levels come first, so that fewer are needed.
    """
    cases = {}
    for item in items:
        cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    for same in cases.values():
        if len(same) == 1 or "every_case" in same[0].keywords:
            yield from same
            continue
        waiting = sorted(same, key=lambda item: _turn_of(item, turn))
        few = same[0].get_closest_marker("few_cases")
        if few or "one_case" in same[0].keywords:
            yield from waiting[: few.args[0] if few else 1]
            continue
        kernels = [set(enumerate(_kernel(each))) for each in waiting]
        kept = [kernels[number] for number in _covering(kernels, 1)]
        left = [item for item, kernel in zip(waiting, kernels, strict=True) if not kernel or kernel in kept]
        levels, share = [_levels(each) for each in left], same[0].get_closest_marker("one_in")
        found = [left[number] for number in _covering(levels, max(map(len, levels)))]
        yield from found[: -(-len(found) // share.args[0])] if share else found


def _covering(levels, most):
    """The numbers of some of the sets with every level of all, first those with `most` new ones."""
    found = set()
    for count in range(most, 0, -1):
        for number, each in enumerate(levels):
            if len(each - found) >= count:
                found |= each
                yield number


def _shared(item):
    """What is taken with other tests or left: those of an operator and dtype; cases of a function, which compile more
    than they run."""
    if "OPGRAD_PTX" in os.environ:
        return item.nodeid
    return " ".join(_kernel(item)) or item.nodeid.partition("[")[0]


def _levels(item):
    """The levels of a case's parameters; those that are listed together are one, but for operator and dtype."""
    kernel = _kernel(item, ("op", "dtype"))
    listed = item.callspec._idlist if hasattr(item, "callspec") else []
    return set(enumerate(kernel if len(listed) == 1 < len(kernel) else listed))


def _kernel(item, names=("op", "name", "dtype")):
    """The operator and the dtype of a case, as far as it has them."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    values = (given[name] for name in names if name in given)
    return [str(getattr(each, "name", getattr(each, "__name__", each))) for each in values]


def _turn_of(item, turn):
    """What decides in which order the cases of a test are looked at.

    Two of three operators begin with float32, whose kernels tests of other things compile; others for each turn. Tests
    whose cases are named alike take the same ones.
    """
    kernel, of, case = _kernel(item), _kernel(item, ("op", "name")), item.nodeid.partition("[")[2]
    begins = not zlib.crc32(f"{turn} {of}".encode()) % 3 or "float32" in kernel
    return [not begins, *(zlib.crc32(f"{turn} {each}".encode()) for each in (" ".join(kernel), case))]


WANTING = re.compile(r"could not import|No module named|not installed")


def _refused(report):
    """A skip for want of a package is a failure where `make test-integrations` has installed all of them."""
    reason = report.longrepr[2] if report.outcome == "skipped" and isinstance(report.longrepr, tuple) else ""
    if os.environ.get("OPGRAD_INTEGRATIONS") and WANTING.search(reason):
        report.outcome, report.longrepr = "failed", f"skipped for want of a package: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _refused((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return _refused((yield))


@pytest.fixture(autouse=True, scope="session")
def waiting_threads_of_sessions_sleep():
    """The same for the threads of onnxruntime's sessions: they took half of the time in which these are made."""
    if importlib.util.find_spec("onnxruntime") is None:
        yield
        return
    import onnxruntime

    make = onnxruntime.InferenceSession.__init__

    @functools.wraps(make)
    def sleeping(self, model, sess_options=None, *arguments, **named):
        options = onnxruntime.SessionOptions() if sess_options is None else sess_options
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        make(self, model, options, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime.InferenceSession, "__init__", sleeping)
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_waits_for_the_disk():
    """A file is read as it was written long before it is on the disk, which only a loss of power would show. Tests of
    crashes spent two fifths of their time on that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True)
def plans_of_its_own(request):
    """A test that patches something shares no plans with others, since plans may depend on what it patches."""
    if "monkeypatch" not in request.fixturenames:
        yield
        return
    plans.PLANS.values.clear()
    yield
    plans.PLANS.values.clear()


@pytest.fixture(params=operators().values(), ids=lambda op: op.name)
def op(request):
    """Every declared operator."""
    return request.param


@pytest.fixture(params=FLOATS)
def dtype(request):
    """Every floating dtype, by name."""
    return request.param


@pytest.fixture
def rng(request):
    """Random numbers that depend on the test's name alone."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def threads():
    """threads(compute): the arrays that a function returns, of the same bits in two threads and in one, or in as many
    as are named. The number of threads is left as it was."""
    before = opgrad.get_num_threads()

    def same(compute, counts=(2, 1)):
        found = []
        for count in counts:
            opgrad.set_num_threads(count)
            results = compute()
            found.append(results if isinstance(results, tuple | list) else (results,))
        expected = [each.tobytes() for each in found[0]]
        assert all([each.tobytes() for each in others] == expected for others in found[1:])
        return found[0]

    yield same
    opgrad.set_num_threads(before)
