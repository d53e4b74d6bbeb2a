"""Labels that are no classes are told before the training, with the row of the file."""

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES
from command import cli
from small_models import build, normal

from opgrad.training import ArtifactSet, Dataset, Trainer
from opgrad.training.artifacts import generate_artifacts
from opgrad.training.engine.evaluation import check_labels, class_count
from opgrad.training.onnxblock import loss, optim

ROWS = 60


def wrong_labels(row, value=10):
    labels = np.arange(ROWS) % 10
    labels[row] = value
    return labels


@pytest.mark.parametrize("row", [0, 17, ROWS - 1])  # some of training, some of the test
def test_a_label_that_is_no_class_is_named_by_the_row_of_the_file(tmp_path, row):
    np.savez(tmp_path / "data.npz", x=np.zeros((ROWS, 64)), y=wrong_labels(row))
    status, text = cli("train", EXAMPLES / "digits", "--data", tmp_path / "data.npz", "--output", tmp_path / "out")
    expected = f"opgrad: {tmp_path / 'data.npz'}: labels: row {row} is 10, expected classes from 0 to 9\n"
    assert (status, text) == (1, expected)
    assert not (tmp_path / "out").exists()


def test_a_label_in_a_table_is_named_by_its_line(tmp_path):
    names = ",".join([*(f"p{number}" for number in range(64)), "digit"])
    rows = [",".join(map(str, [*[0] * 64, label])) for label in wrong_labels(30, -1)]
    (tmp_path / "data.csv").write_text("\n".join(["# digits", names, *rows[:5], "", *rows[5:]]) + "\n")
    status, text = cli("train", EXAMPLES / "digits", "--data", tmp_path / "data.csv", "--output", tmp_path / "out")
    assert (status, (tmp_path / "out").exists()) == (1, False)
    assert "labels: line 34 is -1, expected classes from 0 to 9" in text
    lines = (tmp_path / "data.csv").read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if line.endswith(",-1")] == [34]


OPEN = "g (float[batch, 4] x, int64[2] shape) => (float[a, b] y) { m = MatMul(x, w)  y = Reshape(m, shape) }"
TOKENS = """g (int64[batch, 5] ids, int64[batch, 5] labels) => (float loss) {
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
    artifacts = made(model, tmp_path)
    data = Dataset({"x": np.zeros((4, 4), np.float32), "labels": np.array([0, 1, 2, 3])})
    assert class_count(artifacts, data) == 3
    with pytest.raises(ValueError, match="file: labels: row 3 is 3, expected classes from 0 to 2"):
        check_labels(artifacts, data, "file")
    trainer = Trainer(artifacts)
    with pytest.raises(ValueError, match="labels: row 3 is 3, expected classes from 0 to 2"):
        trainer.step(data.arrays)


def made(model, folder, block=None):
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    block = block if block is not None else loss.CrossEntropyLoss()
    generate_artifacts(folder / "model.onnx", loss=block, optimizer=optim.AdamW(), artifact_directory=folder)
    return ArtifactSet.load(folder)


def test_labels_of_which_the_loss_takes_some(tmp_path):
    """A language model shifts its labels: the first of a row is none, and may hold anything."""
    model = build(TOKENS.replace("loss =", f"{PARTS}  loss ="), normal(table=(7, 2), w=(2, 3)))
    onnx.save(model, tmp_path / "model.onnx")
    generate_artifacts(tmp_path / "model.onnx", optimizer=optim.AdamW(), artifact_directory=tmp_path)
    artifacts = ArtifactSet.load(tmp_path)
    ids, labels = np.zeros((1500, 5), np.int64), np.zeros((1500, 5), np.int64)
    labels[:, 0], labels[700, 1], labels[3, 2] = 99, 2, -100
    check_labels(artifacts, Dataset({"ids": ids, "labels": labels}), "file")
    labels[1200, 4] = 3
    with pytest.raises(ValueError, match="file: labels: row 1200, place 4, is 3, expected classes from 0 to 2"):
        check_labels(artifacts, Dataset({"ids": ids, "labels": labels}), "file")


def test_ignored_labels_and_labels_of_pixels(tmp_path):
    model = build("g (float[batch, 2, 3, 3] x) => (float[batch, 4, 3, 3] y) { y = Conv(x, k) }", normal(k=(4, 2, 1, 1)))
    artifacts = made(model, tmp_path, loss.CrossEntropyLoss(ignore_index=255))
    labels = np.zeros((5, 3, 3), np.int64)
    labels[2] = 255
    data = Dataset({"x": np.zeros((5, 2, 3, 3), np.float32), "labels": labels})
    check_labels(artifacts, data, "file")
    labels[4, 1, 2] = 4
    with pytest.raises(ValueError, match="labels: row 4, place 1, 2, is 4, expected classes from 0 to 3"):
        check_labels(artifacts, data, "file")


def test_a_loss_without_classes_has_no_labels_to_check(tmp_path):
    artifacts = made(
        build("g (float[n, 4] x) => (float[n, 3] y) { y = MatMul(x, w) }", normal(w=(4, 3))), tmp_path, loss.MSELoss()
    )
    check_labels(
        artifacts, Dataset({"x": np.zeros((2, 4), np.float32), "target": np.full((2, 3), 1e9, np.float32)}), "file"
    )
