"""The documents docs/start/tune.md and docs/guides/encoders.md with their examples, with fewer and shorter texts."""

import itertools
import shlex
import shutil

import pytest
from artifact_sets import EXAMPLES, loaded
from command import succeeds
from language_models import write_lines
from snippets import snippets

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


def script(name, monkeypatch):
    """The script of an example, whose model has one layer."""
    example = loaded(EXAMPLES / name / "make.py")
    monkeypatch.setattr(example, "LAYERS", 1)
    return example


def run(document, names):
    """Run the Python and the commands of a document."""
    for kind, _, code in snippets(document):
        if kind == "python":
            exec(compile(code, document, "exec"), names)
        for line in code.splitlines():
            if line.startswith("opgrad "):
                succeeds(*shlex.split(line)[1:])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the example, made small."""
    example = script("tune", monkeypatch)
    texts, chats = list(example.passages()), list(example.questions())
    assert len(texts) > 500
    assert len(chats) > 500
    monkeypatch.setattr(example, "passages", lambda: [each[:100] for each in texts[:60]])
    monkeypatch.setattr(example, "questions", lambda: chats[:60])
    (tmp_path / "examples" / "tune").mkdir(parents=True)
    example.make(tmp_path / "examples" / "tune")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tutorial(folder):
    """What stands in docs/start/tune.md runs."""
    names = {}
    run("docs/start/tune.md", names)
    assert names["scores"].shape == (1, 3, 1024)
    assert (folder / "merged" / "model.onnx").is_file()


def test_guide_of_encoders(tmp_path, monkeypatch):
    """What stands in docs/guides/encoders.md runs; a classifier and a reranker begin with the embedding model."""
    example = script("embed", monkeypatch)
    rows = itertools.islice(example.pairs(), 450)  # of which 400 validate
    found = [{name: text[:60] for name, text in row.items()} for row in rows]
    monkeypatch.setattr(example, "pairs", lambda: found)
    example.make(tmp_path / "examples" / "embed")
    monkeypatch.chdir(tmp_path)
    for name in ("encoder", "cross-encoder"):
        shutil.copytree(tmp_path / "examples" / "embed" / "model", tmp_path / name)
    texts = [{"text": each["anchor"], "label": "neg" if place % 2 else "pos"} for place, each in enumerate(found[:60])]
    triplets = [{**each, "negative": found[place]["positive"]} for place, each in enumerate(found[1:60])]
    write_lines(tmp_path / "texts.jsonl", texts)
    write_lines(tmp_path / "triplets.jsonl", triplets)
    names = {}
    run("docs/guides/encoders.md", names)
    assert all(0 < each < 1 for each in names["run"].figures["nDCG@10"])  # how good few steps are, no test decides
    assert (tmp_path / "reranker" / "onnx" / "model.onnx").is_file()
