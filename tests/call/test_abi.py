"""Layouts of our structures and of foreign objects: the same for Python and compiled code, tried against live ones."""

import ctypes
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from callers import functions_met, is_native
from planned import softmax_plan
from subprocesses import run_python

import opgrad
from opgrad.call import arrays
from opgrad.cpu.compiler import sources
from opgrad.cpu.compiler.decorators import native
from opgrad.cpu.compiler.words import Structure, at, atomic_add, behind, load_word, place, several, structure
from opgrad.cpu.runtime import abi
from opgrad.cpu.runtime import plan as plan_words
from opgrad.cpu.runtime.system import system
from opgrad.ops import operators

X = np.linspace(-1, 1, 600, dtype=np.float32).reshape(2, 300)
# What is said of each layout, and others that may be wrong together with it.
PLACES = {
    "TYPE": abi.OBJECTS,
    "VALUE": abi.FLOATS,
    "SIZE": abi.TUPLES,
    "TUPLE_ITEMS": abi.TUPLES,
    "LIST_ITEMS": abi.LISTS,
    **dict.fromkeys(("DATA", "RANK", "SHAPE", "STRIDES", "DTYPE", "FLAGS"), abi.ARRAYS),
    "OWN_WORDS": abi.CALLS,
}
OTHERS = {  # in place of what is known
    "WRITEABLE": (abi.ARRAYS, 0x100),
    "COUNT": (abi.CALLS, (1 << 64) - 1),
    "HAVE_VECTORCALL": (abi.CALLS, 0),
    "VERSIONS": (abi.NUMPY_FUNCTIONS, (1, 2)),
    "ARRAY_TYPE": (abi.NUMPY_FUNCTIONS, 1),
}
LIES = [(name, layout, getattr(abi, name) + by) for name, layout in PLACES.items() for by in (-8, 8, 16, 1 << 20, -64)]
LIES += [(name, layout, value) for name, (layout, value) in OTHERS.items()]


@pytest.fixture
def anew():
    """Layouts are tried again, here and behind the test."""
    abi.unlike.cache_clear()
    yield
    abi.unlike.cache_clear()


@pytest.mark.skipif(not abi.SUPPORTED, reason="this Python has no native calls")
def test_what_is_known_holds_here(anew):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not abi.unlike()


@pytest.mark.skipif(not abi.SUPPORTED, reason="this Python has no native calls")
@pytest.mark.parametrize(("name", "layout", "value"), LIES)
def test_every_lie_is_found(name, layout, value, monkeypatch, anew):
    """Places inside and outside of objects, so that reading them blindly would end the process."""
    monkeypatch.setattr(abi, name, value)
    with pytest.warns(RuntimeWarning, match=f"opgrad: .*{layout[:8]}.* do not lie in memory as they are known"):
        assert layout in abi.unlike()


@pytest.mark.skipif(not abi.SUPPORTED, reason="this Python has no native calls")
def test_what_cannot_be_tried_is_not_used(monkeypatch, anew):
    monkeypatch.setitem(abi.TRIALS, abi.FLOATS, lambda: None.missing)
    with pytest.warns(RuntimeWarning, match="opgrad: floats of cpython"):
        assert abi.unlike() == {abi.FLOATS}


