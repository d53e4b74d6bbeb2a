"""Writing checkpoints: the tables, every dtype, values outside, errors, and what a crash leaves."""

import hashlib
import os
import shutil
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from itertools import count
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_tables import CHECKPOINTS, tables

from opgrad.base.files import alone
from opgrad.training import Checkpoint, read_checkpoint, write_checkpoint
from opgrad.training.files import checkpoint_tables
from opgrad.training.files.checkpoint import OptimizerGroup

DTYPES = [*checkpoint_tables.ELEMENT_TYPES.values()]


def parameters(seed, rows=5):
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal((rows, 3)).astype(np.float32) for name in ("weight", "größe/ø.重み")}


def sample(seed=0, rows=5):
    """A checkpoint with something of everything."""
    trainable = parameters(seed, rows)
    moments = {name: {"momentum0": array + 1, "momentum1": array - 1} for name, array in trainable.items()}
    frozen = {"none": np.empty((0, 3), np.float64), "scalar": np.array(seed), "bits": np.array([True, False])}
    properties = {"epoch": seed, "least": -(2**63), "loss": 0.1, "note": "größe", "": ""}
    return Checkpoint(trainable, frozen, {"group0": OptimizerGroup(seed, 0.001, moments)}, properties)


def assert_equal(found, expected):
    for actual, wanted in ((found.trainable, expected.trainable), (found.frozen, expected.frozen)):
        assert list(actual) == list(wanted)
        for name, array in wanted.items():
            np.testing.assert_array_equal(actual[name], array, strict=True)
    assert list(found.optimizers) == list(expected.optimizers)
    for name, group in expected.optimizers.items():
        actual = found.optimizers[name]
        assert (actual.step, actual.learning_rate) == (group.step, float(np.float32(group.learning_rate)))
        assert {key: list(arrays) for key, arrays in actual.moments.items()} == {
            key: list(arrays) for key, arrays in group.moments.items()
        }
        for key, arrays in group.moments.items():
            for moment, array in arrays.items():
                np.testing.assert_array_equal(actual.moments[key][moment], array, strict=True)
    rounded = {
        key: float(np.float32(each)) if isinstance(each, float) else each for key, each in expected.properties.items()
    }
    assert found.properties == rounded
    assert found.nominal == expected.nominal


# --- what is in the file ---


@pytest.mark.parametrize("name", ["linear", "sgd", "nominal", "dtypes"])
def test_the_tables_are_those_of_onnxruntime_training(name, tmp_path):
    write_checkpoint(read_checkpoint(CHECKPOINTS / name), tmp_path / "ours")
    ours, theirs = tables(tmp_path / "ours"), tables(CHECKPOINTS / name)
    if name == "nominal":
        theirs["optimizer_groups"] = []  # its generator leaves it out, its API writes it
    assert repr(ours) == repr(theirs)  # repr, as a property is NaN
    assert list(tmp_path.iterdir()) == [tmp_path / "ours"]


def test_values_outside_are_where_onnxruntime_training_looks(tmp_path):
    write_checkpoint(read_checkpoint(CHECKPOINTS / "outside"), tmp_path / "ours", external_data=True)
    ours, theirs = tables(tmp_path / "ours")["module_state"], tables(CHECKPOINTS / "outside")["module_state"]
    assert ours["has_external_data"]
    assert sorted(os.listdir(tmp_path)) == ["ours", "ours.data"]
    content, their_content = (
        (folder).read_bytes() for folder in (tmp_path / "ours.data", CHECKPOINTS / "outside.data")
    )
    for kind in ("requires_grad_params", "frozen_params"):
        assert [each["name"] for each in ours[kind]] == [each["name"] for each in theirs[kind]]
        for mine, other in zip(ours[kind], theirs[kind], strict=True):
            assert (mine["dims"], mine["data_type"]) == (other["dims"], other["data_type"])
            start, their_start = mine.get("external_data_offset", 0), other["external_data_offset"]
            length = int(np.prod(mine["dims"])) * checkpoint_tables.ELEMENT_TYPES[mine["data_type"]].itemsize
            assert start % 8 == 0
            assert content[start : start + length] == their_content[their_start : their_start + length]


@pytest.mark.parametrize("external_data", [None, True, False])
@pytest.mark.parametrize("checkpoint", [sample(), Checkpoint({}, {}), Checkpoint(parameters(1), {})])
def test_what_is_written_is_read(checkpoint, external_data, tmp_path):
    write_checkpoint(checkpoint, tmp_path / "checkpoint", external_data=external_data)
    assert_equal(read_checkpoint(tmp_path / "checkpoint"), checkpoint)
    assert (tmp_path / "checkpoint.data").exists() == bool(external_data)


