"""What is said of scores before a training, exports after it, and exported steps in stock onnxruntime."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from inspect import signature

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import EXAMPLES, write_linear_set
from command import cli, fails, succeeds
from portable_steps import FOLDERS, MODELS, RULES, Reference, batches, client
from small_models import build, normal
from snippets import commands, executed

from opgrad.cli.step import step as step_command
from opgrad.training import ArtifactSet, Dataset, Trainer, read_checkpoint, write_checkpoint
from opgrad.training.api import CheckpointState
from opgrad.training.export import export_step
from opgrad.training.export.rules import rule
from opgrad.training.run.fit import GradientMean

TOLERANCE = 1e-4  # of losses, relative
RATE = 0.002
SMALL = "mlp_mse"


def exported(folder, name=SMALL, **options):
    """The client of an exported step."""
    made = export_step(FOLDERS[name], folder / "step.onnx", **options)
    return client().Step(made.files["manifest"])


def domains(model):
    functions = [node for function in model.functions for node in function.node]
    return {node.domain for node in model.graph.node}, {node.domain for node in functions}


@pytest.mark.parametrize("name", [name for name in FOLDERS if name not in MODELS])  # those: make test-portable
def test_a_set_trains_as_in_opgrad(name, tmp_path):
    """Flat, with its own optimizer; what is saved goes on in opgrad, and the other way round."""
    step = exported(tmp_path, name, flat=True, models=["eval", "infer"])
    trainer = Trainer(ArtifactSet.load(FOLDERS[name]), RATE)
    for path in tmp_path.glob("*.onnx"):
        outer, inner = domains(onnx.load(path))
        assert (outer - {"opgrad"}, inner - {""}) == ({""}, set())
    given = list(batches(name, 26))
    losses = [(step.train(batch, RATE), trainer.step(batch)) for batch in given[:20]]
    np.testing.assert_allclose(*np.transpose(losses), rtol=TOLERANCE)
    evaluated, expected = step.evaluate(given[20]), trainer.evaluate(Dataset(given[20]))
    np.testing.assert_allclose(evaluated["loss"], expected.loss, rtol=TOLERANCE)
    assert expected.accuracy is None or evaluated["accuracy"] == pytest.approx(expected.accuracy)
    (scores,) = step.run("infer", given[20]).values()
    np.testing.assert_allclose(scores, evaluated["scores"], rtol=1e-5, atol=1e-5)
    step.save(tmp_path / "trained.safetensors")
    again = Trainer(trainer.artifacts, RATE)
    again.restore(read_checkpoint(tmp_path / "trained.safetensors"))
    losses = [(step.train(batch, RATE), again.step(batch)) for batch in given[20:23]]
    if name not in ("digits_cnn", SMALL):  # with running statistics, and without moments
        np.testing.assert_allclose(*np.transpose(losses), rtol=TOLERANCE)
        return
    write_checkpoint(again.checkpoint(), tmp_path / "checkpoint")
    back = exported(tmp_path, name, flat=True, checkpoint=tmp_path / "checkpoint")
    assert back.steps == 23
    losses += [(back.train(batch, RATE), again.step(batch)) for batch in given[23:]]
    np.testing.assert_allclose(*np.transpose(losses), rtol=TOLERANCE)


@pytest.mark.parametrize(("kind", "flat"), [*((kind, False) for kind in RULES), ("lion", True)])
def test_an_optimizer_is_its_formula(kind, flat, tmp_path):
    chosen = replace(RULES[kind], max_norm=0.05)
    step = exported(tmp_path, optimizer=RULES[kind], clip_norm=0.05, flat=flat)
    reference = Reference(Trainer(ArtifactSet.load(FOLDERS[SMALL]), RATE), chosen)
    losses = [(step.train(batch, RATE), reference.step(batch, RATE)) for batch in batches(SMALL, 20)]
    np.testing.assert_allclose(*np.transpose(losses), rtol=TOLERANCE)
    assert losses[-1][0] < losses[0][0]


@pytest.mark.parametrize("options", [{}, {"flat": True, "inline": True}], ids=["single", "flat-inline"])
def test_accumulated_batches_are_one_step(options, tmp_path):
    """Each batch counts with its share of the rows, as in opgrad; running statistics change with every batch."""
    trainer = Trainer(ArtifactSet.load(FOLDERS["digits_cnn"]), RATE)
    scores = trainer.artifacts.scores
    step = exported(tmp_path, "digits_cnn", accumulate=True, outputs=["accuracy", scores], **options)
    mean, shares = GradientMean(trainer.gradients.flat), (0.25, 0.75)
    for number, batch in enumerate(batches("digits_cnn", 8)):
        loss, last = trainer.compute_gradients(batch), number % 2 == 1
        np.testing.assert_allclose(step.train(batch, RATE, shares[number % 2], last), loss, rtol=TOLERANCE)
        if last:
            mean.finish(shares[1])
            trainer.optimizer.step()
        else:
            mean.add(shares[0])
    assert step.steps == trainer.optimizer.steps == 4
    found = step.run("step", {**batch, **scalars(5), "share": np.ones(1, np.float32), "update": np.array([True])})
    assert found["accuracy"] == pytest.approx((found[scores].argmax(1) == batch["labels"]).mean())
    (tmp_path / "weights").write_bytes(step.content())
    for name, values in read_checkpoint(tmp_path / "weights").frozen.items():
        np.testing.assert_allclose(values, trainer.parameters[name], rtol=1e-4, atol=1e-5, err_msg=name)


def scalars(number):
    return {"learning_rate": np.array([RATE], np.float32), "step": np.array([number])}


@pytest.mark.parametrize("flat", [False, True], ids=["single", "flat"])
def test_parameters_in_half_the_bytes(flat, tmp_path):
    step = exported(tmp_path, "digits", weights="float16", flat=flat, opset=21, inline=True)
    model = onnx.load(tmp_path / "step.onnx")
    assert (model.opset_import[0].version, len(model.opset_import), len(model.functions)) == (21, 1, 0)
    trainer = Trainer(ArtifactSet.load(FOLDERS["digits"]), RATE)
    losses = [(step.train(batch, RATE), trainer.step(batch)) for batch in batches("digits", 20)]
    np.testing.assert_allclose(*np.transpose(losses), rtol=20 * np.finfo(np.float16).eps)  # rounded in every step
    assert step.manifest["weights"]["bytes"] == 2 * sum(each.size for each in trainer.gradients.values())
    step.save(tmp_path / "half.safetensors")
    state = CheckpointState.load_checkpoint(tmp_path / "half.safetensors")
    for name, parameter in state.parameters:
        assert parameter.data.dtype == np.float32
        np.testing.assert_allclose(parameter.data, trainer.parameters[name], atol=0.01, err_msg=name)


def test_the_client_needs_no_opgrad_and_the_command_no_python(tmp_path):
    """`opgrad step`, examples/python in a process that cannot import opgrad, `opgrad train --resume`."""
    words = ["--flat", "--eval", "--infer", "--optimizer", "adamw", "--betas", "0.9,0.999", "--eps", "1e-6"]
    words += ["--adam-mode", 1, "--weight-decay", 0, "--output-name", "accuracy", "-o", tmp_path / "step.onnx"]
    succeeds("step", EXAMPLES / "digits", *words)
    assert {path.name for path in tmp_path.iterdir()} >= {"step.eval.onnx", "step.infer.onnx", "step.json"}
    np.savez(tmp_path / "data.npz", **next(batches("digits", 1, rows=500)))
    code = "import sys; sys.modules['opgrad'] = None; import train; train.EPOCHS = 4; train.main(*sys.argv[1:])"
    files = [str(tmp_path / name) for name in ("step.json", "data.npz", "trained.safetensors")]
    done = subprocess.run(
        [sys.executable, "-c", code, *files], cwd=EXAMPLES / "python", capture_output=True, text=True, check=True
    )
    first, *_, second = (float(line.split()[-1]) for line in done.stdout.splitlines())
    assert second < 0.8 * first
    words = ["--resume", files[2], "--epochs", 1, "--output", tmp_path / "run"]
    succeeds("train", EXAMPLES / "digits", *words)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["train_loss_per_epoch"][0] < second


def test_the_client_of_the_document_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").symlink_to(EXAMPLES, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    succeeds(*next(words for words in commands("docs/guides/portable.md") if words[0] == "step"))
    assert executed("docs/guides/portable.md")[1] == 1
    assert len(capsys.readouterr().out.split()) == 3


def test_every_option_is_documented():
    text = (EXAMPLES.parent / "docs" / "guides" / "portable.md").read_text(encoding="utf-8")
    for name in signature(step_command).parameters:
        option = {"evaluation": "eval", "inference": "infer"}.get(name, name)
        assert name in ("directory", "output") or f"--{option.replace('_', '-')}" in text, name


@pytest.mark.parametrize(
    ("label", "message"), [(-1, None), (-3, None), (10, "Out of range value"), (-11, "Out of range value")]
)
def test_labels_out_of_range_do_what_the_document_says(label, message, tmp_path):
    step = exported(tmp_path, "digits")
    batch = next(batches("digits", 1))
    feeds = {**batch, "labels": np.full(10, label), **scalars(1)}
    if message:
        with pytest.raises(Exception, match=message):
            step.run("step", feeds)
    else:
        assert (step.run("step", feeds)["loss"] == 0) == (label == -1)


def test_dropout_depends_on_the_seed_alone(tmp_path):
    """About as many elements are dropped as the ratio says, others with each seed, in each node, in each place."""
    artifacts = ArtifactSet.load(FOLDERS["digits_transformer"])
    model, _ = artifacts.training()
    (ratio,) = {node.input[1] for node in model.graph.node if node.op_type == "Dropout"}
    tensor = next(each for each in model.graph.initializer if each.name == ratio)
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(0.25, np.float32), ratio))
    masks = [node.output[1] for node in model.graph.node if node.op_type == "Dropout"]
    changed = replace(artifacts, training_model=model)
    assert "seed" not in export_step(artifacts, tmp_path / "step.onnx").manifest["scalars"]  # its ratio is 0
    step = client().Step(export_step(changed, tmp_path / "step.onnx", outputs=masks).files["manifest"])
    assert step.manifest["scalars"] == ["learning_rate", "step", "seed"]
    batch = next(batches("digits_transformer", 1, rows=40))
    found = [step.run("step", {**batch, **scalars(1), "seed": np.array([seed])}) for seed in (1, 1, 2, -(2**62))]
    losses = [each["loss"].item() for each in found]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3
    for name in masks:
        drawn = [each[name].ravel() for each in found[1:]]
        for one in drawn:
            assert abs(one.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / one.size)
        pairs = [(drawn[0], drawn[1]), (drawn[0], drawn[2]), (drawn[0][1:], drawn[0][:-1])]
        for one, other in pairs:  # of independent ones the variance of this is 1 / size
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(one.size)


def test_the_manifest_tells_all(tmp_path):
    made = export_step(FOLDERS["digits_cnn"], tmp_path / "step.onnx", accumulate=True, optimizer=rule("nesterov"))
    told = json.loads(made.files["manifest"].read_text())
    assert told == made.manifest
    assert told["label"] == {"name": "labels", "classes": 10, "ignored": -1}
    assert told["batch_rows"] == 50
    session = onnxruntime.InferenceSession(made.files["step"])
    inputs = {value.name: value for value in session.get_inputs()}
    names = [each["name"] for each in told["batch"]] + [each["input"] for each in told["state"]] + told["scalars"]
    assert sorted(names) == sorted(inputs)
    outputs = {value.name: value.shape for value in session.get_outputs()}
    assert sorted(told["outputs"] + [each["output"] for each in told["state"]]) == sorted(outputs)
    for part in told["state"]:
        assert inputs[part["input"]].shape == outputs[part["output"]] == part["shape"]
    assert {each["kind"] for each in told["state"]} == {"parameters", "statistics", "moments", "gradients"}
    first = made.files["step"].read_bytes()
    assert export_step(FOLDERS["digits_cnn"], tmp_path / "step.onnx", accumulate=True, optimizer=rule("nesterov"))
    assert made.files["step"].read_bytes() == first


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"opset": 15}, ValueError, "opset is 15, expected 16 at least"),
        ({"weights": "int8"}, ValueError, "weights is 'int8', expected one of float32, float16"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm is -1.0, expected a number above 0"),
        ({"optimizer": "adamw"}, TypeError, "optimizer is of type str, expected a rule"),
        ({"outputs": ["accuracy"]}, ValueError, "outputs has the accuracy, expected labels that are classes"),
        ({"outputs": ["nothing"]}, ValueError, "the training graph computes no 'nothing'"),
        ({"output": "step.bin"}, ValueError, "expected a name that ends with .onnx"),
    ],
)
def test_what_cannot_be_exported_is_said(options, error, message, tmp_path):
    output = tmp_path / options.pop("output", "step.onnx")
    with pytest.raises(error, match=message):
        export_step(FOLDERS[SMALL], output, **options)
    assert not [*tmp_path.iterdir()]


def test_an_operator_without_a_plain_form_is_named(tmp_path):
    artifacts = ArtifactSet.load(FOLDERS[SMALL])
    model, _ = artifacts.training()
    next(node for node in model.graph.node if node.op_type == "LeakyRelu").domain = "somewhere"
    model.opset_import.append(onnx.helper.make_opsetid("somewhere", 1))
    with pytest.raises(NotImplementedError, match="the graph has somewhere:LeakyRelu, of which there is no form"):
        export_step(replace(artifacts, training_model=model), tmp_path / "step.onnx")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--betas", "0.9,0.99"], "--betas is of an optimizer, expected --optimizer, too"),
        (["--optimizer", "lion", "--betas", "0.9"], "--betas is 0.9, expected 2 numbers"),
        (["--optimizer", "sgd", "--momentum", "0.9"], "sgd takes no momentum"),
    ],
)
def test_wrong_options_are_one_line(words, message, tmp_path):
    assert message in fails("step", FOLDERS[SMALL], "-o", tmp_path / "step.onnx", *words)


# --- the files, damaged ----------------------------------------------------------------------------------------------


def changed(content, old, new):
    assert old in content
    return content.replace(old, new, 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "damaged or cut short"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "its SHA-256 is another"),
        (lambda content: content[:100], "cut short"),
        (lambda content: changed(content, b'"F32"', b'"X32"'), "says of 'layers.0.weight' what has no meaning"),
        (lambda content: changed(content, b"opgrad.weights", b"someone.weight"), "no weights file"),
        (lambda content: changed(content, b'"step":"0"', b'"step":"x"'), "its step is 'x'"),
        (lambda content: changed(content, b'"version":"1"', b'"version":"2"'), "has version 2, expected 1"),
        (lambda content: changed(content, b'"statistics":"[]"', b'"statistics":"[3"'), "its running statistics are"),
    ],
)
def test_damaged_weights_are_refused(damage, message, tmp_path):
    step = exported(tmp_path)
    content = damage((tmp_path / "step.safetensors").read_bytes())
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path / "weights")
    if "SHA-256" in message or "cut" in message or "meaning" in message:  # what a client looks at
        with pytest.raises(ValueError, match="the weights are"):
            step.load(content)


def test_the_client_refuses_what_does_not_fit(tmp_path):
    step = exported(tmp_path, "digits")
    batch = next(batches("digits", 1))
    with pytest.raises(ValueError, match="labels has 10, expected 0 to 9"):
        step.train({**batch, "labels": np.full(10, 10)}, RATE)
    with pytest.raises(ValueError, match=r"pixels is float32 of shape \(10, 63\)"):
        step.train({**batch, "pixels": batch["pixels"][:, :63]}, RATE)
    with pytest.raises(ValueError, match="labels is missing"):
        step.train({"pixels": batch["pixels"]}, RATE)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="their SHA-256 or size is another"):
        step.load(exported(tmp_path / "other").content())
    model = tmp_path / "step.onnx"
    model.write_bytes(model.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"step.onnx is damaged, or of another export"):
        client().Step(tmp_path / "step.json").train(batch, RATE)


def rows(path, **shapes):
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((40, *shape)).astype(np.float32) for name, shape in shapes.items()}
    np.savez(path, **arrays)
    return path


def trained(text, folder, **shapes):
    """What the command says of a model with its own loss, and the folder of the run."""
    onnx.save(build(text, normal(v=(4, 3), w=(3, 4))), folder / "model.onnx")
    data = rows(folder / "data.npz", **shapes)
    options = ("--epochs", 2, "--output", folder / "out", "--export", folder / "exported.onnx")
    told = succeeds("train", folder / "model.onnx", "--data", data, *options)
    return told, folder / "out"


def outputs(path):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [each.name for each in session.get_inputs()], [each.name for each in session.get_outputs()]


def test_a_model_without_scores_reports_the_loss_alone(tmp_path):
    text = """g (float[batch, 4] a, float[batch, 4] b, float[batch, 1] t) => (float loss) {
        e = MatMul(a, v)  f = MatMul(b, v)  et = Mul(e, t)  ft = Mul(f, t)  d = Sub(et, ft)  q = Mul(d, d)
        loss = ReduceMean<keepdims = 0>(q)
    }"""
    told, out = trained(text, tmp_path, a=(4,), b=(4,), t=(1,))
    assert "no scores found that loss compares with a label: only the loss is reported" in told
    assert json.loads((out / "metrics.json").read_text())["test_accuracy"] is None
    for path in (out / "model.onnx", tmp_path / "exported.onnx"):
        assert outputs(path) == (["a", "b", "t"], ["loss"])


def test_an_error_after_the_training_names_the_checkpoint(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    write_linear_set(tmp_path)
    data = rows(tmp_path / "data.npz", x=(2,), y=(1,))
    monkeypatch.setattr(Trainer, "export", full)
    status, told = cli("train", tmp_path, "--data", data, "--epochs", 2, "--output", tmp_path / "out")
    assert (status, told.count("opgrad: ")) == (1, 1), told
    assert f"its parameters are in {tmp_path / 'out' / 'last.checkpoint'}, but: No space left" in told
    assert read_checkpoint(tmp_path / "out" / "last.checkpoint").trainable["w"].any()


def of_opgrad_alone(model):
    """Let a model have an operator that other runtimes lack."""
    model.graph.node[0].input[0] = "positive"
    model.graph.node.insert(0, onnx.helper.make_node("ReluGrad", ["x", "x"], ["positive"], domain="com.microsoft"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.graph.node[2].input.__setitem__(0, "nowhere"), "eval_model.onnx"),
        (lambda model: model.graph.node.pop(), "eval_model.onnx"),
        (of_opgrad_alone, "the model that would be exported of .*ReluGrad"),
    ],
    ids=["an eval graph without the score", "an eval graph without the loss", "an operator of opgrad alone"],
)
def test_what_cannot_be_exported_is_told_before_the_training(tmp_path, change, message):
    write_linear_set(tmp_path)
    model = onnx.load(tmp_path / "eval_model.onnx")
    change(model)
    onnx.save(model, tmp_path / "eval_model.onnx")
    data = rows(tmp_path / "data.npz", x=(2,), y=(1,))
    status, told = cli("train", tmp_path, "--data", data, "--output", tmp_path / "out")
    assert (status, (tmp_path / "out").exists()) == (1, False), told
    assert re.search(message, " ".join(told.split()))


# --- operators of onnxruntime ---

OF_ONNXRUNTIME = {
    "SimplifiedLayerNormalization": "n = SimplifiedLayerNormalization<axis = -1, epsilon = 0.00001>(h, scale)",
    "SkipLayerNormalization": "n = com.microsoft.SkipLayerNormalization(h, h, scale, shift)",
    "QuickGelu": "n = com.microsoft.QuickGelu<alpha = 1.702>(h)",
    "FusedMatMul": "n = com.microsoft.FusedMatMul<alpha = 0.5>(h, square)",
}


@pytest.mark.parametrize("operator", OF_ONNXRUNTIME)
def test_operators_that_onnx_does_not_know_are_exported(operator, tmp_path):
    """As the models of onnxruntime's own tools have them."""
    text = f"""g (float[batch, 6, 4] x) => (float[batch, 6, 3] y) {{
        h = MatMul(x, v)  {OF_ONNXRUNTIME[operator]}  y = MatMul(n, w)
    }}"""
    arrays = normal(v=(4, 8), square=(8, 8), w=(8, 3)) | {"scale": np.ones(8, "f4"), "shift": np.zeros(8, "f4")}
    model = build(text, arrays, domains=', "com.microsoft": 1')
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    data = rows(tmp_path / "data.npz", x=(6, 4), target=(6, 3))
    options = ("--loss", "mse", "--epochs", 2, "--output", tmp_path / "out", "--export", tmp_path / "exported.onnx")
    succeeds("train", tmp_path / "model.onnx", "--data", data, *options)
    for path in (tmp_path / "out" / "model.onnx", tmp_path / "exported.onnx"):
        assert operator in {node.op_type for node in onnx.load(path).graph.node}
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        assert session.run(None, {"x": np.ones((2, 6, 4), np.float32)})[0].shape == (2, 6, 3)
