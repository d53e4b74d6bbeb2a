"""Data for training: files in every spelling, dtypes, splits, recipes, batches, labels that are no classes."""

import os
import signal
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import EXAMPLES
from command import fails
from onnx.external_data_helper import set_external_data
from small_models import build, normal, set_of

from bench import figures
from opgrad.gradients import gradients
from opgrad.onnx.graph.loading import read_model
from opgrad.onnxruntime import InferenceSession
from opgrad.onnxruntime.loading import lower_file, open_session
from opgrad.training import Dataset, TensorSpec, Trainer, read_checkpoint
from opgrad.training.engine.evaluation import check_labels, class_count
from opgrad.training.files.dataset import load_file, located
from opgrad.training.onnxblock import custom_op_library, loss
from opgrad.training.run.recipe import Recipe
from opgrad.training.run.state import Resumption

PIXELS = TensorSpec("pixels", np.dtype(np.float32), ("batch", 4))
TOKENS = TensorSpec("tokens", np.dtype(np.int32), ("batch", 2, 2))
LABELS = TensorSpec("labels", np.dtype(np.int64), ("batch",))


def test_split_is_a_partition_in_seeded_order():
    data = Dataset({"a": np.arange(10), "b": np.arange(10) * 2})
    training, test = data.split(3, seed=1)
    order = np.random.default_rng(1).permutation(10)
    np.testing.assert_array_equal(np.concatenate([training.arrays["a"], test.arrays["a"]]), order)
    np.testing.assert_array_equal(test.arrays["b"], 2 * order[7:])
    for rows in (0, 10):
        with pytest.raises(ValueError, match=f"test_rows is {rows}, expected 1 to 9"):
            data.split(rows, seed=1)


@pytest.mark.parametrize("names", [("pixels", "labels"), ("x", "y")])
def test_npz_with_the_names_of_the_inputs_or_x_and_y(tmp_path, names):
    arrays = np.arange(12).reshape(3, 4), np.array([0, 1, 2], np.int32)
    np.savez(tmp_path / "data.npz", **dict(zip(names, arrays, strict=True)))
    data = load_file(tmp_path / "data.npz", (PIXELS, LABELS), {"pixels": 2})
    np.testing.assert_array_equal(data.arrays["pixels"], arrays[0].astype(np.float32) / 2, strict=True)
    np.testing.assert_array_equal(data.arrays["labels"], arrays[1].astype(np.int64), strict=True)


@pytest.mark.parametrize("name", ["data.npy", "data.csv", "named.csv"])
def test_tables_have_the_label_in_the_last_column(tmp_path, name):
    table = np.array([[1, 2, 3, 4, 7], [5, 6, 7, 8, 9]], np.float64)
    if name == "data.npy":
        np.save(tmp_path / name, table)
    else:
        np.savetxt(
            tmp_path / name, table, delimiter=",", header="a,b,c,d,e" if name == "named.csv" else "", comments=""
        )
    data = load_file(tmp_path / name, (TOKENS, LABELS))
    expected = table[:, :4].reshape(2, 2, 2).astype(np.int32)
    np.testing.assert_array_equal(data.arrays["tokens"], expected, strict=True)
    np.testing.assert_array_equal(data.arrays["labels"], np.array([7, 9]), strict=True)


def refused(path, message, inputs=(PIXELS, LABELS), divide=None, error=ValueError):
    with pytest.raises(error, match=message) as caught:
        load_file(path, inputs, divide)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("x", "y", "kind", "message"),
    [
        (np.zeros((3, 5)), np.zeros(3, int), ValueError, r"pixels has shape \(3, 5\), expected \(batch, 4\)"),
        (np.zeros((3, 4)), np.zeros((3, 1), int), ValueError, r"labels has shape \(3, 1\), expected \(batch,\)"),
        (np.zeros((3, 4)), np.zeros(2, int), ValueError, "labels has 2 rows, expected 3"),
        (np.zeros((0, 4)), np.zeros(0, int), ValueError, "no rows"),
        (np.zeros((3, 4)), np.array([0, 0.5, 1]), ValueError, "labels has values that are no int64"),
        (np.array([[0, 1, 2, np.nan]]), np.zeros(1, int), ValueError, "no finite number in row 0"),
        (np.full((1, 4), "a"), np.zeros(1, int), TypeError, "x has dtype <U1, expected numbers"),
    ],
)
def test_arrays_that_do_not_fit_the_graph(tmp_path, x, y, kind, message):
    np.savez(tmp_path / "data.npz", x=x, y=y)
    refused(tmp_path / "data.npz", message, error=kind)


