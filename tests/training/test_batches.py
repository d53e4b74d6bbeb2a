"""Where the examples of a batch lie in a graph's inputs, and how they are taken from the data."""

import numpy as np
import pytest

from opgrad.training import Dataset, TensorSpec
from opgrad.training.files.dataset import load_file, located

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
    for name, array in taken.items():
        part = data.part(name)
        copy = np.empty(part.shape(2), np.float32)
        part.copy(rows, copy)
        np.testing.assert_array_equal(copy, array)
    training, test = data.split(1, 0)
    assert (training.rows, test.rows, test.arrays["steps"].shape) == (3, 1, (3, 1, 2))


@pytest.mark.parametrize(
    ("shapes", "sizes", "message"),
    [
        ([("batch", 6), ("batch",)], [(4, 6), (8,)], "x1 has 8 rows, expected 4"),
        ([("batch", 6), ("tokens",)], [(4, 6), (9,)], "x1 has 9 rows, expected 4"),
        (
            [(6, "batch"), ("tokens",)],
            [(6, 4), (24,)],
            "x1 has 24 rows and the examples lie along axis 1 of x0, expected 4",
        ),
    ],
)
def test_arrays_with_other_numbers_of_rows(tmp_path, shapes, sizes, message):
    inputs = located(specs(*shapes))[0]
    np.savez(tmp_path / "data.npz", **{f"x{place}": np.zeros(size, np.float32) for place, size in enumerate(sizes)})
    with pytest.raises((ValueError, NotImplementedError), match=message):
        load_file(tmp_path / "data.npz", inputs)


def test_a_table_is_for_examples_along_the_first_axis(tmp_path):
    np.save(tmp_path / "table.npy", np.zeros((4, 7)))
    inputs = located(specs((6, "batch"), ("batch",)))[0]
    with pytest.raises(ValueError, match=r"expected arrays for x0, x1: use an \.npz file"):
        load_file(tmp_path / "table.npy", inputs)