@pytest.mark.parametrize("external_data", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_every_layout(dtype, external_data, tmp_path):
    array = np.arange(24).astype(dtype).reshape(4, 6)
    layouts = {"C": array, "F": np.asfortranarray(array), "steps": array[::2, ::-3], "one": array[:1, 0], "T": array.T}
    if dtype.type is not ml_dtypes.bfloat16:
        layouts["big"] = array.astype(dtype.newbyteorder(">"))
    write_checkpoint(Checkpoint(layouts, {}), tmp_path / "checkpoint", external_data=external_data)
    for name, found in read_checkpoint(tmp_path / "checkpoint").trainable.items():
        np.testing.assert_array_equal(found, layouts[name].astype(dtype), strict=True)
        assert found.flags.aligned


def test_values_that_do_not_fit_go_outside(tmp_path, monkeypatch):
    checkpoint = sample(rows=1000)
    monkeypatch.setattr(checkpoint_tables, "LARGEST", 10000)
    write_checkpoint(checkpoint, tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint.data").exists()
    assert_equal(read_checkpoint(tmp_path / "checkpoint"), checkpoint)
    with pytest.raises(ValueError, match=r"write_checkpoint: .* needs \d+ bytes, expected at most 10000"):
        write_checkpoint(checkpoint, tmp_path / "checkpoint", external_data=False)


@pytest.mark.parametrize(("external_data", "most"), [(False, 1.1), (True, 0.1)])
def test_writing_takes_little_memory(external_data, most, tmp_path):
    checkpoint = Checkpoint({f"w{index}": np.ones(2**21, np.float32) for index in range(2)}, {})
    tracemalloc.start()
    try:
        write_checkpoint(checkpoint, tmp_path / "checkpoint", external_data=external_data)
        assert tracemalloc.get_traced_memory()[1] < most * 2**24
    finally:
        tracemalloc.stop()


# --- errors ---


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"trainable": {"w": [1.0]}}, TypeError, "'w' is list, expected a NumPy array"),
        ({"frozen": {"w": np.ones(2, complex)}}, TypeError, "'w' has dtype complex128, expected one of float32, "),
        ({"frozen": {"w": np.array(["a"])}}, TypeError, "'w' has dtype <U1, expected one of float32, "),
        ({"frozen": {1: np.ones(2)}}, TypeError, "name 1 is int, expected str"),
        ({"frozen": {"\ud800": np.ones(2)}}, ValueError, "name '\\ud800' cannot be encoded in UTF-8"),
        ({"trainable": {"w": np.ones(2)}, "frozen": {"w": np.ones(2)}}, ValueError, "'w' is both trainable and frozen"),
        ({"properties": {"p": None}}, TypeError, "property 'p' is NoneType, expected int, float or str"),
        ({"properties": {"p": b"x"}}, TypeError, "property 'p' is bytes, expected int, float or str"),
        ({"properties": {"p": 2**63}}, ValueError, "property 'p' is 9223372036854775808, which int64 cannot hold"),
        ({"properties": {"p": 1e39}}, ValueError, "property 'p' is 1e+39, which float32 cannot hold"),
        ({"optimizers": {"g": OptimizerGroup(0.5, 1)}}, TypeError, "step of 'g' is float, expected int"),
        ({"optimizers": {"g": OptimizerGroup(1, 10**400)}}, ValueError, "learning_rate of 'g' is 1000"),
        ({"optimizers": {"g": OptimizerGroup(1, "x")}}, TypeError, "learning_rate of 'g' is str"),
    ],
)
def test_what_a_checkpoint_cannot_hold(values, error, message, tmp_path):
    write_checkpoint(sample(), tmp_path / "checkpoint")
    with pytest.raises(error) as refusal:
        write_checkpoint(Checkpoint(**({"trainable": {}, "frozen": {}} | values)), tmp_path / "checkpoint")
    assert str(refusal.value).startswith("write_checkpoint: " + message)
    assert_equal(read_checkpoint(tmp_path / "checkpoint"), sample())


def test_places_where_no_file_can_be(tmp_path):
    with pytest.raises(FileNotFoundError, match="write_checkpoint: there is no folder"):
        write_checkpoint(sample(), tmp_path / "missing" / "checkpoint")
    with pytest.raises(IsADirectoryError, match=r"write_checkpoint: .* is a folder"):
        write_checkpoint(sample(), tmp_path)


# --- crashes ---


class Crash(BaseException):
    """What no part of the program handles."""


