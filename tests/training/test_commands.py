"""opgrad artifacts, opgrad train of a model, and opgrad inspect of one: what they make, print and refuse."""

import json
import shlex
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import EXAMPLES
from command import cli, fails, succeeds
from small_models import build, images, normal, perceptron, two_outputs

from opgrad.cli.inspection import inspect
from opgrad.cli.options import words
from opgrad.training.artifacts import generate_artifacts
from opgrad.training.make.named_blocks import Loss, Optimizer
from opgrad.training.onnxblock import loss, optim

FILES = ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]


def saved(model, folder, name="model.onnx"):
    onnx.save(model, folder / name)
    return folder / name


def data(path, rows=30, labels="labels", **shapes):
    """A file with random rows."""
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((rows, *shape)).astype(np.float32) for name, shape in shapes.items()}
    np.savez(path, **arrays, **{labels: random.integers(0, 3, rows)})
    return path


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# --- artifacts -------------------------------------------------------------------------------------------------------


def test_artifacts_are_those_of_the_function(tmp_path):
    model, asked = saved(two_outputs(), tmp_path), tmp_path / "deep" / "asked"
    options = shlex.split("""--loss cross-entropy --label-smoothing 0.1 --ignore-index -1 --class-axis 1
        --weight 1,0.5,2 --loss-input scores --train 'w*' --train b1 --freeze w0 --batch-norm freeze --prefix my_
        --output-name hidden --nominal --optimizer adamw --betas 0.8,0.9 --eps 1e-8 --weight-decay 0.1 --adam-mode 0
        --clip-norm 2 --checkpoint-segments 2""")
    text = succeeds("artifacts", model, *options, "-o", asked)
    called = tmp_path / "called"
    called.mkdir()
    generate_artifacts(
        model,
        ["w*", "b1"],
        ["w0"],
        loss.CrossEntropyLoss(np.array([1, 0.5, 2]), "mean", -1, 0.1, 1),
        optim.AdamW(betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1, adam_mode=0, clip_grad=optim.ClipGradNorm(2.0)),
        called,
        "my_",
        additional_output_names=["hidden"],
        nominal_checkpoint=True,
        loss_input_names=["scores"],
        batch_norm="freeze",
        checkpoint_segments=2,
    )
    assert contents(asked) == contents(called)
    assert sorted(contents(asked)) == sorted([f"my_{name}" for name in (*FILES, "nominal_checkpoint")])
    shown = ["cross-entropy: onnx::", "labels int64", "2 tensors, 18 numbers", "1 tensor, 20 numbers", "hidden"]
    shown += ["AdamWOptimizer", "frozen", "b0", "my_training_model.onnx"]
    assert [each for each in shown if each not in text] == []


def test_notes_name_options_and_are_printed_once(tmp_path, caplog):
    text = "g (float[n, 4] x) => (float[n, 3] y) { z = MatMul(x, w)  y = Softmax<axis = -1>(z) }"
    model = saved(build(text, normal(w=(4, 3))), tmp_path)
    status, told = cli("artifacts", model, "--loss", "cross-entropy", "-o", tmp_path / "out")
    assert (status, caplog.text) == (0, "")
    assert told.count("are probabilities") == 1
    assert "give the loss 'z', of which they are made" in " ".join(told.split())
    assert "graph      opset" in cli("inspect", model)[1]
    assert "1 nodes" not in cli("inspect", tmp_path / "out")[1]
    np.savez(tmp_path / "data.npz", x=normal(x=(8, 4))["x"], labels=np.arange(8) % 3)
    options = ["--loss", "cross-entropy", "--data", tmp_path / "data.npz", "--epochs", 1, "--output", tmp_path / "run"]
    told = cli("train", model, *options)[1]
    assert "note: 'y' are probabilities" in told
    assert ", 1 epoch " in told


ARGUMENTS = {
    Loss.NLLLoss: ["--reduction", "sum", "--weight", "1,1,2"],
    Loss.HuberLoss: ["--delta", "0.5"],
    Loss.SmoothL1Loss: ["--beta", "0.5"],
    Loss.BCEWithLogitsLoss: ["--pos-weight", "2,1,1"],
    Loss.KLDivLoss: ["--reduction", "batchmean", "--log-target"],
}


def test_every_loss_and_optimizer(tmp_path):
    model = saved(perceptron(), tmp_path)
    for place, kind in enumerate(Loss):
        optimizer = list(Optimizer)[place % len(Optimizer)]
        options = ["--loss", kind, *ARGUMENTS.get(kind, []), "--optimizer", optimizer]
        succeeds("artifacts", model, *options, "-o", tmp_path / kind)
        assert sorted(contents(tmp_path / kind)) == FILES
    assert set(loss.__all__) == {each.name for each in Loss}


