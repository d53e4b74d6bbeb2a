"""`python -m bench.steps`: what it measures and writes, not how fast anything is."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import report
from artifact_sets import EXAMPLES, write_linear_set
from bench_results import made_up_result

import bench.steps.run as training
import opgrad
from bench.steps import generated
from bench.steps.__main__ import main
from bench.steps.run import OLD_API, StepOptions, examples, run
from bench.steps.run import measure_set as measure
from bench.steps.tables import GENERATED_COLUMNS, attention_rows, drawing, generated_rows, parts, rows
from bench.tables import text as text_of
from opgrad.training import ArtifactSet, Trainer
from opgrad.training.run.job import sample_batch

START = training.start
OLD_RUNTIME = """
import json, sys
print("{}", flush=True)
print(json.dumps({"loss": LOSS}), flush=True)
print(json.dumps({"versions": {"python": "3.9"}}), flush=True)
for line in sys.stdin:
    print(json.dumps(2**26 if line == "resident\\n" else [1e-3, 2e-3, 3e-3]), flush=True)
"""


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Nobody's threads spin, for which a turn would wait."""
    opgrad.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_starts(monkeypatch):
    """No process compiles everything for a first step."""
    started = {"first": {"warm": 1.0}, "resident": {}}
    monkeypatch.setattr(training, "start", lambda of, batch, _: {"set": of.name, "batch": batch, **started})


def text_of_result(result):
    return text_of(parts(result))


def made_up_training():
    times = {"step": 1e-3, "graph": 6e-4, "optimizer": 1e-4, "torch": 3e-3, "old": 2e-3, "old optimizer": 4e-4}
    cell = {
        "set": "digits", "batch": 4, "parameters": 7, "loss": 1.0,
        "times": {name: {"median": t, "minimum": t, "samples": 1} for name, t in times.items()},
        "old_versions": {"python": "3.9"},
    }  # fmt: skip
    bare = {"set": "other", "batch": 4, "parameters": 7, "loss": 1.0, "notes": {"torch": "no torch model"}}
    bare["times"] = {name: cell["times"][name] for name in ("step", "graph", "optimizer")}
    first, resident = {"cold": 4.0, "warm": 0.5, "old": 0.4}, {"cold": 8e7, "warm": 7e7, "old": 6e7}
    starts = [{"set": "digits", "batch": 4, "first": first, "resident": resident}]
    return {**made_up_result([]), "cells": [], "training": [cell, bare], "starts": starts}


def test_a_step_has_all_its_parts():
    pytest.importorskip("torch")
    artifacts = ArtifactSet.load(EXAMPLES / "digits")
    cell = measure(artifacts, 4, 0.0, None)
    assert set(cell["times"]) == {"step", "graph", "optimizer", "torch"}
    assert all(taken["median"] > 0 for taken in cell["times"].values())
    assert cell["parameters"] == 17226
    assert "notes" not in cell
    assert cell["loss"] == Trainer(artifacts).compute_gradients(sample_batch(artifacts, 4))


def test_torch_computes_the_same_step():
    exported = pytest.importorskip("bench.steps.models")
    artifacts = ArtifactSet.load(EXAMPLES / "digits")
    data = sample_batch(artifacts, 9)
    step = exported.chain_step(artifacts, data, 1)
    expected = Trainer(artifacts).compute_gradients(data)
    assert [float(step()), float(step())] == pytest.approx([expected, expected], rel=1e-6)  # the learning rate is 0


def test_a_graph_that_is_no_chain_has_no_torch_model():
    exported = pytest.importorskip("bench.steps.models")
    with pytest.raises(NotImplementedError, match="no torch model is built of Gather"):
        exported.chain(onnx.load(EXAMPLES / "digits_attention" / "eval_model.onnx").graph, {})


