"""The tutorial docs/start/tune.md and examples/tune, with fewer texts."""

import importlib.util
import shlex

import pytest
from snippets import ROOT, snippets
from typer.testing import CliRunner

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from opgrad.cli.app import app

EXAMPLE = ROOT / "examples" / "tune" / "make.py"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the example, made small."""
    spec = importlib.util.spec_from_file_location("make", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "LAYERS", 1)
    texts, chats = list(example.passages()), list(example.questions())
    assert len(texts) > 500
    assert len(chats) > 500
    monkeypatch.setattr(example, "passages", lambda: texts[:60])
    monkeypatch.setattr(example, "questions", lambda: chats[:60])
    (tmp_path / "examples" / "tune").mkdir(parents=True)
    example.make(tmp_path / "examples" / "tune")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tutorial(folder):
    """What stands in docs/start/tune.md runs."""
    names = {}
    for kind, _, code in snippets("docs/start/tune.md"):
        if kind == "python":
            exec(compile(code, "tune.md", "exec"), names)
        for line in code.splitlines():
            if line.startswith("opgrad "):
                result = CliRunner().invoke(app, shlex.split(line)[1:])
                assert result.exit_code == 0, (line, result.output)
    assert names["scores"].shape == (1, 3, 1024)
    assert (folder / "merged" / "model.onnx").is_file()