def test_a_model_whose_output_is_the_loss(tmp_path):
    text = "g (float[batch, 4] x) => (float y) { m = MatMul(x, w)  y = ReduceMean<keepdims = 0>(m) }"
    told = succeeds("artifacts", saved(build(text, normal(w=(4, 3))), tmp_path), "-o", tmp_path / "out")
    assert "the model's own: y" in told


def unnamed():
    model = perceptron()
    for node in model.graph.node:
        node.name = ""
    model.graph.node[1].op_type, model.graph.node[1].domain = "Strange", "my.own"
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, ["batch", 5]))
    model.opset_import.append(onnx.helper.make_opsetid("my.own", 1))
    return model


def duplicate():
    model = perceptron()
    model.graph.node[1].output[0] = "h"
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (perceptron, "", "its first output 'scores' is not one number, expected --loss: cross-entropy, nll, "),
        (perceptron, "--label-smoothing 0.1", "--label-smoothing is of a loss, expected --loss, too"),
        (perceptron, "--loss mse --label-smoothing 0.1", "mse takes no --label-smoothing, expected --reduction"),
        (perceptron, "--loss mse --optimizer sgd --eps 1", "sgd takes no --eps, expected no options"),
        (perceptron, "--loss mse --reduction median", "MSELoss: --reduction is 'median'"),
        (perceptron, "--loss mse --freeze backbone.*", "--freeze has 'backbone.*', which matches no weight"),
        (perceptron, "--loss mse --train w00", "--train has 'w00', which is no initializer of the model; did you mean"),
        (perceptron, "--loss mse --train w0 --freeze w0", "--freeze has 'w0', expected none that is to be trained"),
        (perceptron, "--loss mse --loss-input score", "no value 'score'; did you mean 'scores'?"),
        (perceptron, "--loss mse --output-name score", "no value 'score' to be an output; did you mean 'scores'?"),
        (perceptron, "--loss cross-entropy --weight 1,2", "weight has 2 numbers, expected 3, one for each class"),
        (perceptron, "--loss mse --batch-norm never", "--batch-norm is 'never', expected 'model', 'train' or 'freeze'"),
        (perceptron, "--loss mse --prefix a/b", "--prefix is 'a/b', expected the beginning of file names"),
        (two_outputs, "--loss cross-entropy", "--loss-input says which outputs the loss takes"),
        (unnamed, "--loss mse", "my.own.Strange (the node that makes 'a'): there is no rule for it; opgrad."),
        (duplicate, "--loss mse", "2 values have the name 'h', expected one"),
        (lambda: build("g (int64[batch] x) => (int64[batch] y) { y = Abs(x) }"), "--loss mse", "expected a float type"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_told_in_one_line(tmp_path, model, options, message):
    path = saved(model(), tmp_path)
    for place in (tmp_path / "deep" / "out", tmp_path):
        text = fails("artifacts", path, *options.split(), "-o", place)
        assert text.startswith("opgrad: ")
        assert message in text
        assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


# --- train -----------------------------------------------------------------------------------------------------------


def test_a_model_trains_as_its_artifacts_do_and_is_exported_with_its_outputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, rows = saved(two_outputs(), tmp_path), data(tmp_path / "data.npz", x=(4,))
    making = ["--loss", "cross-entropy", "--loss-input", "scores", "--freeze", "w0"]
    settings = ["--data", rows, "--epochs", 2, "--batch-size", 8, "--lr", 0.01, "--validation", 6]
    places = ["--artifacts", "kept", "--export", "trained.onnx"]
    text = succeeds("train", "model.onnx", *making, *settings, *places)
    assert "artifacts of model.onnx: trainable 3 tensors, 23 numbers, 1 frozen" in text
    assert "trained.onnx: the trained model, with the outputs scores, hidden" in text
    text = succeeds("train", "kept", *settings, "--output", "again", "--export", "scores.onnx")
    metrics = [json.loads((tmp_path / place / "metrics.json").read_text()) for place in ("runs/model", "again")]
    assert metrics[0]["train_loss_per_epoch"] == metrics[1]["train_loss_per_epoch"]
    x = np.load(rows)["x"]
    found = {
        name: onnxruntime.InferenceSession(name).run(None, {"x": x})
        for name in ("model.onnx", "trained.onnx", "scores.onnx", "runs/model/model.onnx")
    }
    assert [each.name for each in onnx.load("trained.onnx").graph.output] == ["scores", "hidden"]
    np.testing.assert_array_equal(found["trained.onnx"][0], found["runs/model/model.onnx"][0])
    np.testing.assert_array_equal(found["trained.onnx"][0], found["scores.onnx"][0])
    assert not np.allclose(found["trained.onnx"][0], found["model.onnx"][0])
    trained = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load("trained.onnx").graph.initializer}
    for tensor in onnx.load(model).graph.initializer:
        assert np.array_equal(trained[tensor.name], onnx.numpy_helper.to_array(tensor)) == (tensor.name == "w0")