def test_files_that_hold_no_data(tmp_path):
    for name, content in (("a.npz", b"zip?"), ("a.npy", b"array?"), ("a.csv", b"1,2\nx,3\n"), ("a.txt", b"1")):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, r"damaged|no table of numbers|expected \.npz, \.npy or \.csv")
    with zipfile.ZipFile(tmp_path / "twice.npz", "w") as archive:
        for name in ("pixels.npy", "pixels"):
            archive.writestr(name, b"")
    refused(tmp_path / "twice.npz", r"twice.npz has two arrays with the name 'pixels'")
    np.savez(tmp_path / "b.npz", pixels=np.zeros((1, 4)))
    refused(tmp_path / "b.npz", "it holds pixels, expected an array for the input 'labels'")
    np.save(tmp_path / "b.npy", np.zeros(3))
    refused(tmp_path / "b.npy", r"shape \(3,\), expected rows of values and a label")
    np.save(tmp_path / "c.npy", np.zeros((3, 5)))
    message = r"expected arrays for pixels, tokens, labels: use an \.npz file"
    refused(tmp_path / "c.npy", message, (PIXELS, TOKENS, LABELS))
    refused(tmp_path / "c.npy", "divide names 'other', expected an input of the graph", divide={"other": 2})
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "missing.npy", (PIXELS, LABELS))


def test_recipe_has_defaults_and_names_what_is_wrong(tmp_path):
    assert Recipe.load(tmp_path) == Recipe()
    for text, message in (
        ("epochs = ", "is no TOML file"),
        ("epoch = 3", "unknown key 'epoch', expected dataset"),
        ("epochs = 0", "epochs is 0, expected a whole number of at least 1"),
        ("batch_size = true", "batch_size is True"),
        ("learning_rate = -1", "learning_rate is -1, expected a number above 0"),
        ("divide = 16", "divide is 16, expected a table"),
        ("[divide]\nx = 0", "divide.x is 0, expected a number but 0"),
        ("[divide]\nx = nan", "divide.x is nan, expected a number but 0"),
        ("[divide]\nx = -inf", "divide.x is -inf"),
        ("[divide]\nx = 1e-60", "divide.x is 1e-60"),
        (f"[divide]\nx = 1{'0' * 400}", "divide.x is 10000"),
        ("learning_rate = nan", "learning_rate is nan"),
        ("learning_rate = 1e39", "learning_rate is 1e[+]39, expected a number above 0 that float32 holds"),
        (f"learning_rate = 1{'0' * 400}", "learning_rate is 10000"),
        ("clip_norm = inf", "clip_norm is inf"),
        ("validation = nan", "validation is nan"),
        (f"accumulate = 1{'0' * 23}", f"accumulate is 1{'0' * 23}, expected .* at most 2147483647"),
        (f"batch_size = 1{'0' * 23}", "batch_size is 1000"),
        (f"test_rows = 1{'0' * 23}", "test_rows is 1000"),
        (f"validation = 1{'0' * 23}", "validation is 1000"),
        (f"seed = 1{'0' * 23}", "seed is 1000"),
        ("test_rows = 0", "test_rows is 0"),
        ("dataset = 3", "dataset is 3, expected a name"),
        ("validation = 0", "validation is 0"),
        ("validation = 1.0", "validation is 1.0"),
        ("validation = true", "validation is True"),
        ("patience = 3", "patience is 3, expected validation"),
        ("validation = 0.1\npatience = 0", "patience is 0, expected a whole number of at least 1"),
        ("accumulate = 0", "accumulate is 0"),
        ("warmup = -1", "warmup is -1, expected a whole number of at least 0"),
        ("schedule = 3", "schedule is 3"),
        ("clip_norm = 0", "clip_norm is 0, expected a number above 0"),
    ):
        (tmp_path / "recipe.toml").write_text(text)
        with pytest.raises(ValueError, match=message):
            Recipe.load(tmp_path)