def test_a_batch_comes_from_the_recipe_or_by_chance(tmp_path):
    data = sample_batch(ArtifactSet.load(EXAMPLES / "digits"), 1800)
    np.testing.assert_array_equal(data["pixels"][:3], data["pixels"][1797:])
    write_linear_set(tmp_path)
    data = sample_batch(ArtifactSet.load(tmp_path), 5)
    assert {name: (array.shape, array.dtype) for name, array in data.items()} == {
        "x": ((5, 2), np.dtype(np.float32)),
        "y": ((5, 1), np.dtype(np.float32)),
    }


def old_runtime(monkeypatch, tmp_path, loss):
    """This Python in the old one's place, with a script that makes up its answers."""
    script = tmp_path / "script.py"
    script.write_text(OLD_RUNTIME.replace("LOSS", repr(loss)))
    monkeypatch.setattr(training.api_step, "__file__", str(script))
    return Path(sys.executable)


def test_the_old_runtime_takes_its_turns_in_a_process_of_its_own(monkeypatch, tmp_path):
    artifacts = ArtifactSet.load(EXAMPLES / "digits")
    loss = Trainer(artifacts).compute_gradients(sample_batch(artifacts, 4))
    cell = measure(artifacts, 4, 0.0, old_runtime(monkeypatch, tmp_path, loss))
    assert cell["times"]["old"]["median"] == cell["times"]["old optimizer"]["median"] == 2e-3
    assert cell["old_versions"] == {"python": "3.9"}


def test_a_start_is_measured_cold_warm_and_beside_the_old_runtime(monkeypatch, tmp_path):
    """All three in the made-up runtime's place."""
    python = old_runtime(monkeypatch, tmp_path, 1.0)
    found = START(ArtifactSet.load(EXAMPLES / "digits"), 4, python)
    assert set(found["first"]) == {"cold", "warm", "old"}
    assert found["resident"] == dict.fromkeys(("cold", "warm", "old"), 2**26)


def test_a_start_of_our_own(tmp_path):
    """A step of a set by `opgrad.training.api` in a process as the benchmark starts it."""
    write_linear_set(tmp_path)
    data = sample_batch(ArtifactSet.load(tmp_path), 5)
    with training.step_process(Path(sys.executable), training.OWN_API, tmp_path, data) as started:
        assert started.seconds > 0
        assert min(started.turn("step")) > 0
        assert started.turn("resident") is None or started.turn("resident") > 1e7


def test_a_peer_with_another_loss_is_left_out(monkeypatch, tmp_path):
    artifacts = ArtifactSet.load(EXAMPLES / "digits_attention")
    cell = measure(artifacts, 4, 0.0, old_runtime(monkeypatch, tmp_path, 77.0))
    assert "old" not in cell["times"]
    assert "old optimizer" not in cell["times"]
    assert "its loss is 77" in cell["notes"]["old"]


def test_a_set_that_the_old_runtime_refuses_has_a_note(monkeypatch, tmp_path):
    python = old_runtime(monkeypatch, tmp_path, 1.0)
    (tmp_path / "script.py").write_text("import sys\nprint('{}', flush=True)\nsys.exit('AttentionTraining is unknown')")
    artifacts = ArtifactSet.load(EXAMPLES / "digits")
    cell = measure(artifacts, 4, 0.0, python)
    assert "old" not in cell["times"]
    assert "AttentionTraining is unknown" in cell["notes"]["old"]
    assert set(START(artifacts, 4, python)) == {"set", "batch", "left_out"}


def test_a_python_without_the_old_runtime_is_named():
    data = {"x": np.zeros(2, np.float32)}
    with (
        pytest.raises(RuntimeError, match="no/python cannot be run: No such file"),
        training.step_process(Path("no/python"), OLD_API, EXAMPLES / "digits", data),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match=r"the process that trains ended: .*onnxruntime"),
        training.step_process(Path(sys.executable), OLD_API, EXAMPLES / "digits", data),
    ):
        pass


