"""What reaches a terminal: text, and nothing that acts on it."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from small_models import build, normal
from typer.testing import CliRunner

from opgrad.base.terminal import console, visible
from opgrad.cli.app import app

HOSTILE = "w\x1b[31m\x07\x9b2J\rOK\nopgrad: all is well\u202e\u2028"
SHOWN = r"w\x1b[31m\x07\x9b2J\rOK\nopgrad: all is well\u202e\u2028"
SAFE = {"\n"}  # of the command itself


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("weight.é 日本 [1]", "weight.é 日本 [1]"),
        (HOSTILE, SHOWN),
        ("\udcff\t", r"\udcff\t"),
        ("a\xa0b", "a\xa0b"),
        ("", ""),
    ],
)
def test_what_acts_is_written_out(text, expected):
    assert visible(text) == expected


def test_a_console_shows_text_in_one_line(capsys):
    console(width=200).print(HOSTILE, "[b]no markup[/b]")
    assert capsys.readouterr().out == f"{SHOWN} [b]no markup[/b]\n"


def hostile_model(path):
    """Names of inputs, weights, nodes, values, outputs and metadata that would act on a terminal."""
    model = build("g (float[batch, 4] x) => (float[batch, 3] y) { m = MatMul(x, w)  y = Det(m) }", normal(w=(4, 3)))
    graph, names = model.graph, {name: f"{name}{HOSTILE}" for name in ("x", "w", "m", "y")}
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names[value.name]
    for node in graph.node:
        node.name += HOSTILE
        node.input[:] = [names[name] for name in node.input]
        node.output[:] = [names[name] for name in node.output]
    graph.input[0].type.tensor_type.shape.dim[0].dim_param += HOSTILE
    graph.name = model.producer_name = HOSTILE
    model.metadata_props.add(key=HOSTILE, value=HOSTILE)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "MODEL"),
        ("inspect", "--json", "MODEL"),
        ("artifacts", "MODEL", "--loss", "mse", "-o", "OUT"),
        ("artifacts", "MODEL", "-o", "OUT"),
        ("train", "MODEL", "--loss", "mse", "--data", "DATA"),
        ("lower", "MODEL", "-o", "OUT.onnx"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("has_gradient", [False, True])
def test_names_of_a_model_do_not_act_on_the_terminal(tmp_path, words, has_gradient):
    path = hostile_model(tmp_path / "model.onnx")
    if has_gradient:
        model = onnx.load(path)
        model.graph.node[1].op_type = "Tanh"
        onnx.save(model, path)
    np.savez(tmp_path / "data.npz", x=np.zeros((3, 4)))
    places = {"MODEL": path, "OUT": tmp_path / "out", "OUT.onnx": tmp_path / "out.onnx", "DATA": tmp_path / "data.npz"}
    result = CliRunner().invoke(app, [str(places.get(word, word)) for word in words], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    acting = {each for each in result.output if visible(each) != each} - SAFE
    assert not acting, result.output
    assert not any(line.startswith("opgrad: all is well") for line in result.output.splitlines())
    if words[0] != "lower":  # which names operators alone
        assert r"\x1b" in result.output.replace("\\u001b", "\\x1b")


def test_an_error_that_nobody_expected_is_shown_without_what_acts(tmp_path):
    command = f"""
from opgrad.cli import app, main
def fail():
    raise LookupError({HOSTILE!r})
app.app.command()(fail)
main()
"""
    done = subprocess.run([sys.executable, "-c", command, "fail"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert {each for each in done.stderr if visible(each) != each} <= SAFE
    assert r"LookupError: w\x1b[31m" in done.stderr


def test_an_artifact_set_whose_folder_would_act(tmp_path):
    """Its name stands in the title of the bar."""
    import io

    from opgrad.training.run.report import TrainingBar

    screen = console(file=io.StringIO(), width=200)
    with TrainingBar(screen, HOSTILE) as shown:
        shown(1, 2, 1.0, None, 1.0)
        shown(2, 2, 1.0, None, 1.0)
    assert {each for each in screen.file.getvalue() if visible(each) != each} <= SAFE