FLOAT = np.dtype(np.float32)


def specs(*shapes):
    return [TensorSpec(f"x{place}", FLOAT, shape) for place, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("shapes", "axes", "rows"),
    [
        ([("batch", 64), ("batch",)], [0, 0], None),
        ([("a", 64), ("b",)], [0, 0], None),
        ([("batch", 6), ("tokens",)], [0, 0], None),
        ([(8, 64), (8,)], [0, 0], 8),
        ([(8, 64), ("n",)], [0, 0], 8),
        ([(4, 6), (24,)], [0, 0], 4),
        ([(1, "words"), (1, "words")], [0, 0], 1),
        ([(5, "batch", 4), ("batch",)], [1, 0], None),
        ([("steps", "batch", 4), ("steps", "batch")], [1, 1], None),
        ([("batch", 13), (26, "batch"), ("batch", 1)], [0, 1, 0], None),
        ([(5, 4, 6), (4,)], [1, 0], 4),
        ([(5, "batch", 4)], [1], None),
        ([(5, "batch"), ("tokens",)], [1, 0], None),
        ([("n", 3), (), ("n",)], [0, None, 0], None),
        ([(8, 3), (1, 1, 128), (8,)], [0, None, 0], 8),
        ([("n", 3), (1, 1, 128), ("labels",)], [0, None, 0], None),
        ([("batch", 3), (1, "batch", 128), ("batch",)], [0, 1, 0], None),
        ([(8, 5, 3), (1, 8, 128), (8,)], [0, 1, 0], 8),
        ([(1, 3), ("labels",)], [0, 0], 1),
    ],
)
def test_the_axis_of_the_examples(shapes, axes, rows):
    found, fixed = located(specs(*shapes))
    assert ([each.axis for each in found], fixed) == (axes, rows)
    assert all(isinstance(each.rows, str) or each.axis is None for each in found)


@pytest.mark.parametrize("shapes", [[(8, 64), (9,)], [(5, 4, 6), (7, 3)], [(0, 4), (8,)]])
def test_inputs_without_a_common_number_of_examples(shapes):
    with pytest.raises(NotImplementedError, match=r"expected one (number of them|row for each example)"):
        located(specs(*shapes))
    with pytest.raises(ValueError, match="no inputs beside the parameters"):
        located([])


def test_examples_are_taken_along_their_axis(tmp_path):
    """Of [steps, batch, features], and of labels for each token of an example."""
    steps, tokens = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2), np.arange(4 * 5, dtype=np.float32)
    data = Dataset({"steps": steps, "tokens": tokens}, {"steps": 1})
    assert data.rows == 4
    rows = np.array([3, 0])
    taken = data.take(rows).arrays
    np.testing.assert_array_equal(taken["steps"], steps[:, rows])
    np.testing.assert_array_equal(taken["tokens"], tokens.reshape(4, 5)[rows].reshape(-1))
    training, test = data.split(1, 0)
    assert (training.rows, test.rows, test.arrays["steps"].shape) == (3, 1, (3, 1, 2))


@pytest.mark.parametrize(
    ("shapes", "sizes", "message"),
    [
        ([("batch", 6), ("batch",)], [(4, 6), (8,)], "x1 has 8 rows, expected 4"),
        ([("batch", 6), ("tokens",)], [(4, 6), (9,)], "x1 has 9 rows, expected 4"),
        ([(6, "batch"), ("tokens",)], [(6, 4), (24,)], "x1 has 24 rows and the examples lie along axis 1 of x0, expe"),
    ],
)
def test_arrays_with_other_numbers_of_rows(tmp_path, shapes, sizes, message):
    inputs = located(specs(*shapes))[0]
    np.savez(tmp_path / "data.npz", **{f"x{place}": np.zeros(size, np.float32) for place, size in enumerate(sizes)})
    refused(tmp_path / "data.npz", message, inputs, error=(ValueError, NotImplementedError))


