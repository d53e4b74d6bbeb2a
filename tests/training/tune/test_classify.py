"""Classifiers and rerankers: losses beside torch, new heads and those that are there, figures, what is refused."""

import json

import numpy as np
import onnxruntime
import pytest
from language_models import write_lines
from typer.testing import CliRunner

pytest.importorskip("tokenizers")
pytest.importorskip("torch")

import torch
from encoders import make_encoder
from torch.nn import functional

from opgrad.cli.app import app
from opgrad.training.engine.trainer import Trainer
from opgrad.tune import Tuner

NOUNS, COLOURS = ("cat", "dog", "bird", "fish"), ("red", "blue", "small")


def sentences(count=96, several=False):
    """Texts about things, of which the label is what they eat, or in which several words are to be found."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(count):
        noun, colour, other = generator.choice(NOUNS), generator.choice(COLOURS), generator.choice(NOUNS)
        label = [each for each in ("cat", "red", "blue") if each in (noun, colour)] if several else str(colour)
        found.append({"text": f"the {colour} {noun} sees", "text_pair": f"a {other}", "label": label})
    return found


def queries(count=96, labelled=False):
    """Questions with a right text and two wrong ones, or with one of which the label says whether it is right."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(count):
        noun, *others = generator.choice(NOUNS, 3, replace=False)
        if labelled:
            label = int(generator.integers(2))
            text = f"the {noun if label else others[0]} eats"
            found.append({"query": f"what is {noun}", "passage": text, "label": label})
            continue
        texts = [f"the {each} eats" for each in (noun, *others)]
        found.append({"query": f"what is {noun}", "positive": texts[0], "negatives": texts[1:]})
    return found


CASES = {
    "classify": (sentences(), COLOURS),
    "classify, labels=red|blue|small, weights=1|2|0.5": (sentences(), COLOURS),
    "classify, labels=cat|red|blue, several=true, weights=1|2|3": (sentences(several=True), ("cat", "red", "blue")),
    "rank": (queries(), ("score",)),
    "rank, loss=binary": (queries(labelled=True), ("score",)),
    "rank, loss=listwise": (queries(), ("score",)),
}


def loss_in_torch(task, scores, lines, labels):
    """The loss of the scores of all texts, first of the first texts of all lines."""
    weights = torch.tensor([1, 2, 0.5]) if "0.5" in task else None
    if "several" in task:
        target = torch.tensor([[float(each in line["label"]) for each in labels] for line in lines])
        losses = functional.binary_cross_entropy_with_logits(scores, target, reduction="none")
        return (losses * torch.tensor([1.0, 2, 3])).mean()
    if "classify" in task:
        return functional.cross_entropy(scores, torch.tensor([labels.index(each["label"]) for each in lines]), weights)
    scores = scores.reshape(-1, len(lines)).T
    if "listwise" in task:
        return functional.cross_entropy(scores, torch.zeros(len(lines), dtype=torch.int64))
    target = torch.tensor([[float(each.get("label", 1)), 0, 0][: scores.shape[1]] for each in lines])
    return functional.binary_cross_entropy_with_logits(scores, target)


