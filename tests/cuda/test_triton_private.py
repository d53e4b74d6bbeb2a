"""The private names of Triton: all are there; what is missing costs speed or a feature, with one warning."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="needs Triton")

import triton

from opgrad.cuda import execute, triton_private


@pytest.fixture(autouse=True)
def afresh():
    """Nothing has been warned of."""
    triton_private._warn.cache_clear()
    yield
    triton_private._warn.cache_clear()


def test_no_name_is_missing():
    assert triton_private.missing() == []
    # A driver has its names when it is made, which needs a device: they are looked for where it is written.
    classes = [each for each in triton.backends.backends["nvidia"].driver.__mro__ if "triton" in each.__module__]
    source = "".join(Path(inspect.getfile(each)).read_text(encoding="utf-8") for each in classes)
    for name in triton_private.OF_DRIVERS:
        assert name.rpartition(".")[2] in source, name


def without(monkeypatch, **parts):
    monkeypatch.setattr(triton_private, "triton", SimpleNamespace(__version__="9.9", **parts))


def test_without_the_knobs_the_variable_says_whether_kernels_are_interpreted(monkeypatch):
    without(monkeypatch)
    for value, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert triton_private.is_interpreting() is expected


def test_without_a_way_to_launch_triton_dispatches(monkeypatch):
    without(monkeypatch)
    with pytest.warns(RuntimeWarning, match="Triton 9.9 is unknown: each call of a CUDA kernel takes"):
        assert triton_private.launcher(object(), (), (1, 1, 1), {}) is None


def test_an_error_of_the_compiler_is_not_taken_for_a_missing_name(monkeypatch):
    def fails(*values, **options):
        raise TypeError("an operand of a kernel")

    with pytest.raises(TypeError, match="an operand of a kernel"):
        triton_private.launcher(SimpleNamespace(warmup=fails), (), (1, 1, 1), {})


def test_hooks_of_triton_see_launches(monkeypatch):
    """Past them only where nobody has hooked in."""
    calls = []

    class Kernel:
        function, packed_metadata = 1, 2

        def run(self, *given):
            calls.append(given)

        def __getitem__(self, grid):
            return lambda *given, stream: calls.append(("hooked", *given))

    launch = triton_private._launch(Kernel(), (3, 1, 1))
    launch(7, 8, stream=5)
    assert calls.pop() == (3, 1, 1, 5, 1, 2, None, None, None, 7, 8)
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    launch(7, 8, stream=5)
    assert calls.pop() == ("hooked", 7, 8)


@pytest.mark.parametrize("names", [{}, {"get_current_device": lambda _: 0}], ids=["nothing", "a device"])
def test_a_driver_that_does_not_tell_is_warned_of(monkeypatch, names):
    driver = type("Driver", (), names)()
    without(monkeypatch, runtime=SimpleNamespace(driver=SimpleNamespace(active=driver)))
    with pytest.warns(RuntimeWarning, match="plans of CUDA kernels are those for an H200"):
        assert execute.device() == execute.Device()


def test_what_compiling_without_a_device_needs_is_named(monkeypatch):
    monkeypatch.setattr(triton_private, "missing", lambda: ["compiler.ASTSource"])
    with pytest.raises(RuntimeError, match=r"^opgrad.cuda: Triton .* has no compiler.ASTSource"):
        triton_private.compiled_for(90, object(), (), {})
