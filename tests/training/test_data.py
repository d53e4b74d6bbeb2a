"""Data for training: files, shapes, dtypes, splits, recipes."""

import zipfile

import numpy as np
import pytest

from opgrad.training import Dataset, TensorSpec
from opgrad.training.files.dataset import load_file
from opgrad.training.run.recipe import Recipe

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
            tmp_path / name,
            table,
            delimiter=",",
            header="a,b,c,d,e" if name == "named.csv" else "",
            comments="",
        )
    data = load_file(tmp_path / name, (TOKENS, LABELS))
    expected = table[:, :4].reshape(2, 2, 2).astype(np.int32)
    np.testing.assert_array_equal(data.arrays["tokens"], expected, strict=True)
    np.testing.assert_array_equal(data.arrays["labels"], np.array([7, 9]), strict=True)


@pytest.mark.parametrize(
    ("x", "y", "kind", "message"),
    [
        (np.zeros((3, 5)), np.zeros(3, int), ValueError, r"pixels has shape \(3, 5\), expected \(batch, 4\)"),
        (
            np.zeros((3, 4)),
            np.zeros((3, 1), int),
            ValueError,
            r"labels has shape \(3, 1\), expected \(batch,\)",
        ),
        (np.zeros((3, 4)), np.zeros(2, int), ValueError, "labels has 2 rows, expected 3"),
        (np.zeros((0, 4)), np.zeros(0, int), ValueError, "no rows"),
        (np.zeros((3, 4)), np.array([0, 0.5, 1]), ValueError, "labels has values that are no int64"),
        (np.array([[0, 1, 2, np.nan]]), np.zeros(1, int), ValueError, "no finite number in row 0"),
        (np.full((1, 4), "a"), np.zeros(1, int), TypeError, "x has dtype <U1, expected numbers"),
    ],
)
def test_arrays_that_do_not_fit_the_graph(tmp_path, x, y, kind, message):
    np.savez(tmp_path / "data.npz", x=x, y=y)
    with pytest.raises(kind, match=message):
        load_file(tmp_path / "data.npz", (PIXELS, LABELS))


def test_files_that_hold_no_data(tmp_path):
    inputs = (PIXELS, LABELS)
    for name, content in (
        ("a.npz", b"zip?"),
        ("a.npy", b"array?"),
        ("a.csv", b"1,2\nx,3\n"),
        ("a.txt", b"1"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged|no table of numbers|expected \.npz, \.npy or \.csv"):
            load_file(tmp_path / name, inputs)
    with zipfile.ZipFile(tmp_path / "twice.npz", "w") as archive:
        for name in ("pixels.npy", "pixels"):
            archive.writestr(name, b"")
    with pytest.raises(ValueError, match=r"twice.npz has two arrays with the name 'pixels'"):
        load_file(tmp_path / "twice.npz", inputs)
    np.savez(tmp_path / "b.npz", pixels=np.zeros((1, 4)))
    with pytest.raises(ValueError, match="it holds pixels, expected an array for the input 'labels'"):
        load_file(tmp_path / "b.npz", inputs)
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"shape \(3,\), expected rows of values and a label"):
        load_file(tmp_path / "b.npy", inputs)
    np.save(tmp_path / "c.npy", np.zeros((3, 5)))
    with pytest.raises(ValueError, match=r"expected arrays for pixels, tokens, labels: use an \.npz file"):
        load_file(tmp_path / "c.npy", (PIXELS, TOKENS, LABELS))
    with pytest.raises(ValueError, match="divide names 'other', expected an input of the graph"):
        load_file(tmp_path / "c.npy", inputs, {"other": 2})
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "missing.npy", inputs)


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
    ):
        (tmp_path / "recipe.toml").write_text(text)
        with pytest.raises(ValueError, match=message):
            Recipe.load(tmp_path)
