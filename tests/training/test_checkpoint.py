"""Reading checkpoints: good, foreign, truncated and damaged ones."""

import json
import re
import shutil

import flatbuffers
import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES, SETS
from checkpoint_tables import CHECKPOINTS, tables
from onnx import numpy_helper

import opgrad.training
from opgrad.base.files import replace_file
from opgrad.training import Checkpoint, read_checkpoint
from opgrad.training.files import checkpoint_tables

DTYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")


@pytest.mark.parametrize("name", SETS)
def test_checkpoint_holds_the_parameters_of_the_forward_graph(name):
    forward = onnx.load(EXAMPLES / name / "forward.onnx").graph
    expected = {tensor.name: numpy_helper.to_array(tensor) for tensor in forward.initializer}
    checkpoint = read_checkpoint(EXAMPLES / name / "checkpoint")
    assert not checkpoint.frozen
    assert not checkpoint.optimizers
    assert not checkpoint.properties
    assert expected.keys() - checkpoint.trainable.keys() <= {"scale"}
    for key, array in checkpoint.trainable.items():
        np.testing.assert_array_equal(array, expected[key], strict=True)


@pytest.mark.parametrize(("name", "moments"), [("linear", 2), ("sgd", 1)])
def test_checkpoint_with_optimizer_state_and_properties(name, moments):
    checkpoint, expected = read_checkpoint(CHECKPOINTS / name), tables(CHECKPOINTS / name)
    np.testing.assert_array_equal(checkpoint.frozen["scale"], np.array([1, 2], np.float32), strict=True)
    assert {key: array.shape for key, array in checkpoint.trainable.items()} == {"weight": (3, 2), "bias": (2,)}
    for tensor in expected["module_state"]["requires_grad_params"]:
        assert checkpoint.trainable[tensor["name"]].tobytes() == tensor["raw_data"]
    group = checkpoint.optimizers["group0"]
    assert (group.step, group.learning_rate) == (3, float(np.float32(0.001)))
    for state in expected["optimizer_groups"][0]["optimizer_states"]:
        found = group.moments[state["param_name"]]
        assert list(found) == [f"momentum{index}" for index in range(moments)]
        for tensor in state["momentums"]:
            assert found[tensor["name"]].tobytes() == tensor["raw_data"]
            assert found[tensor["name"]].shape == tuple(tensor["dims"])
    floats = {"best": float(np.float32(0.1))}
    assert checkpoint.properties == {"epoch": 3, "neg": -(2**62), "x": 0, "note": "fine \u2013 ok"} | floats


@pytest.mark.parametrize("name", ["dtypes", "outside"])
def test_checkpoint_of_every_dtype_inside_and_outside(name):
    checkpoint = read_checkpoint(CHECKPOINTS / name)
    parameters = [checkpoint.parameters[prefix + dtype] for prefix in ("", "f") for dtype in DTYPES]
    for array, dtype in zip(parameters, DTYPES * 2, strict=True):
        np.testing.assert_array_equal(array, np.arange(3).astype(dtype), strict=True)
        assert array.flags.aligned
        assert not array.flags.writeable
    np.testing.assert_array_equal(checkpoint.trainable["scalar"], np.array(7, np.float32), strict=True)
    assert checkpoint.trainable["none"].shape == (0, 3)
    np.testing.assert_array_equal(checkpoint.trainable["größe/ø.重み"], np.array([np.nan, 0, np.inf], np.float32))
    group = checkpoint.optimizers["group0"]
    assert group.step == 2**40
    np.testing.assert_array_equal(group.moments["int64"]["momentum1"], np.array([0, 2, 4]), strict=True)
    assert checkpoint.properties["i"] == -(2**63)
    assert checkpoint.properties["empty"] == ""


def test_nominal_checkpoint_has_names_without_values():
    checkpoint = read_checkpoint(CHECKPOINTS / "nominal")
    assert checkpoint.nominal
    assert (list(checkpoint.trainable), list(checkpoint.frozen)) == (["weight", "bias"], ["scale"])
    assert all(array.shape == (0,) and array.dtype == np.float32 for array in checkpoint.parameters.values())


def refused(path, message, error=ValueError):
    with pytest.raises(error, match=message):
        read_checkpoint(path)


def checkpoint_of(folder, tensor, frozen=False, version=2):
    """A checkpoint with this tensor as its only parameter; frozen: as a frozen one, too."""
    values = {"name": "w", "dims": [2], "element_type": 1, "data": np.ones(2, np.float32)} | tensor
    model = {"trainable": [values], "frozen": [values] * frozen}
    replace_file(folder / "odd", checkpoint_tables.contents({"version": version, "model": model}))
    return folder / "odd"


def test_checkpoint_that_names_a_parameter_twice_or_has_another_version(tmp_path):
    refused(checkpoint_of(tmp_path, {}, frozen=True), "names a parameter twice, 'w'")
    refused(checkpoint_of(tmp_path, {}, version=3), "odd has version 3, expected 2")


def test_missing_files_are_named(tmp_path):
    refused(tmp_path / "nothing", r"read_checkpoint: there is no file .*nothing", FileNotFoundError)
    shutil.copy(CHECKPOINTS / "outside", tmp_path)
    refused(tmp_path / "outside", r"read_checkpoint: .*outside\.data, which is missing", FileNotFoundError)


def test_foreign_files_are_no_checkpoints(tmp_path):
    path = tmp_path / "checkpoint"
    for content in (b"", b"text", b"x" * 1000, (EXAMPLES / "digits" / "eval_model.onnx").read_bytes()):
        path.write_bytes(content)
        refused(path, "no checkpoint, expected the identifier ODTC")