def crash_at(step, for_good, monkeypatch):
    """Raise Crash in the given one of the operations on files; `for_good` in all that follow, too, as if the power
    had gone, so that nothing is cleaned up."""
    steps = count()

    def crashing(operation, before):
        def run(*arguments, **options):
            result = None if before else operation(*arguments, **options)
            if (number := next(steps)) == step or (for_good and number > step):
                raise Crash
            return operation(*arguments, **options) if before else result

        return run

    for module, name in ((os, "replace"), (os, "fsync"), (os, "truncate"), (Path, "unlink")):
        for before in (True, False):
            monkeypatch.setattr(module, name, crashing(getattr(module, name), before))
    monkeypatch.setattr(checkpoint_tables, "raw", crashing(checkpoint_tables.raw, True))


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("sizes", [(5, 5, 5), (5, 4, 9), (9, 2, 2)])
@pytest.mark.parametrize(
    "external_data", [(True, True, True), (False, False, False), (False, True, True), (True, True, False)]
)
def test_a_crash_leaves_the_old_checkpoint_or_the_new_one(external_data, sizes, for_good, tmp_path):
    done = False
    for step in count():
        folder = tmp_path / str(step)
        folder.mkdir()
        path = folder / "checkpoint"
        old, new = sample(1, sizes[1]), sample(2, sizes[2])
        write_checkpoint(sample(0, sizes[0]), path, external_data=external_data[0])
        write_checkpoint(old, path, external_data=external_data[1])
        with pytest.MonkeyPatch.context() as patch:
            crash_at(step, for_good, patch)
            with suppress(Crash):
                write_checkpoint(new, path, external_data=external_data[2])
                done = True
        found = read_checkpoint(path)
        assert_equal(found, new if found.properties["epoch"] == 2 else old)
        assert done <= (found.properties["epoch"] == 2)
        if done:
            break
        write_checkpoint(new, path, external_data=external_data[2])
        assert_equal(read_checkpoint(path), new)
    assert step > 5


def test_an_error_of_the_disk_leaves_no_files_behind(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    for external_data in (False, True):
        write_checkpoint(sample(), tmp_path / "checkpoint", external_data=external_data)
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                write_checkpoint(sample(1), tmp_path / "checkpoint", external_data=external_data)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_each_checkpoint_has_one_file_with_its_values(tmp_path):
    path = tmp_path / "checkpoint"
    for seed in range(4):
        write_checkpoint(sample(seed), path, external_data=True)
        assert_equal(read_checkpoint(path), sample(seed))
        (file,) = {each.name for each in tmp_path.iterdir()} - {"checkpoint"}
        digest = hashlib.sha256((tmp_path / file).read_bytes()).hexdigest()
        assert file == (f"checkpoint.{digest[:16]}.data" if seed else "checkpoint.data")
    write_checkpoint(sample(0), path)
    assert os.listdir(tmp_path) == ["checkpoint"]
    (tmp_path / "checkpoint.data").write_text("not ours")
    write_checkpoint(sample(0), path)
    assert (tmp_path / "checkpoint.data").read_text() == "not ours"


# --- several processes ---

READER = """
import sys, time
from pathlib import Path
from opgrad.training import read_checkpoint
count = 0
while not Path(sys.argv[2]).exists():
    found = read_checkpoint(sys.argv[1])
    values = {float(value) for each in found.parameters.values() for value in (each[0], each[-1])}
    assert values == {float(found.properties["epoch"])}, (values, found.properties)
    count += 1
    print(count, flush=True)
"""


def large(value):
    """One whose values are mapped."""
    arrays = {name: np.full(1 << 19, value, np.float32) for name in ("a", "b")}
    return Checkpoint(arrays, {}, properties={"epoch": value})


def test_values_stay_as_they_are_for_their_readers(tmp_path):
    path = tmp_path / "checkpoint"
    write_checkpoint(large(1), path, external_data=True)
    held = read_checkpoint(path)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(path), str(tmp_path / "end")], stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "1\n"
    for value in range(2, 30):
        write_checkpoint(large(value), path, external_data=value % 5 != 0)
    (tmp_path / "end").touch()
    reader.communicate(timeout=60)
    assert reader.returncode == 0
    assert all((array == 1).all() for array in held.trainable.values())


def test_a_second_writer_is_told(tmp_path):
    path = tmp_path / "checkpoint"
    write_checkpoint(sample(1), path, external_data=True)
    before = sorted(os.listdir(tmp_path))
    with alone(path):
        for external_data in (False, True):
            with pytest.raises(OSError, match=r"checkpoint: another one is writing there, expected one at a time"):
                write_checkpoint(sample(2), path, external_data=external_data)
        assert_equal(read_checkpoint(path), sample(1))
    assert sorted(os.listdir(tmp_path)) == before
    write_checkpoint(sample(2), path, external_data=True)


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
def test_a_link_in_the_place_of_the_values_is_not_followed(kind, tmp_path):
    (tmp_path / "precious").write_text("somebody's")
    path = tmp_path / "checkpoint"
    for _ in range(2):
        getattr(tmp_path / "checkpoint.data", kind)(tmp_path / "precious")
        write_checkpoint(sample(), path, external_data=True)
        assert (tmp_path / "precious").read_text() == "somebody's"
        assert_equal(read_checkpoint(path), sample())
        (tmp_path / "checkpoint.data").unlink()
    shutil.copy(CHECKPOINTS / "outside", path)
    (tmp_path / "checkpoint.data").symlink_to(CHECKPOINTS / "outside.data")
    with pytest.raises(ValueError, match=r"read_checkpoint: .*checkpoint.data: it is no regular file"):
        read_checkpoint(path)