def test_what_cannot_be_trained_is_told_in_one_line(tmp_path):
    model, rows = saved(perceptron(), tmp_path), data(tmp_path / "data.npz", labels="label", x=(4,))
    wide = data(tmp_path / "wide.npz", x=(5,))
    cases = {
        ("--data", rows): "it holds x, label, expected an array for the input 'labels'",
        ("--data", wide): "x has shape (30, 5), expected (batch, 4)",
        (): f"train: no data for {model}, expected --data or a dataset named in recipe.toml beside it",
        ("--data", rows, "--validation", "much"): "validation is 'much', expected a number of rows or a fraction",
        ("--data", rows, "--freeze", "z*"): "--freeze has 'z*', which matches no weight",
    }
    before = sorted(tmp_path.iterdir())
    for options, message in cases.items():
        status, text = cli("train", model, "--loss", "cross-entropy", *options, "--output", tmp_path / "run")
        assert (status, message in text, text.count("opgrad: ")) == (1, True, 1), text
        assert sorted(tmp_path.iterdir()) == before
    for word in ("--loss", "mse"), ("--freeze", "w*"), ("--artifacts", tmp_path / "kept"), ("--untie",):
        assert " for an .onnx file; " in fails("train", EXAMPLES / "digits", *word, "--output", tmp_path / "run")


@pytest.mark.parametrize(("name", "given"), [("digits_convolution", ["--batch-norm", "train"]), ("digits_lstm", [])])
def test_a_folder_with_a_model_and_a_recipe_is_trained(name, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    succeeds("train", EXAMPLES / name, "--epochs", "1")
    whole = ["--loss", "cross-entropy", *given, "--epochs", "1", "--output", "told"]
    succeeds("train", EXAMPLES / name / "model.onnx", *whole)
    losses = [json.loads(Path(place, "metrics.json").read_text())["test_loss"] for place in (f"runs/{name}", "told")]
    assert losses[0] == losses[1]


def test_options_count_more_than_the_recipe_beside_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    saved(perceptron(), folder)
    rows = data(tmp_path / "data.npz", x=(4,))
    for recipe, options, message in (
        ('loss = "nothing"', (), "Recipe: loss is 'nothing', expected one of "),
        ('batch_norm = "maybe"', (), "Recipe: batch_norm is 'maybe', expected one of model, train, freeze"),
        ('loss = "mse"', (), "the input 'target'"),
        ('loss = "mse"', ("--loss", "cross-entropy"), None),
    ):
        (folder / "recipe.toml").write_text(recipe)
        status, text = cli("train", folder, "--data", rows, "--epochs", "1", *options)
        assert (status, message is None or message in text) == (int(message is not None), True), text
    (folder / "recipe.toml").write_text('loss = "cross-entropy"')
    succeeds("train", folder, "--data", rows, "--epochs", "1")
    going_on = "train", folder, "--data", rows, "--epochs", "2", "--resume", "runs/model/last.checkpoint"
    told = fails(*going_on, "--label-smoothing", "0.5")
    assert "last.checkpoint is of a run with --loss cross-entropy, expected the same" in told
    succeeds(*going_on, "--loss", "cross-entropy")


def test_the_command_to_go_on_has_the_options_of_the_model():
    options = {"--loss": Loss.MSELoss, "--freeze": ["a*", "b"], "--bias-correction": False, "--log-target": True}
    assert shlex.join(words(options)) == "--loss mse --freeze 'a*' --freeze b --no-bias-correction --log-target"


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_tells_all_nodes_without_gradient_and_what_would_be_trained(tmp_path):
    model = images(training=True)
    model.graph.node[2].op_type, model.graph.node[2].domain = "Stranger", "my.own"
    for name, shape in ((model.graph.node[2].output[0], [4, 4, 6, 6]), ("f", [4, 4])):
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    model.graph.node[4].op_type, model.graph.node[4].domain = "Strange", "my.own"
    model.opset_import.append(onnx.helper.make_opsetid("my.own", 1))
    path = saved(model, tmp_path)
    found = inspect(path).training
    assert [each.partition(":")[0] for each in found.problems] == [
        "my.own.Stranger (node 'n2')",
        "my.own.Strange (node 'n4')",
    ]
    assert found.trainable == ["w0", "scale", "bias", "w1"]
    assert found.frozen == ["mean", "var"]
    status, text = cli("inspect", path)
    assert status == 1  # nobody runs my.own.Strange
    assert text.count("cannot be trained: ") == 2
    assert "2 statistics of normalization" in text
    training = json.loads(cli("inspect", path, "--json")[1])["training"]
    assert training["problems"] == found.problems


@pytest.mark.parametrize("last", ["Identity", "Softmax", "Sigmoid", "LogSoftmax", "ReduceMean"])
def test_the_losses_that_inspect_names_fit(last, tmp_path):
    model = perceptron()
    model.graph.node[-1].output[0] = "logits"
    model.graph.node.append(onnx.helper.make_node(last, ["logits"], ["scores"], "last"))
    if last == "ReduceMean":
        model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("scores", 1, [1, 1]))
    path = saved(model, tmp_path)
    found = inspect(path).training
    assert not found.problems
    (output,) = found.outputs
    assert (Loss.CrossEntropyLoss in output.losses) == (last == "Identity")
    assert bool(output.hint) == (last in ("Softmax", "Sigmoid", "ReduceMean"))
    for kind in output.losses:
        succeeds("artifacts", path, "--loss", kind, "-o", tmp_path / "out")
    if last in ("Softmax", "Sigmoid"):
        kind, _, rest = output.hint.partition("it; ")[2].partition(" takes")
        assert "'logits'" in rest
        succeeds("artifacts", path, "--loss", kind, "--loss-input", "logits", "-o", tmp_path / "out")
    succeeds("inspect", path)


