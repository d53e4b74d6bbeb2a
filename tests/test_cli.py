"""The command line: what it prints, writes and returns."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from command import cli, fails, succeeds
from typer.testing import CliRunner

import opgrad
from opgrad.cli.app import app, operator_rows

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_train_writes_model_picture_and_metrics(tmp_path):
    folder = tmp_path / "out [of two]"
    text = succeeds("train", EXAMPLES / "digits", "--epochs", "2", "--output", folder)
    assert "out [of two]" in text
    assert re.search(r"test accuracy +\d\d\.\d\d%", text)
    assert "samples/s" in text
    assert sorted(path.name for path in folder.iterdir()) == [
        "last.checkpoint",
        "loss.png",
        "metrics.csv",
        "metrics.json",
        "metrics.jsonl",
        "model.onnx",
    ]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    metrics = json.loads((folder / "metrics.json").read_text())
    reference = json.loads((EXAMPLES / "digits" / "reference.json").read_text())
    assert metrics["train_loss_per_epoch"] == pytest.approx(reference["train_loss_per_epoch"][:2], rel=1e-3)
    assert metrics["exported_accuracy"] == metrics["test_accuracy"]
    assert metrics["settings"]["epochs"] == 2


def test_train_takes_settings_and_data_from_the_command_line(tmp_path):
    random = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=random.uniform(0, 16, (50, 64)), y=random.integers(0, 10, 50))
    (tmp_path / "set").mkdir()
    for path in (EXAMPLES / "digits").iterdir():
        if path.name != "recipe.toml":
            (tmp_path / "set" / path.name).write_bytes(path.read_bytes())
    options = ("--data", tmp_path / "own.npz", "--epochs", 3, "--lr", 0.01, "--batch-size", 7, "--seed", 5)
    succeeds("train", tmp_path / "set", *options, "--output", tmp_path / "out")
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["train_rows"], metrics["test_rows"]) == (40, 10)
    expected = {"epochs": 3, "learning_rate": 0.01, "batch_size": 7, "seed": 5}
    assert {name: metrics["settings"][name] for name in expected} == expected


@pytest.mark.parametrize(
    "words",
    [
        ("train",),
        ("train", "no/such/folder"),
        ("train", EXAMPLES / "digits", "--epochs", "0"),
        ("train", EXAMPLES / "digits", "--lr", "0"),
        ("train", EXAMPLES / "digits", "--lr", "nan"),
        ("train", EXAMPLES / "digits", "--data", "no-such-file.csv"),
        ("fly",),
    ],
)
def test_wrong_usage_exits_with_2(words):
    assert cli(*words)[0] == 2


def test_what_fails_is_told_in_one_line(tmp_path):
    text = fails("train", tmp_path)
    assert text.startswith("opgrad: ArtifactSet: ")
    np.save(tmp_path / "data.npy", np.zeros((3, 12)))
    text = fails("train", EXAMPLES / "digits", "--data", tmp_path / "data.npy", "--output", tmp_path / "out")
    assert "pixels has shape (3, 11), expected (batch, 64)" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("missing", "words", "message"),
    [
        ("flatbuffers", ("train", EXAMPLES / "digits"), 'pip install "opgrad[train]"'),
        ("matplotlib", ("train", EXAMPLES / "digits"), 'pip install "opgrad[train]"'),
        ("onnx", ("lower", EXAMPLES / "digits" / "eval_model.onnx", "-o", "x"), 'pip install "opgrad[onnx]"'),
        ("onnxruntime", ("lower", "--list"), 'pip install "opgrad[onnx]"'),
    ],
)
def test_the_extra_named_is_one_with_the_library(tmp_path, missing, words, message):
    """In a process of its own, where the library is missing from the start."""
    command = f"import sys; sys.modules[{missing!r}] = None; from opgrad.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, *map(str, words)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("opgrad: ")) == (1, 1)
    assert message in done.stderr.splitlines()[-1]


def test_ops_prints_every_operator():
    status, text = cli("ops")
    assert status == 0
    for name, *_ in operator_rows():
        assert name in text
    assert "SoftmaxCrossEntropyLossInternalGrad" in text


def test_help_explains_every_command():
    status, text = cli("--help")
    assert status == 0
    for command in app.registered_commands:
        assert command.callback is not None
        if command.hidden:
            continue
        name = command.name or command.callback.__name__
        assert cli(name, "--help")[0] == 0
        assert name in text


def test_version_and_completion(monkeypatch):
    assert cli("--version") == (0, f"opgrad {opgrad.__version__}\n")
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # or typer takes make's, sh
    status, script = cli("--show-completion", "bash")
    assert (status, "_OPGRAD_COMPLETE=complete_bash" in script) == (0, True)
    environment = {**os.environ, "_OPGRAD_COMPLETE": "complete_bash", "COMP_WORDS": "opgrad tra", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from opgrad.cli.app import app; app(prog_name='opgrad')"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["train"], done.stderr


@pytest.mark.parametrize("words", [("step", "-o", "step.onnx"), ("compile",), ("train",)])
def test_what_makes_an_artifact_set_is_said(tmp_path, words, monkeypatch):
    """To those who give a model, a file of a set, or a folder with a model in place of the set."""
    monkeypatch.chdir(tmp_path)
    model, set_folder = tmp_path / "my models" / "model.onnx", EXAMPLES / "digits"
    model.parent.mkdir()
    model.write_bytes((EXAMPLES / "digits_convolution" / "model.onnx").read_bytes())
    maker = f"`opgrad artifacts '{model}' --loss LOSS -o "
    cases = {model: f"{model} is a file, expected the folder of an artifact set; of a model {maker}FOLDER` makes one"}
    inside = set_folder / "training_model.onnx"
    cases[inside] = f"{inside} is a file, expected the folder of its set, {set_folder}"
    missing = "training_model.onnx, eval_model.onnx, optimizer_model.onnx, checkpoint"
    cases[model.parent] = f"{model.parent} has no {missing}; of a model {maker}'{model.parent}'` makes these files"
    if words[0] == "train":  # takes a model, and a folder with one
        no_data = f"train: no data for {model}, expected --data or a dataset named in recipe.toml beside it"
        assert cli("train", model.parent) == (1, f"opgrad: {no_data}\n")
        cases = {}
    for given, message in cases.items():
        assert cli(words[0], given, *words[1:]) == (1, f"opgrad: ArtifactSet: {message}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["my models"]


def test_folders_of_what_is_written_are_made(tmp_path):
    digits = EXAMPLES / "digits"
    assert cli("step", digits, "-o", tmp_path / "new" / "folder" / "x.onnx")[0] == 0
    assert (tmp_path / "new" / "folder" / "x.json").is_file()
    assert cli("lower", digits / "training_model.onnx", "-o", tmp_path / "low" / "x.onnx")[0] == 0
    assert (tmp_path / "low" / "x.onnx").is_file()
    words = "--epochs", 1, "--output", tmp_path / "run", "--export", tmp_path / "export" / "deep" / "x.onnx"
    assert cli("train", digits, *map(str, words))[0] == 0
    assert (tmp_path / "export" / "deep" / "x.onnx").is_file()
    missing, wrong = tmp_path / "none" / "deep", ("--momentum", "0.5")
    for words, out in (
        (("step", digits, *wrong, "-o"), missing / "x.onnx"),
        (("train", digits, "--momentum", "x", "--output", tmp_path / "run", "--export"), missing / "x.onnx"),
        (("compile", tmp_path, "--for", "x86-64-v3", "-o"), missing / "x.pack"),
    ):
        assert cli(*words, out)[0] in (1, 2)
        assert not missing.parent.exists()
    file = digits / "recipe.toml"
    for words in (
        ("step", digits, "-o", file / "x.onnx"),
        ("lower", digits / "training_model.onnx", "-o", file / "deep" / "x.onnx"),
        ("artifacts", EXAMPLES / "digits_lstm" / "model.onnx", "--loss", "mse", "-o", file / "x"),
        ("train", digits, "--output", tmp_path / "run", "--export", file / "x.onnx"),
        ("compile", digits, "--for", "x86-64-v3", "-o", file / "x.pack"),
    ):
        status, text = cli(*words)
        assert (status, f"{file} is a file, expected a folder for what is written" in text) == (1, True), text


@pytest.mark.parametrize("command", [each.name or each.callback.__name__ for each in app.registered_commands])
def test_help_does_not_break_inside_words(command):
    """In a terminal of 80 columns, every option and every word of its help stands in one piece."""
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    shown = set(re.sub("[│╭╮╰╯─]", " ", text).split())
    parameters = typer.main.get_command(app).commands[command].params
    for each in parameters:
        names = [*each.opts, *each.secondary_opts] if each.param_type_name == "option" else []
        missing = {*names, *(getattr(each, "help", None) or "").split()} - shown
        assert not missing, text
    (callback,) = (each.callback for each in app.registered_commands if command in (each.name, each.callback.__name__))
    assert set((inspect.getdoc(callback) or "").split()) <= shown


def test_settings_are_rounded_and_have_the_names_of_options(tmp_path):
    digits = EXAMPLES / "digits"
    settings = ["betas 0.9,0.999", "eps 1e-06", "weight-decay 0", "adam-mode 1", "bias-correction 1"]
    for words, name in (
        (("step", digits, "-o", tmp_path / "x.onnx"), "adamw: "),
        (("inspect", digits), "AdamWOptimizer: "),
    ):
        text = cli(*words)[1]
        assert [each for each in (name, *settings) if each not in text] == []
        assert "alpha" not in text
    written = cli("step", digits, "-o", tmp_path / "x.onnx", "--clip-norm", "0.5")[1]
    assert "clip-norm 0.5" in written
    assert "None" not in written


def test_the_module_runs_as_a_command(tmp_path):
    """In a process of its own, with a working folder of its own, where the results go by default."""
    command = [sys.executable, "-m", "opgrad", "train", str(EXAMPLES / "digits"), "--epochs", "1"]
    result = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs" / "digits" / "model.onnx").is_file()
    assert "Traceback" not in result.stderr


def options_of_commands():
    for name, command in typer.main.get_command(app).commands.items():
        for option in command.params:
            if option.param_type_name == "option":
                yield pytest.param(option, id=f"{name} {option.opts[0]}")


@pytest.mark.parametrize("option", [*options_of_commands()])
def test_help_is_a_sentence_and_names_the_default(option):
    """A flag's default is no; of a value other than None typer shows it."""
    assert option.help[0].isupper()
    assert option.help.endswith(".")
    assert not re.search(r"[a-z,] (The|A|How|What)\b", option.help), "two sentences in one"
    assert len(option.help.split()) >= 3
    is_shown = (option.default is not None and option.default != "") or option.required or option.name == "help"
    assert is_shown or "default: " in option.help.lower()