def test_the_command_writes_a_result_file(tmp_path, capsys):
    write_linear_set(tmp_path)
    file, picture = tmp_path / "out" / "training-x.json", tmp_path / "x.png"
    files = ["--json", str(file), "--plot", str(picture)]
    main([str(tmp_path), "--batches", "3,5", "--seconds", "0", *files])
    assert "optimizer" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert [(cell["set"], cell["batch"]) for cell in result["training"]] == [(tmp_path.name, 3), (tmp_path.name, 5)]
    assert result["cells"] == []
    assert "no torch model" in text_of_result(result)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_set_that_cannot_run_is_left_out(tmp_path, capsys):
    write_linear_set(tmp_path)
    model = onnx.load(tmp_path / "training_model.onnx")
    model.graph.node[-2].op_type, model.graph.node[-2].domain = "NoSuchOperator", "com.microsoft"
    onnx.save(model, tmp_path / "training_model.onnx")
    main([str(tmp_path), "--batches", "3", "--seconds", "0", "--json", str(tmp_path / "x.json")])
    text = capsys.readouterr().out
    assert f"left out: {tmp_path.name}, batch 3: " in text
    assert "NoSuchOperator" in text
    assert list(rows(json.loads((tmp_path / "x.json").read_text()))) == []


def test_the_examples_are_the_default():
    assert [path.name for path in examples()] == ["digits", "digits_attention"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batches", "4,x"], "bench: batches is '4,x', expected numbers of rows such as 4,50,500"),
        (["--models", "VGG"], "bench: models is 'VGG', expected one of "),
        (["--isa", "sse"], "bench: isa is 'sse', expected of avx2, avx512"),
    ],
)
def test_unknown_names_are_refused(words, message):
    with pytest.raises(SystemExit, match="^" + re.escape(message)):
        main(words)


def test_an_architecture_is_measured_beside_torch(monkeypatch, tmp_path):
    """The set for the old runtime has no operator that it lacks."""
    exported = pytest.importorskip("bench.steps.models")
    *_, of_old = exported.architecture("ViT", tmp_path)
    kinds = [
        {node.op_type for node in onnx.load(path / "training_model.onnx").graph.node}
        for path in (of_old, tmp_path / "ViT")
    ]
    assert "AttentionTraining" not in kinds[0]
    assert "AttentionTraining" in kinds[1]
    assert len(onnx.load(of_old / "training_model.onnx").graph.output) == len(
        onnx.load(tmp_path / "ViT" / "training_model.onnx").graph.output
    )
    result = run(StepOptions(models="ViT", seconds=0.0), lambda *_: None)
    (cell,) = result["training"]
    assert (cell["set"], cell["batch"]) == ("ViT", 8)
    assert set(cell["times"]) == {"step", "graph", "optimizer", "torch"}
    assert "notes" not in cell
    assert result["starts"] == result["generated"] == []


def test_interruption_keeps_what_is_measured(monkeypatch):
    seen = []

    def stand_in(artifacts, batch, *rest):
        if seen:
            raise KeyboardInterrupt
        seen.append(batch)
        return {"batch": batch}

    monkeypatch.setattr(training, "measure_set", stand_in)
    result = run(StepOptions(batches="4,5"), lambda *_: None, [EXAMPLES / "digits"])
    assert result["training"] == [{"batch": 4}]
    with pytest.raises(KeyboardInterrupt):
        run(StepOptions(batches="4,5"), lambda *_: None, [EXAMPLES / "digits"])


def test_tables_say_what_python_takes_and_how_the_best_peer_does():
    first, second = rows(made_up_training())
    assert first == ["digits", "4", "1 ms", "600 µs", "100 µs", "300 µs", "3 ms", "2 ms", "400 µs", "2.00"]
    assert second == ["other", "4", "1 ms", "600 µs", "100 µs", "300 µs", "", "", "", ""]
    text = text_of_result(made_up_training())
    assert "| digits | 4 | 1 ms | 600 µs | 100 µs | 300 µs | 3 ms | 2 ms | 400 µs | 2.00 |" in text
    assert "Old runtime: python 3.9." in text
    assert "Over 1 cells a step is 2.00 times as fast as the old runtime's (geometric mean)." in text
    assert "| digits | 4 | 4.00 s | 0.50 s | 0.40 s | 70 MB | 80 MB | 60 MB | 10 MB |" in text
    assert "* left out: other, batch 4, torch: no torch model" in text


