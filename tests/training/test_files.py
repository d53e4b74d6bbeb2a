"""Files of data that nobody vouches for: text in every spelling, and headers that promise what is not there."""

import io
import os
import signal
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.external_data_helper import set_external_data
from small_models import build

from bench import figures
from opgrad.gradients import gradients
from opgrad.onnx.graph.loading import read_model
from opgrad.onnxruntime import InferenceSession
from opgrad.onnxruntime.loading import open_session
from opgrad.onnxruntime.runners import lower_file
from opgrad.training import TensorSpec, read_checkpoint
from opgrad.training.files.dataset import load_file
from opgrad.training.onnxblock import custom_op_library
from opgrad.training.run.recipe import Recipe
from opgrad.training.run.state import Resumption

INPUTS = (
    TensorSpec("pixels", np.dtype(np.float32), ("batch", 2)),
    TensorSpec("labels", np.dtype(np.int64), ("batch",)),
)
ROWS = [(1.5, 2.0, 0), (3.0, 4.5, 1)]


def text(delimiter=",", end="\n", header=""):
    lines = [delimiter.join(map(str, row)) for row in ROWS]
    return end.join([*([header] if header else []), *lines]) + end


def npy(shape, dtype="<f8", content=b""):
    """An .npy file with this header."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + content


@pytest.mark.parametrize(
    "content",
    [
        text().encode("utf-8-sig"),
        text(header="a,b,label").encode("utf-8-sig"),
        text("\t", "\r\n", "a\tb\tlabel").encode("utf-16"),
        b"\xfe\xff" + text().encode("utf-16-be"),
        text(";").encode(),
        text("\t").encode(),
        text(", ").encode(),
        text(";", header='"a,b";"c";"label"').encode(),
        text(end="\r\n", header="a,b,label").encode(),
        text(end="\r").encode(),
        text(header="\n  \n# made by hand\na,b,label\n").encode(),
        text(end="\n\n").encode(),
        text().strip().encode(),
        text().replace("1.5", '"1.5"').encode(),
    ],
    ids=lambda content: repr(content)[:30],
)
def test_csv_in_every_spelling_keeps_all_rows(tmp_path, content):
    (tmp_path / "data.csv").write_bytes(content)
    data = load_file(tmp_path / "data.csv", INPUTS)
    np.testing.assert_array_equal(data.arrays["pixels"], np.array([row[:2] for row in ROWS], np.float32))
    np.testing.assert_array_equal(data.arrays["labels"], [0, 1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no rows"),
        (b"\n\n", "it has no rows"),
        (b"a,b,label\n", "it has no rows"),
        (b"1.5,?,0\n3,4,1\n", r"line 1 has '\?', expected numbers, or names alone in the first"),
        (b"1.5,,0\n3,4,1\n", "line 1 has '', expected numbers"),
        (b"a,b,c\nx,y,z\n1,2,3\n", "line 2 has 'x', expected numbers"),
        (b"1,2,3\n4,5\n", "number of columns changed from 3 to 2"),
        (b"1,5;2,5;0\n", "line 1 has '1,5'"),
        (bytes(range(256)), "no text in UTF-8"),
        (b"1,2,3\n\xff\xff,1,2\n", "no text in UTF-8"),
        (text().encode("utf-16-le"), "no text in UTF-8"),
        (text().encode("utf-32"), "no text in UTF-8"),
    ],
)
def test_csv_that_is_no_table(tmp_path, content, message):
    path = tmp_path / "data.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_file(path, INPUTS)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy((1 << 50,)), "it claims shape"),
        (npy((1 << 62, 1 << 62)), "it claims shape"),
        (npy((-1, 3), content=bytes(48)), r"it claims shape \(-1, 3\)"),
        (npy((3, 3), content=bytes(71)), r"it claims shape \(3, 3\) of float64, and 71 bytes follow"),
        (npy("(" * 4000), "no array in NumPy's format, or damaged"),
        (npy("()", dtype=""), "no array in NumPy's format|expected rows of values and a label"),
        (b"\x93NUMPY\x01\x00\xff\xff", "no array in NumPy's format, or damaged"),
        (b"\x93NUMPY\x09\x00", "no array in NumPy's format, or damaged"),
        (npy((1,), dtype="|O"), "has dtype object, expected numbers"),
        (npy((1 << 50,), dtype="<U0"), "has dtype <U0, expected numbers"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["npy", "npz"])
def test_headers_that_claim_what_is_not_there(tmp_path, packed, content, message):
    path = tmp_path / f"data.{'npz' if packed else 'npy'}"
    if packed:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", content)
            archive.writestr("y.npy", npy((0,)))
    else:
        path.write_bytes(content)
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        load_file(path, INPUTS)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_npz_that_are_damaged_anywhere(tmp_path, rng):
    """A byte changed, or the end cut off: what is not found out is read, all else is one sentence."""
    path, made = tmp_path / "data.npz", io.BytesIO()
    np.savez_compressed(made, x=np.ones((2, 2)), y=np.zeros(2, int))
    for _ in range(300):
        content = bytearray(made.getvalue())
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(content[: rng.integers(len(content))] if rng.random() < 0.2 else content)
        try:
            load_file(path, INPUTS)
        except (ValueError, TypeError) as error:
            assert str(error).startswith(str(path))  # noqa: PT017


def test_npz_members_that_claim_more_than_they_can_hold(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((2, 2)), y=np.zeros(2, int))
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = (1 << 31).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x claims 2147483648 bytes in \d+, more than can be packed there"):
        load_file(path, INPUTS)


READERS = {
    "checkpoint": read_checkpoint,
    "resume": Resumption.read,
    "recipe": lambda path: Recipe.load(path.parent),
    "model": lambda path: read_model(path, "test"),
    "gradients": lambda path: gradients(path, "y", "x"),
    "lower": lambda path: lower_file(path, path.with_name("out.onnx")),
    "session": InferenceSession,
    "stock": lambda path: open_session(path, onnxruntime.SessionOptions(), "test", stock=True),
    "library": lambda path: custom_op_library(path).__enter__(),
    "result": figures.read,
    "outside": lambda path: read_model(outside(path), "test"),
}


def outside(path):
    """A model that keeps a tensor in this file."""
    model = build("g (float[2] x) => (float[2] y) { y = Add(x, w) }", {"w": np.ones(2, np.float32)})
    set_external_data(model.graph.initializer[0], path.name)
    model.graph.initializer[0].ClearField("raw_data")
    onnx.save(model, path.with_name("model.onnx"))
    return path.with_name("model.onnx")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("reader", READERS)
def test_nothing_waits_for_a_pipe(tmp_path, reader):
    """What opens a pipe waits for a writer; an alarm ends the test that does."""
    path = tmp_path / ("recipe.toml" if reader == "recipe" else "file")
    os.mkfifo(path)
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(60)
    try:
        with pytest.raises(ValueError, match="no regular file"):
            READERS[reader](path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _late(*_):
    raise AssertionError("it waits for the pipe")


def test_nothing_reads_a_device():
    for device in ("/dev/zero", "/dev/full"):
        if Path(device).exists():
            for reader in ("checkpoint", "resume", "model", "session", "result"):
                with pytest.raises(ValueError, match=f"{device}: it is no regular file"):
                    READERS[reader](Path(device))


def test_values_that_the_division_takes_out_of_float32(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.array([[1.0, 1.0], [1e30, 1.0]]), y=np.zeros(2, int))
    with pytest.raises(ValueError, match="divided by 1e-20, has no finite number in row 1"):
        load_file(tmp_path / "data.npz", INPUTS, {INPUTS[0].name: 1e-20})


def test_a_row_of_a_table_is_named_by_its_line(tmp_path):
    """Names, comments and empty lines count, as an editor counts them."""
    (tmp_path / "data.csv").write_text("a,b,label\n1,2,0\n\n# more\n1,nan,1\n1,2,0\n")
    with pytest.raises(ValueError, match="has no finite number in line 5, expected"):
        load_file(tmp_path / "data.csv", INPUTS)
