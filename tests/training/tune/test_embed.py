"""Embedding models, classifiers and rerankers: losses beside torch, heads, figures, files, what is refused."""

import contextlib
import json
import signal

import numpy as np
import onnx
import onnxruntime
import pytest
from command import succeeds
from language_models import write_lines

pytest.importorskip("tokenizers")
pytest.importorskip("torch")

import tokenizers
import torch
from encoders import (
    COLOURS,
    NOUNS,
    losses_beside_torch,
    make_encoder,
    pairs,
    session_options,
    step_in_torch,
    stock_vectors,
)
from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static
from torch.nn import functional

from opgrad.training.engine.trainer import Trainer
from opgrad.training.run.fit import Interrupted
from opgrad.tune import Tuner
from opgrad.tune.tasks.embed import ranked

CLASS_NOUNS, CLASS_COLOURS = tuple(NOUNS[:4]), tuple(COLOURS[:3])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("data") / "data.jsonl", pairs())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folders of an encoder that embeds, and of those with a head for three classes and for one score."""
    folder = tmp_path_factory.mktemp("encoders")
    for name, labels in (("embed", ()), ("classify", CLASS_COLOURS), ("rank", ("score",))):
        make_encoder(folder / name, None if labels else "mean", labels)
    return {each.name: each for each in folder.iterdir()}


@pytest.fixture(scope="module")
def model(models):
    return models["embed"]


@pytest.mark.parametrize(
    ("pooling", "options", "sizes", "temperature", "negatives"),
    [
        ("mean", "", [32], 0.05, 0),
        ("mean", ", sizes=8|16|32, temperature=0.1", [8, 16, 32], 0.1, 2),
        ("cls", ", chunk=8", [32], 0.05, 1),
        ("last", "", [32], 0.05, 1),
    ],
)
@pytest.mark.one_in(2)
def test_fifty_losses_are_those_of_torch(tmp_path, pooling, options, sizes, temperature, negatives):
    encoder = make_encoder(tmp_path / "model", pooling)
    tuner = Tuner(tmp_path / "model", train="*", task=f"embed{options}", weight_decay=0.01)
    data = write_lines(tmp_path / "data.jsonl", pairs(negatives=negatives))
    optimizer = torch.optim.AdamW(encoder.parameters(), 2e-3, weight_decay=0.01)
    found, expected = losses_beside_torch(tuner, data, encoder, optimizer, 50, pooling, sizes, temperature)
    assert expected[-1] < expected[0] / 2
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


class Calibration(CalibrationDataReader):
    def __init__(self):
        self.batches = iter(
            [{name: np.ones((2, 6), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}]
        )

    def get_next(self):
        return next(self.batches, None)


def fused(file, written):
    """As onnxruntime writes what it makes of a model: scores are products with a factor."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = str(written), 4
    onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    assert "FusedMatMul" in {node.op_type for node in onnx.load(written).graph.node}


MAKERS = {"int8": quantize_dynamic, "qdq": lambda file, to: quantize_static(file, to, Calibration()), "fused": fused}


@pytest.mark.parametrize("kind", ["lora", "weights", "chunks", *MAKERS])
def test_the_output_runs_where_the_model_ran(tmp_path, model, data, kind):
    """The vectors of what is written are those that training had; the part that validates is found better."""
    file = model / "onnx" / "model.onnx"
    if kind in MAKERS:
        file = model / "onnx" / f"model_{kind}.onnx"
        MAKERS[kind](model / "onnx" / "model.onnx", file)
    task = "embed, chunk=8" if kind == "chunks" else "embed"
    tuner = Tuner(file if kind in MAKERS else model, task=task, train=["*"] if kind == "weights" else ())
    run = tuner.fit(data, tmp_path / "out", epochs=3, learning_rate=1e-2, validation=24, batch_size=16)
    (before, after), written = run.figures["nDCG@10"], tmp_path / "out" / "onnx" / file.name
    assert after > before + 0.1
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["figures"]["nDCG@10"] == [before, after]
    assert run.perplexities() == []
    assert {each.relative_to(model).as_posix() for each in model.rglob("*.json")} <= set(run.files)
    adapted = tuner.adapted
    rows = adapted.task.rows(adapted, adapted.examples(data), 16)
    given, vectors = stock_vectors(written, rows)
    np.testing.assert_allclose(vectors, adapted.computing()(given), atol=1e-5)
    types = {node.op_type for node in onnx.load(written).graph.node}
    assert types == {node.op_type for node in onnx.load(file).graph.node}
    assert Tuner(written if kind in MAKERS else tmp_path / "out", task="embed").adapted.folder == tmp_path / "out"