def test_a_table_is_for_examples_along_the_first_axis(tmp_path):
    np.save(tmp_path / "table.npy", np.zeros((4, 7)))
    inputs = located(specs((6, "batch"), ("batch",)))[0]
    refused(tmp_path / "table.npy", r"expected arrays for x0, x1: use an \.npz file", inputs)


ROWS = 60


def wrong_labels(row, value=10):
    labels = np.arange(ROWS) % 10
    labels[row] = value
    return labels


@pytest.mark.parametrize("row", [0, 17, ROWS - 1])  # some of training, some of the test
def test_a_label_that_is_no_class_is_named_by_the_row_of_the_file(tmp_path, row):
    np.savez(tmp_path / "data.npz", x=np.zeros((ROWS, 64)), y=wrong_labels(row))
    text = fails("train", EXAMPLES / "digits", "--data", tmp_path / "data.npz", "--output", tmp_path / "out")
    assert text == f"opgrad: {tmp_path / 'data.npz'}: labels: row {row} is 10, expected classes from 0 to 9\n"
    assert not (tmp_path / "out").exists()


def test_a_label_in_a_table_is_named_by_its_line(tmp_path):
    names = ",".join([*(f"p{number}" for number in range(64)), "digit"])
    rows = [",".join(map(str, [*[0] * 64, label])) for label in wrong_labels(30, -1)]
    (tmp_path / "data.csv").write_text("\n".join(["# digits", names, *rows[:5], "", *rows[5:]]) + "\n")
    text = fails("train", EXAMPLES / "digits", "--data", tmp_path / "data.csv", "--output", tmp_path / "out")
    assert "labels: line 34 is -1, expected classes from 0 to 9" in text
    assert (tmp_path / "data.csv").read_text().splitlines()[33].endswith(",-1")


TOKEN_ROWS = """g (int64[batch, 5] ids, int64[batch, 5] labels) => (float loss) {
    e = Gather(table, ids)  logits = MatMul(e, w)  loss = SoftmaxCrossEntropyLoss<ignore_index = -100>(flat, target)
}"""
PARTS = """one = Constant<value_ints = [1]>()  end = Constant<value_ints = [5]>()  axis = Constant<value_ints = [1]>()
    start = Constant<value_ints = [0]>()  last = Constant<value_ints = [4]>()  rows = Constant<value_ints = [-1, 3]>()
    all = Constant<value_ints = [-1]>()
    s = Slice(logits, start, last, axis)  flat = Reshape(s, rows)
    t = Slice(labels, one, end, axis)  target = Reshape(t, all)"""


def test_scores_whose_classes_the_graph_leaves_open(tmp_path):
    """One row shows how many there are; without that, the text is that of the runtime's kernel."""
    model = build(
        'g (float[batch, 4] x) => (float[batch, c] y) { y = Einsum<equation = "bi,ij->bj">(x, w) }', normal(w=(4, 3))
    )
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "c"
    artifacts = set_of(model, tmp_path)
    data = Dataset({"x": np.zeros((4, 4), np.float32), "labels": np.array([0, 1, 2, 3])})
    assert class_count(artifacts, data) == 3
    with pytest.raises(ValueError, match="file: labels: row 3 is 3, expected classes from 0 to 2"):
        check_labels(artifacts, data, "file")
    trainer = Trainer(artifacts)
    with pytest.raises(ValueError, match="labels: row 3 is 3, expected classes from 0 to 2"):
        trainer.step(data.arrays)


def test_labels_of_which_the_loss_takes_some(tmp_path):
    """A language model shifts its labels: the first of a row is none, and may hold anything."""
    model = build(TOKEN_ROWS.replace("loss =", f"{PARTS}  loss ="), normal(table=(7, 2), w=(2, 3)))
    artifacts = set_of(model, tmp_path, None)
    ids, labels = np.zeros((1500, 5), np.int64), np.zeros((1500, 5), np.int64)
    labels[:, 0], labels[700, 1], labels[3, 2] = 99, 2, -100
    check_labels(artifacts, Dataset({"ids": ids, "labels": labels}), "file")
    labels[1200, 4] = 3
    with pytest.raises(ValueError, match="file: labels: row 1200, place 4, is 3, expected classes from 0 to 2"):
        check_labels(artifacts, Dataset({"ids": ids, "labels": labels}), "file")