@pytest.mark.parametrize("task", CASES)
def test_losses_are_those_of_torch(tmp_path, task):
    lines, labels = CASES[task]
    encoder = make_encoder(tmp_path / "model", None, labels)
    adapted = Tuner(tmp_path / "model", train="*", task=task).adapted
    rows = adapted.task.rows(adapted, adapted.examples(write_lines(tmp_path / "data.jsonl", lines)), 16)
    trainer = Trainer(adapted.setting(*rows.shape()).artifacts, 1e-3)
    optimizer = torch.optim.AdamW(encoder.parameters(), 1e-3, weight_decay=0.0)
    generator, found, expected = np.random.default_rng(1), [], []
    for _ in range(20):
        chosen = generator.choice(len(lines), 16, replace=False)
        batch = rows.take(chosen).arrays
        found.append(trainer.step({spec.name: batch[spec.name] for spec in trainer.artifacts.inputs}))
        inputs = [torch.from_numpy(batch[name]) for name in ("input_ids", "attention_mask", "token_type_ids")]
        loss = loss_in_torch(task, encoder(*inputs), [lines[row] for row in chosen], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("task", CASES)
def test_new_heads(tmp_path, task):
    """Adapters and a new head; the scores of what is written are those that training had, and it is trained further."""
    lines, labels = CASES[task]
    make_encoder(tmp_path / "model", "mean")
    data = write_lines(tmp_path / "data.jsonl", lines)
    if task == "classify":
        with pytest.raises(ValueError, match=r"task has no labels, and .* has no head, expected labels=A\|B"):
            Tuner(tmp_path / "model", task=task)
        task = "classify, labels=red|blue|small"
    tuner = Tuner(tmp_path / "model", task=task)
    assert {"classifier.weight", "classifier.bias"} < {*tuner.adapted.setting().artifacts.trainable}
    run = tuner.fit(data, tmp_path / "out", epochs=8, learning_rate=1e-2, validation=24, batch_size=16)
    assert {"accuracy", "F1"} == {*run.figures} if "classify" in task else "nDCG@10" in run.figures
    assert run.state.history[-1].train_loss < run.state.history[0].train_loss
    if "small" in task:
        assert run.figures["F1"][1] > run.figures["F1"][0] + 0.2
    again = Tuner(tmp_path / "out", task=task.split(",")[0] + (", several=true" if "several" in task else ""))
    adapted = tuner.adapted
    rows = adapted.task.rows(adapted, adapted.examples(data), 16)
    given = {name: array for name, array in rows.take(np.arange(8)).arrays.items() if name in rows.inputs}
    session = onnxruntime.InferenceSession(tmp_path / "out" / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    scores = session.run(["logits"], given)[0]
    np.testing.assert_allclose(scores, adapted.computing()(given), atol=1e-5)
    np.testing.assert_allclose(scores, again.adapted.computing()(given), atol=1e-5)
    if "classify" in task:
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert list(config["id2label"].values()) == list(labels)
    more = again.fit(data, tmp_path / "more", learning_rate=1e-3, batch_size=16)
    assert more.state.history[0].train_loss < run.state.history[0].train_loss


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("classify", {"text": "the"}, "line 2: it has 'text', expected text, perhaps text_pair, and label"),
        ("classify", {"text": "the", "label": "green"}, "line 2: label is 'green', expected one of red, blue, small"),
        ("classify", {"text": "the", "label": 3}, "line 2: label is 3, expected one of red, blue, small"),
        (
            "classify",
            {"text": "the", "labels": ["red", "blue"]},
            "line 2: it has 2 labels, expected one, or the",
        ),
        ("rank", {"query": "the", "passage": "a"}, "line 2: it has no label and no negative, expected query, passage"),
        ("rank", {"query": "the", "passage": "a", "label": 4}, "line 2: label is 4, expected a number from 0 to 1"),
        ("rank, loss=listwise", {"query": "a", "passage": "a", "label": 1}, "line 2: label is 1, expected .*, or none"),
    ],
)
def test_wrong_rows(tmp_path, task, row, message):
    make_encoder(tmp_path / "model", None, COLOURS if "classify" in task else ("score",))
    adapted = Tuner(tmp_path / "model", task=task).adapted
    first = {"text": "a", "label": 1} if "classify" in task else {"query": "a", "positive": "b", "negative": "c"}
    with pytest.raises(ValueError, match=message):
        adapted.examples(write_lines(tmp_path / "data.jsonl", [first, row]))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("classify, labels=a|b", "has 3 scores, expected 2 for the task classify"),
        ("classify, labels=a", r"labels is \('a',\), expected several different names"),
        ("classify, labels=a|b|c, weights=1|2", r"weights is \(1.0, 2.0\), expected a number above 0 for each"),
        ("rank", "has 3 scores, expected 1 for the task rank"),
        ("rank, loss=triplet", "loss is 'triplet', expected binary or listwise"),
    ],
)
def test_wrong_options(tmp_path, task, message):
    make_encoder(tmp_path / "model", None, COLOURS)
    with pytest.raises(ValueError, match=message):
        Tuner(tmp_path / "model", task=task)


def test_numbers_of_tables(tmp_path):
    """A .csv file has them as texts."""
    for name, labels in (("classify", COLOURS), ("rank", ("score",))):
        make_encoder(tmp_path / name, None, labels)
    (tmp_path / "data.csv").write_text("query,passage,label\nthe,a,1\na,the,0\n")
    found = [Tuner(tmp_path / name, task=name).adapted.examples(tmp_path / "data.csv") for name in ("classify", "rank")]
    assert found[0].targets.tolist() == [1, 0]
    assert found[1].targets[:, 0].tolist() == [1, 0]


def test_command(tmp_path):
    make_encoder(tmp_path / "model", None, COLOURS)
    data = write_lines(tmp_path / "data.jsonl", sentences())
    given = ["tune", str(tmp_path / "model"), "--task", "classify", "--data", str(data), "--validation", "16"]
    done = CliRunner().invoke(app, [*given, "--lr", "0.01", "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "accuracy" in done.output
    assert "F1" in done.output