def test_chunks_have_the_gradients_of_whole_batches(model, data):
    found = []
    for task in ("embed, sizes=8|32", "embed, sizes=8|32, chunk=5"):
        adapted = Tuner(model, task=task, lora="rank=4, target=all-linear", seed=3).adapted
        rows = adapted.task.rows(adapted, adapted.examples(data), 16)
        for name, array in adapted.values.items():
            array[...] = np.random.default_rng(len(name)).normal(size=array.shape) / 10
        artifacts = adapted.setting(*rows.shape()).artifacts
        trainer = adapted.task.trainer(adapted)(artifacts, 1e-3, session_options())
        loss = trainer.compute_gradients(rows.take(np.arange(16)).arrays)
        evaluation = trainer.evaluate(rows, 16)
        found.append((loss, evaluation.loss, np.array(trainer.gradients.flat)))
        assert (type(trainer) is Trainer) == ("chunk" not in task)
    assert found[1][:2] == pytest.approx(found[0][:2], rel=1e-5)
    np.testing.assert_allclose(found[1][2], found[0][2], rtol=1e-4, atol=1e-5 * np.abs(found[0][2]).max())


def test_a_resumed_run_has_the_same_bits(tmp_path, model, data):
    given, found = {"epochs": 2, "validation": 16, "batch_size": 16}, []

    def stop(done, *_):
        if done == 48:
            signal.raise_signal(signal.SIGINT)

    for folder in ("whole", "part"):
        tuner = Tuner(model, task="embed, sizes=8|32", lora="dropout=0.2")
        if folder == "part":
            with pytest.raises(Interrupted):
                Tuner(model, task="embed, sizes=8|32", lora="dropout=0.2").fit(
                    data, tmp_path / folder, progress=stop, **given
                )
        found.append((tuner.fit(data, tmp_path / folder, resume=folder == "part", **given), tuner.values))
    (whole, values), (part, others) = found
    assert [after for _, after in whole.figures.values()] == [after for _, after in part.figures.values()]
    for name, array in values.items():
        np.testing.assert_array_equal(others[name], array)
    with pytest.raises(ValueError, match=r"is of another fine-tuning: task was .*'sizes': \[8, 32\]"):
        Tuner(model, task="embed", lora="dropout=0.2").fit(data, tmp_path / "part", resume=True, **given)


def test_figures():
    texts = np.eye(4, dtype=np.float32)
    anchors = np.array([[3, 2, 1, 0], [3, 2, 1, 0], [0, 0, 0, 1]], np.float32)
    found = ranked(anchors, texts, [{0}, {2}, {2, 3}])
    gains = 1 / np.log2([2, 3, 4, 5])
    third = (gains[0] + gains[3]) / (gains[0] + gains[1])
    assert found == pytest.approx({"recall@1": (1 + 0 + 1) / 3, "recall@10": 1, "nDCG@10": (1 + gains[2] + third) / 3})


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"anchor": "the cat", "positive": "a cat"}, ["the cat", "a cat"]),
        ({"query": "the cat", "pos": ["a cat", "cat"], "neg": ["a dog", "dog"]}, ["the cat", "a cat", "a dog", "dog"]),
        ({"question": "who", "answer": "you", "negative_1": "the", "id": 3}, ["who", "you", "the"]),
    ],
)
def test_names_of_texts(tmp_path, model, row, texts):
    adapted = Tuner(model, task='embed, query="what , ", passage="a "').adapted
    found = adapted.examples(write_lines(tmp_path / "data.jsonl", [row]))
    read = [adapted.tokenizer.decode(each[0]) for each in found.texts[0]]
    assert read == [f"{'a' if place else 'what [UNK]'} {text}" for place, text in enumerate(texts)]


FIRST = {
    "embed": {"anchor": "a", "positive": "b"},
    "classify": {"text": "a", "label": 1},
    "rank": {"query": "a", "positive": "b", "negative": "c"},
}


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("embed", {"anchor": "the"}, "it has 'anchor', expected anchor and positive"),
        ("embed", {"anchor": "the", "positive": 3}, "positive is int, expected a text"),
        ("embed", {"anchor": "the", "positive": []}, "positive is empty, expected a text"),
        ("embed", {"anchor": "the", "positive": "a", "negative": "b"}, "it has 3 texts, expected 2 as in the first"),
        ("embed", {"sentence1": "a", "sentence2": "b", "score": 0.1}, "it has a score, expected pairs that belong"),
        ("embed", [1], "it is list, expected an object with anchor and positive"),
        ("classify", {"text": "the"}, "it has 'text', expected text, perhaps text_pair, and label"),
        ("classify", {"text": "the", "label": "green"}, "label is 'green', expected one of red, blue, small"),
        ("classify", {"text": "the", "label": 3}, "label is 3, expected one of red, blue, small"),
        ("classify", {"text": "the", "labels": ["red", "blue"]}, "it has 2 labels, expected one, or the"),
        ("rank", {"query": "the", "passage": "a"}, "it has no label and no negative, expected query, passage"),
        ("rank", {"query": "the", "passage": "a", "label": 4}, "label is 4, expected a number from 0 to 1"),
        ("rank, loss=listwise", {"query": "a", "passage": "a", "label": 1}, "label is 1, expected .*, or none"),
    ],
)
def test_wrong_rows(tmp_path, models, task, row, message):
    kind = task.split(",")[0]
    adapted = Tuner(models[kind], task=task).adapted
    path = write_lines(tmp_path / "data.jsonl", [FIRST[kind], row])
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        adapted.examples(path)
    found = adapted.examples(path, skip_bad=True)
    assert (len(found), found.told.bad) == (1, 1)