def test_documents_get_the_table_and_keep_it_apart_from_the_cells(tmp_path):
    assert report.training_steps(tmp_path, tmp_path) == report.NO_RESULT
    (tmp_path / report.RESULTS).mkdir(parents=True)
    (tmp_path / report.RESULTS / "training-x.json").write_text(json.dumps(made_up_training()))
    assert report.training_steps(tmp_path, tmp_path).startswith("#### Training steps: AVX2, A CPU (a)\n\nA CPU")
    assert report.results(tmp_path, "cpu") == {}
    assert report.result_pages(tmp_path, tmp_path) == report.NO_RESULT


def test_gradients_are_generated_anew_beside_the_old_graph():
    artifacts = ArtifactSet.load(EXAMPLES / "digits")
    cell = training._generated(artifacts, 3, 0.0)
    assert set(cell["times"]) == {"generated", "segments", "old graph"}
    assert "notes" not in cell
    assert cell["peak"]["generated"] > 0
    (row,) = generated_rows({"generated": [cell]})
    assert len(row) == len(GENERATED_COLUMNS)
    assert "| 2 segments' peak |" in text_of_result({**made_up_training(), "generated": [cell]})


def test_models_of_torch_are_exported_and_differentiated(monkeypatch):
    """Normalizations stay apart from convolutions, and all parameters keep their names."""
    torch = pytest.importorskip("torch")
    from bench.steps import models

    layers = torch.nn.Conv2d(1, 2, 3, bias=False), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    tiny = torch.nn.Sequential(*layers)

    def batch(rows):
        return torch.randn(rows, 1, 4, 4), torch.randint(0, 3, (rows,))

    monkeypatch.setattr(models, "MODELS", {"tiny": (lambda: tiny, 2, batch)})
    subject = models.subject("tiny")
    assert set(subject.parameters) == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
    cell = generated.measure(subject, 0.0)
    assert set(cell["times"]) == {"generated", "segments", "torch"}
    assert "notes" not in cell


@pytest.mark.parametrize("name", ["GPT-2-1024", "Llama-1024"])
def test_attention_in_tiles_is_measured_beside_matrices_of_scores(name, monkeypatch):
    pytest.importorskip("torch")
    from bench.steps import models

    sizes = models.Long(length=300, blocks=1, words=16, gpt2=(24, 12), llama=(32, 8, 2, 40))
    monkeypatch.setattr(models, "LONG", sizes)
    found = generated.measure_attention(models.subject(name), 0)
    assert "notes" not in found
    assert found["peak"]["tiles"] < 0.6 * found["peak"]["scores"]
    result = made_up_training() | {"training": [], "attention": [found]}
    assert json.loads(json.dumps(result)) == result
    (row,) = attention_rows(result)
    assert row[0] == name
    assert "peak with scores" in text_of_result(result)


def test_training_steps_have_a_bar_for_each_contestant():
    times = {name: {"median": seconds} for name, seconds in (("step", 1e-3), ("torch", 2e-3))}
    cells = [{"set": "a", "batch": 4, "times": times}, {"set": "b", "batch": 4, "left_out": "why"}]
    results = [made_up_result([]) | {"training": cells} for _ in range(2)]
    (axes,) = drawing(results[0]).axes
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a, 4 rows"]
    results[1]["machine"] |= {"vector_bits": 512}
    (axes,) = drawing(*results).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a, 4 rows, AVX2", "a, 4 rows, AVX-512"]
    assert drawing(made_up_result([]) | {"training": []}) is None