# --- truncated and damaged files ---


def attempt(path, content):
    """What is read from a file with this content; None where that is refused with the one message."""
    path.unlink(missing_ok=True)  # a new file: to shorten one and write it again takes ext4 some milliseconds
    path.write_bytes(content)
    try:
        return read_checkpoint(path)
    except ValueError as error:
        if not str(error).startswith(f"read_checkpoint: {path} "):
            raise
        return None


def same(a, b):
    def values(checkpoint):
        moments = [
            (name, array)
            for group in checkpoint.optimizers.values()
            for arrays in group.moments.values()
            for name, array in arrays.items()
        ]
        arrays = (*checkpoint.trainable.items(), *checkpoint.frozen.items(), *moments)
        return [(name, array.dtype, array.shape, array.tobytes()) for name, array in arrays]

    return values(a) == values(b)


@pytest.mark.parametrize("name", ["linear", "sgd", "nominal"])
def test_truncated_checkpoints_are_refused(name, tmp_path):
    content, whole = (CHECKPOINTS / name).read_bytes(), read_checkpoint(CHECKPOINTS / name)
    for size in range(len(content)):
        found = attempt(tmp_path / "checkpoint", content[:size])
        assert found is None or (size >= len(content) - 8 and same(found, whole))  # the last bytes only pad


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [2**70, 0], [0] * 40])
def test_weights_of_a_shape_that_no_array_has(shape, tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "weights").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(tmp_path / "weights", r"^read_checkpoint: .*weights is damaged, .*'w'")


def test_truncated_values_are_refused(tmp_path):
    shutil.copy(CHECKPOINTS / "outside", tmp_path / "checkpoint")
    content = (CHECKPOINTS / "outside.data").read_bytes()
    for size in range(len(content)):
        (tmp_path / "checkpoint.data").write_bytes(content[:size])
        refused(tmp_path / "checkpoint", rf"beside it, which has {size} bytes")


def damaged(content, width, change):
    """The content with one of its numbers of `width` bytes changed, for each of them."""
    for place in range(0, len(content), width):
        number = int.from_bytes(content[place : place + width], "little") ^ change
        yield content[:place] + number.to_bytes(width, "little") + content[place + width :]


@pytest.mark.parametrize("name", ["linear", "nominal", "small"])
def test_a_damaged_checkpoint_is_refused_or_harmless(name, tmp_path):
    """Whatever byte is wrong, nothing but the described errors is raised."""
    path = tmp_path / "checkpoint"
    parameters = {"weight": np.ones((2, 3), np.float32)}
    opgrad.training.write_checkpoint(Checkpoint(parameters, {}), path, external_data=True)
    content = path.read_bytes() if name == "small" else (CHECKPOINTS / name).read_bytes()
    refused = 0
    for change in (0x01, 0x80, 0xFF):
        for wrong in damaged(content, 1, change):
            refused += attempt(path, wrong) is None
    assert refused > len(content)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"dims": [3]}, "'w' has shape (3,) and 8 bytes of float32"),
        ({"dims": [-1, -2]}, "'w' has shape (-1, -2)"),
        ({"dims": [1] * 33}, "'w' has shape (1, 1, "),
        ({"dims": [2**62, 2**62, 0], "data": np.empty(0, np.uint8)}, "'w' has shape (4611686018427387904, "),
        ({"element_type": 8}, "'w' has the unknown element type 8"),
        ({"element_type": 9, "dims": [8]}, "'w' has bytes that are no bool"),
        ({"data": None}, "'w' has no values"),
        ({"data": None, "offset": 8}, "'w' at bytes 8 to 16 of the file beside it, which has 0 bytes"),
        ({"data": None, "offset": 2**62}, "'w' at bytes 4611686018427387904 to "),
        ({"dims": None}, "lacks its dims"),
        ({"name": None}, "lacks its name"),
    ],
)
def test_a_tensor_that_makes_no_sense_is_refused(tensor, message, tmp_path):
    refused(checkpoint_of(tmp_path, tensor), f"read_checkpoint: .*odd.*{re.escape(message)}")


def test_the_same_table_again_and_again_is_refused_at_once(tmp_path):
    """Vectors of references to one table, three levels deep: 8e9 tables in 24 kB."""
    builder = flatbuffers.Builder()

    def table(*fields):
        builder.StartObject(5)
        for index, place in fields:
            builder.PrependUOffsetTRelativeSlot(index, place, 0)
        return builder.EndObject()

    def vector(place, count):
        builder.StartVector(4, count, 4)
        for _ in range(count):
            builder.PrependUOffsetTRelative(place)
        return builder.EndVector()

    name, dims = builder.CreateString("n"), builder.CreateNumpyVector(np.zeros(0, np.int64))
    groups = table((0, name), (2, dims))
    for index in (1, 3, 2):
        groups = vector(groups, 2000)
        if index != 2:
            groups = table((0, name), (index, groups))
    nothing = vector(0, 0)
    model = table((0, nothing), (1, nothing))
    builder.StartObject(4)
    builder.PrependInt32Slot(0, 2, 0)
    builder.PrependUOffsetTRelativeSlot(1, model, 0)
    builder.PrependUOffsetTRelativeSlot(2, groups, 0)
    builder.Finish(builder.EndObject(), b"ODTC")
    (tmp_path / "checkpoint").write_bytes(builder.Output())
    refused(tmp_path / "checkpoint", "refers to the same bytes several times")