@pytest.mark.parametrize(
    ("config", "module", "error"),
    [
        ({"pooling_mode": ["lasttoken"]}, "Normalize", ""),
        ({"pooling_mode": ["mean", "max"]}, "Normalize", r"with the pooling \['mean', 'max'\], expected pooling=mean"),
        ({"pooling_mode": "mean"}, "LayerNorm", "has a module LayerNorm behind its encoder, expected Pooling"),
        ({"include_prompt": False}, "Dropout", "leaves prompts out of its pooling, expected include_prompt true"),
    ],
)
def test_modules_of_sentence_transformers(tmp_path, config, module, error):
    make_encoder(tmp_path)
    modules = [{"type": f"models.{each}", "path": f"1_{each}"} for each in ("Transformer", "Pooling", module)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken", **config}))
    with pytest.raises((ValueError, NotImplementedError), match=error) if error else contextlib.nullcontext():
        Tuner(tmp_path, task="embed")


def test_long_texts_keep_their_end(tmp_path, model):
    adapted = Tuner(model, task="embed", max_length=6).adapted
    found = adapted.examples(write_lines(tmp_path / "data.jsonl", [{"anchor": "the cat " * 9, "positive": "a"}]))
    assert found.texts[0][0].shape == (2, 6)
    assert (found.texts[0][0][0, -1], found.told.cut, found.told.longest) == (3, 1, 20)


def test_of_two_texts_the_longer_is_cut(tmp_path):
    make_encoder(tmp_path / "model", None, CLASS_COLOURS)
    sizes = ((9, 1), (1, 9), (9, 8), (8, 9), (5, 4), (2, 1))
    rows = [{"text": "the cat " * one, "text_pair": "a dog " * other, "label": 0} for one, other in sizes]
    adapted = Tuner(tmp_path / "model", task="classify", max_length=12).adapted
    found = adapted.examples(write_lines(tmp_path / "data.jsonl", rows))
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    reference.enable_truncation(12)
    for row, [text] in zip(rows, found.texts, strict=True):
        assert text[0].tolist() == reference.encode(row["text"], row["text_pair"]).ids
    assert found.told.cut == 5


@pytest.mark.parametrize(
    ("kind", "task", "message"),
    [
        ("embed", "swim", "task is 'swim', expected one of write, "),
        ("embed", "embed, heat=3", "task has 'heat=3', expected NAME=VALUE with one of temperature, "),
        ("embed", "embed, temperature=0", "temperature is 0.0, expected a number above 0"),
        ("embed", "embed, pooling=max", "pooling is 'max', expected one of mean, cls, last"),
        ("embed", "embed, sizes=64", r"sizes is \(64,\), expected at most 32"),
        ("embed", "write", "has the outputs last_hidden_state, expected logits .* an encoder is trained by --task"),
        ("classify", "classify, labels=a|b", "has 3 scores, expected 2 for the task classify"),
        ("classify", "classify, labels=a", r"labels is \('a',\), expected several different names"),
        ("classify", "classify, labels=a|b|c, weights=1|2", r"weights is \(1.0, 2.0\), expected a number above 0 for"),
        ("classify", "rank", "has 3 scores, expected 1 for the task rank"),
        ("classify", "rank, loss=triplet", "loss is 'triplet', expected binary or listwise"),
    ],
)
def test_wrong_options(models, kind, task, message):
    with pytest.raises(ValueError, match=message):
        Tuner(models[kind], task=task)


def test_models_that_do_not_fit(tmp_path, model, data):
    from language_models import make_folder

    with pytest.raises(ValueError, match=r"has the outputs logits.*, expected one of last_hidden_state"):
        Tuner(make_folder(tmp_path / "language"), task="embed, pooling=mean")
    with pytest.raises(ValueError, match="pack is True, expected none for the task embed"):
        Tuner(model, task="embed", pack=True)
    make_encoder(tmp_path / "bare", pooling=None)
    with pytest.raises(ValueError, match=r"task has no pooling, and .* has no 1_Pooling/config.json, expected pooling"):
        Tuner(tmp_path / "bare", task="embed")
    tuner = Tuner(tmp_path / "bare", task="embed, pooling=cls, chunk=4", lora="dropout=0.5")
    with pytest.raises(ValueError, match="task has chunk, which encodes texts twice alike"):
        tuner.fit(data, tmp_path / "out")
    for given in ({"samples": ["hello"]}, {"train_on": "all"}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} is .*, expected none for the task embed"):
            tuner.fit(data, tmp_path / "out", **given)
    with pytest.raises(ValueError, match="prompt is 'hello', expected none for the task embed"):
        tuner.write("hello")


def sentences(count=96, several=False):
    """Texts about things, of which the label is what they eat, or in which several words are to be found."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(count):
        noun, colour, other = (generator.choice(each) for each in (CLASS_NOUNS, CLASS_COLOURS, CLASS_NOUNS))
        label = [each for each in ("cat", "red", "blue") if each in (noun, colour)] if several else str(colour)
        found.append({"text": f"the {colour} {noun} sees", "text_pair": f"a {other}", "label": label})
    return found


def queries(count=96, labelled=False):
    """Questions with a right text and two wrong ones, or with one of which the label says whether it is right."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(count):
        noun, *others = generator.choice(CLASS_NOUNS, 3, replace=False)
        if labelled:
            label = int(generator.integers(2))
            text = f"the {noun if label else others[0]} eats"
            found.append({"query": f"what is {noun}", "passage": text, "label": label})
            continue
        texts = [f"the {each} eats" for each in (noun, *others)]
        found.append({"query": f"what is {noun}", "positive": texts[0], "negatives": texts[1:]})
    return found


CASES = {
    "classify": (sentences(), CLASS_COLOURS),
    "classify, labels=red|blue|small, weights=1|2|0.5": (sentences(), CLASS_COLOURS),
    "classify, labels=cat|red|blue, several=true, weights=1|2|3": (sentences(several=True), ("cat", "red", "blue")),
    "rank": (queries(), ("score",)),
    "rank, loss=binary": (queries(labelled=True), ("score",)),
    "rank, loss=listwise": (queries(), ("score",)),
}


def class_loss_in_torch(task, scores, lines, labels):
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
@pytest.mark.one_in(2)
def test_losses_are_those_of_torch(tmp_path, task):
    lines, labels = CASES[task]
    encoder = make_encoder(tmp_path / "model", None, labels, layers=2)
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
        loss = class_loss_in_torch(task, encoder(*inputs), [lines[row] for row in chosen], labels)
        expected.append(step_in_torch(optimizer, loss))
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("task", CASES)
@pytest.mark.one_in(2)
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
    more = again.fit(data, tmp_path / "more", epochs=1, learning_rate=1e-3, batch_size=16)
    assert more.state.history[0].train_loss < run.state.history[0].train_loss


@pytest.mark.parametrize("task", ["classify", "classify, labels=no|yes"])
def test_one_score_is_for_another_task(tmp_path, task):
    """The cross-entropy of its single class would always be 0."""
    make_encoder(tmp_path / "model", None, ("LABEL_0",))
    with pytest.raises(ValueError, match="has 1 score, expected 2 for the task classify; one score is for the task"):
        Tuner(tmp_path / "model", task=task)
    assert Tuner(tmp_path / "model", task="rank").adapters
    assert Tuner(tmp_path / "model", task="classify, several=true").adapters


def test_numbers_of_tables(tmp_path, models):
    """A .csv file has them as texts."""
    (tmp_path / "data.csv").write_text("query,passage,label\nthe,a,1\na,the,0\n")
    found = [Tuner(models[name], task=name).adapted.examples(tmp_path / "data.csv") for name in ("classify", "rank")]
    assert found[0].targets.tolist() == [1, 0]
    assert found[1].targets[:, 0].tolist() == [1, 0]
    make_encoder(tmp_path / "stars", None, ("1", "2", "3"))
    adapted = Tuner(tmp_path / "stars", task="classify").adapted  # a number is a name there, and no place
    with pytest.raises(ValueError, match="row 2: label is '0', expected one of 1, 2, 3"):
        adapted.examples(tmp_path / "data.csv")


@pytest.mark.parametrize(
    ("task", "rows", "told"),
    [("embed, temperature=0.1", pairs(), {"nDCG@10", "before"}), ("classify", sentences(), {"accuracy", "F1"})],
    ids=["embed", "classify"],
)
def test_command(tmp_path, models, task, rows, told):
    data = write_lines(tmp_path / "data.jsonl", rows)
    given = ("--task", task, "--data", data, "--validation", 16, "--lr", 0.01)
    text = succeeds("tune", models[task.split(",")[0]], *given, "--output", tmp_path / "out")
    assert {each for each in told if each in text} == told
    if "temperature" in task:
        assert json.loads((tmp_path / "out" / "tune.json").read_text())["task"]["temperature"] == 0.1