def test_ignored_labels_and_labels_of_pixels(tmp_path):
    model = build("g (float[batch, 2, 3, 3] x) => (float[batch, 4, 3, 3] y) { y = Conv(x, k) }", normal(k=(4, 2, 1, 1)))
    artifacts = set_of(model, tmp_path, loss.CrossEntropyLoss(ignore_index=255))
    labels = np.zeros((5, 3, 3), np.int64)
    labels[2] = 255
    data = Dataset({"x": np.zeros((5, 2, 3, 3), np.float32), "labels": labels})
    check_labels(artifacts, data, "file")
    labels[4, 1, 2] = 4
    with pytest.raises(ValueError, match="labels: row 4, place 1, 2, is 4, expected classes from 0 to 3"):
        check_labels(artifacts, data, "file")


def test_a_loss_without_classes_has_no_labels_to_check(tmp_path):
    model = build("g (float[n, 4] x) => (float[n, 3] y) { y = MatMul(x, w) }", normal(w=(4, 3)))
    data = Dataset({"x": np.zeros((2, 4), np.float32), "target": np.full((2, 3), 1e9, np.float32)})
    check_labels(set_of(model, tmp_path, loss.MSELoss()), data, "file")


INPUTS = TensorSpec("pixels", np.dtype(np.float32), ("batch", 2)), LABELS
CSV_ROWS = [(1.5, 2.0, 0), (3.0, 4.5, 1)]


def text(delimiter=",", end="\n", header=""):
    lines = [delimiter.join(map(str, row)) for row in CSV_ROWS]
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
    np.testing.assert_array_equal(data.arrays["pixels"], np.array([row[:2] for row in CSV_ROWS], np.float32))
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
    (tmp_path / "data.csv").write_bytes(content)
    refused(tmp_path / "data.csv", f"data.csv: .*{message}", INPUTS)


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
    refused(path, message, INPUTS, error=(ValueError, TypeError))


def test_npz_members_that_claim_more_than_they_can_hold(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((2, 2)), y=np.zeros(2, int))
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = (1 << 31).to_bytes(4, "little")
    path.write_bytes(content)
    refused(path, r"x claims 2147483648 bytes in \d+, more than can be packed there", INPUTS)


READERS = {
    "checkpoint": read_checkpoint,
    "resume": Resumption.read,
    "recipe": lambda path: Recipe.load(path.parent),
    "model": read_model,
    "gradients": lambda path: gradients(path, "y", "x"),
    "lower": lambda path: lower_file(path, path.with_name("out.onnx")),
    "session": InferenceSession,
    "stock": lambda path: open_session(path, onnxruntime.SessionOptions(), "test", stock=True),
    "library": lambda path: custom_op_library(path).__enter__(),
    "result": figures.read,
    "outside": lambda path: read_model(outside(path)),
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
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for the pipe"))
    signal.alarm(60)
    try:
        with pytest.raises(ValueError, match="no regular file"):
            READERS[reader](path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_nothing_reads_a_device():
    for device in ("/dev/zero", "/dev/full"):
        if Path(device).exists():
            for reader in ("checkpoint", "resume", "model", "session", "result"):
                with pytest.raises(ValueError, match=f"{device}: it is no regular file"):
                    READERS[reader](Path(device))


def test_values_that_the_division_takes_out_of_float32(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.array([[1.0, 1.0], [1e30, 1.0]]), y=np.zeros(2, int))
    refused(tmp_path / "data.npz", "divided by 1e-20, has no finite number in row 1", INPUTS, {"pixels": 1e-20})


def test_a_row_of_a_table_is_named_by_its_line(tmp_path):
    """Names, comments and empty lines count, as an editor counts them."""
    (tmp_path / "data.csv").write_text("a,b,label\n1,2,0\n\n# more\n1,nan,1\n1,2,0\n")
    refused(tmp_path / "data.csv", "has no finite number in line 5, expected", INPUTS)