@pytest.mark.skipif(not abi.SUPPORTED, reason="this Python has no native calls")
@pytest.mark.parametrize("layout", abi.TRIALS)
def test_calls_are_pythons_then(layout, monkeypatch, anew):
    """With the same results, and one warning: functions, plans, lists, results from the pool."""
    monkeypatch.setitem(abi.TRIALS, layout, lambda: False)
    softmax = arrays.dispatcher(operators()["softmax"])
    wide = np.linspace(-1, 1, 1 << 17, dtype=np.float32).reshape(2, -1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = opgrad.plan(opgrad.relu, X, out=np.empty_like(X))
        for _ in range(4):
            np.testing.assert_array_equal(softmax(X), opgrad.softmax(X))
            np.testing.assert_array_equal(softmax(wide), opgrad.softmax(wide))
            np.testing.assert_array_equal(plan(X, out=np.empty_like(X)), np.maximum(X, 0))
            np.testing.assert_allclose(softmax(X, post_ops=[opgrad.post_ops.add(X)]), opgrad.softmax(X) + X, 1e-5)
            with pytest.raises(ValueError, match="overlaps"):
                softmax(X[:, :200], out=X[:, 50:250])
    assert [each.category for each in caught if "opgrad" in str(each.message)] == [RuntimeWarning]
    assert functions_met(softmax, X)
    assert not is_native(plan, X, out=np.empty_like(X))


CALLS = """
import warnings
import numpy as np
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import opgrad
    x = np.linspace(-1, 1, 600, dtype=np.float32).reshape(2, 300)
    out = np.empty_like(x)
    for _ in range(4):
        assert (opgrad.relu(x) == np.maximum(x, 0)).all()
        assert opgrad.relu(x, out=out) is out and (out == np.maximum(x, 0)).all()
        assert opgrad.leaky_relu(x, 0.5).min() == -0.5
from opgrad.cpu.runtime import abi
print(opgrad.__file__, len(caught), sorted(abi.unlike()) == sorted(set(abi.TRIALS) - {abi.NUMPY_FUNCTIONS, abi.CALLS}))
"""


@pytest.mark.skipif(not abi.SUPPORTED, reason="this Python has no native calls")
def test_native_code_that_was_made_for_other_objects(tmp_path):
    """A copy of the package that knows every place wrongly."""
    package = tmp_path / "opgrad"
    shutil.copytree(Path(opgrad.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / Path(abi.__file__).relative_to(Path(opgrad.__file__).parent)
    source = path.read_text(encoding="utf-8")
    wrong = source.replace("HEADER: Final = object.__basicsize__", "HEADER: Final = object.__basicsize__ + 8")
    wrong = wrong.replace("PLAIN_HEADER = 16", "PLAIN_HEADER = 24")
    wrong = wrong.replace("TUPLE_ITEMS: Final = tuple.__basicsize__", "TUPLE_ITEMS: Final = tuple.__basicsize__ + 8")
    assert wrong.count("+ 8") == source.count("+ 8") + 2
    path.write_text(wrong, encoding="utf-8")
    found, warned, as_wanted = run_python(CALLS, PYTHONPATH=str(tmp_path)).split()
    assert (found, warned, as_wanted) == (str(package / "__init__.py"), "1", "True")


@pytest.mark.skipif(not abi.SUPPORTED, reason="this Python has no native calls")
def test_memory_that_is_not_there():
    """It is copied where it is, and refused where it is not."""
    here = np.arange(5)
    assert system().copy_of(here.ctypes.data, here.nbytes) == here.tobytes()
    for address in (0, 8, -8, 1 << 46, (1 << 63) - 1):
        assert system().copy_of(address, 16) is None


# --- what lies on the stack ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not abi.SUPPORTED, reason="this Python has no native calls")
def test_a_kernel_with_more_arguments_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(plan_words, "MAX_ARGUMENTS", 5)
    with pytest.raises(RuntimeError, match=r"a kernel takes \d+ words of arguments, expected at most 5"):
        softmax_plan((3, 7), "float32")


@structure
class Count(Structure):
    first: int
    second: int
    third: int


@native(2)
def compiled(address: int, more: int) -> int:
    """Read and write fields of two structures that lie one behind the other."""
    one, other = at(Count, address), at(Count, address, 1)
    one.first += more
    other.third = one.second - other.first
    atomic_add(place(one, "third"), 7)
    return load_word(behind(one), 1) + (other.address - one.address)


def test_python_and_compiled_code_agree():
    pair = several(Count, [Count(1, 2, 3), Count(second=50, first=40)])
    address = ctypes.addressof(pair)
    assert compiled.call(address, 10) == 50 + 24
    assert [each.words for each in pair] == [[11, 2, 10], [40, 50, -38]]
    assert behind(pair[0]) == pair[1].address == at(Count, address, 1).address
    assert place(pair[1], "second") == pair[1].address + 8


def test_a_field_is_part_of_what_code_is_made_of():
    """Code that was compiled for other fields is not found in the cache."""
    assert "('first', 'second', 'third')" in sources._annotation(Count)