def test_inspect_of_models_that_are_not_to_be_trained(tmp_path):
    assert inspect(EXAMPLES / "digits" / "training_model.onnx").training is None
    assert inspect(EXAMPLES / "digits" / "eval_model.onnx").training.problems == [
        "the model has no weights, expected float tensors that it multiplies, adds or looks up"
    ]
    model = saved(perceptron(), tmp_path)
    onnx.save(onnx.load(model), model, save_as_external_data=True, location="values", size_threshold=0)
    (tmp_path / "values").unlink()
    status, text = cli("inspect", model)
    assert status == 1
    assert "values" in text


# --- what is said before anything is made ----------------------------------------------------------------------------


def test_output_is_tried_before_artifacts_are_made(tmp_path, monkeypatch):
    """Here it lies below a file."""
    monkeypatch.setattr("opgrad.cli.train.make", lambda *_, **__: pytest.fail("artifacts were made"))
    model, rows = saved(perceptron(), tmp_path), data(tmp_path / "rows.npz", x=(4,))
    (tmp_path / "file").write_text("")
    text = fails("train", model, "--data", rows, "--loss", "mse", "--output", tmp_path / "file" / "deep")
    assert text == f"opgrad: {tmp_path / 'file'} is a file, expected a folder for what is written\n"


def test_batch_size_that_the_graphs_do_not_take(tmp_path):
    model = build("g (float[2, 4] x) => (float[2, 3] scores) { scores = MatMul(x, w) }", normal(w=(4, 3)))
    rows = data(tmp_path / "rows.npz", x=(4,))
    options = ("--data", rows, "--loss", "cross-entropy", "--output", tmp_path / "out")
    expected = "expected 2, the only one that the graphs take: --batch-size 2, or export the model with axis 0 of 'x'"
    status, text = cli("train", saved(model, tmp_path), *options)
    assert (status, expected in text) == (1, True), text


@pytest.mark.parametrize("kind", [each for each in Loss if each != Loss.NLLLoss])
@pytest.mark.parametrize("shape", ["batch, 3", "batch, 5, 3", "batch, 3, 5, 7"])
def test_inspect_names_the_array_of_each_loss(tmp_path, kind, shape):
    operator = "LogSoftmax" if kind == Loss.KLDivLoss else "Relu"
    model = build(
        f"g (float[{shape}] x) => (float[{shape}] y) {{ h = Mul(x, w) y = {operator}(h) }}",
        normal(w=(int(shape.split()[-1]),)),
    )
    (output,) = inspect(saved(model, tmp_path)).training.outputs
    (tmp_path / "made").mkdir()
    generate_artifacts(model, loss=getattr(loss, kind.name)(), artifact_directory=tmp_path / "made")
    made = inspect(tmp_path / "made").inputs[-1]
    sizes = ", ".join(map(str, made.shape)) + ("," if len(made.shape) == 1 else "")
    assert output.arrays[kind] == f"{made.name} {made.dtype} ({sizes})"
