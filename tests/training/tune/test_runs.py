"""Whole fine-tunings: what is learned, resumed, refused, and left in files; the command."""

import json
import shutil
import signal

import numpy as np
import onnx
import pytest
from command import cli, succeeds
from language_models import TEMPLATE, make_folder, scores, write_lines

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from opgrad.base import files
from opgrad.training.files import tensor_values
from opgrad.training.run.fit import Interrupted
from opgrad.tune import Lora, Tuner
from opgrad.tune.tokenizer import Tokenizer

ANSWER = "the tree is red ."
LINES = [
    {"messages": [{"role": "user", "content": "what is red ?"}, {"role": "assistant", "content": ANSWER}]},
    {"messages": [{"role": "user", "content": "who are you"}, {"role": "assistant", "content": "i am a bird ."}]},
    {"prompt": "hello", "completion": " you"},
] * 4  # fmt: skip
SETTINGS = {"epochs": 4, "learning_rate": 1e-2, "batch_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("data") / "data.jsonl", LINES)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, model, data):
    """A fine-tuned model, with the run and the folder."""
    tuner = Tuner(model, lora="rank=8, target=all-linear")
    run = tuner.fit(data, tmp_path_factory.mktemp("tuned"), samples=["what is red ?"], **{**SETTINGS, "epochs": 25})
    return tuner, run


def test_what_is_written_changes(model, tuned):
    tuner, run = tuned
    assert Tuner(model).write("what is red ?", max_new_tokens=8) != ANSWER
    assert tuner.write("what is red ?", max_new_tokens=8) == ANSWER
    assert run.samples[-1] == {"what is red ?": ANSWER}
    assert run.state.history[-1].train_loss < run.state.history[0].train_loss / 3


def test_files(model, tuned):
    tuner, run = tuned
    metrics = json.loads((run.output / "metrics.json").read_text())
    about = json.loads((run.output / "tune.json").read_text())
    assert metrics["examples"]["lines"] == 12
    assert metrics["tokens_per_second"] > 0
    assert about["base_sha256"] == tuner.adapted.checksum == Tuner(model).adapted.checksum
    assert set(run.files) <= {each.name for each in run.output.iterdir()}
    again = Tuner(model, adapter=run.output)
    assert again.write("who are you", max_new_tokens=8) == tuner.write("who are you", max_new_tokens=8)


def test_stock_runtime_and_merged_model(tmp_path, model, tuned):
    tuner, run = tuned
    tokens = tuner.adapted.prompt_tokens("what is red ?")[None].astype(np.int64)
    tuner.merge(tmp_path / "merged")
    plain, base, merged = (scores(each / "model.onnx", tokens) for each in (model, run.output, tmp_path / "merged"))
    np.testing.assert_array_equal(base, plain)
    found = scores(run.output / "model.onnx", tokens, adapter=run.output / "adapter.onnx_adapter")
    np.testing.assert_allclose(merged, found, rtol=1e-4, atol=1e-4)
    graphs = (onnx.load(folder / "model.onnx").graph for folder in (tmp_path / "merged", model))
    merged, before = ({each.op_type for each in graph.node} for graph in graphs)
    assert merged == before


@pytest.mark.parametrize("lora", [None, "dropout=0.3, dora=true"])
def test_resumed_run_has_the_same_bits(tmp_path, model, data, lora):
    whole = Tuner(model, lora=lora)
    whole.fit(data, tmp_path / "whole", validation=3, accumulate=2, **SETTINGS)

    def stop(done, *_):
        if done == 17:
            signal.raise_signal(signal.SIGINT)

    part = Tuner(model, lora=lora)
    with pytest.raises(Interrupted):
        part.fit(data, tmp_path / "part", validation=3, accumulate=2, progress=stop, **SETTINGS)
    resumed = Tuner(model, lora=lora)
    run = resumed.fit(data, tmp_path / "part", resume=True)  # with the settings of the checkpoint
    assert len(run.state.history) == 4
    for name, array in whole.values.items():
        np.testing.assert_array_equal(resumed.values[name], array)
    assert run.perplexities()[0] > run.perplexities()[-1]


def test_checkpoints_within_epochs(tmp_path, model, data):
    """A run that ends suddenly goes on from the last one, and has the bits of a whole run."""
    given = {**SETTINGS, "epochs": 2, "batch_size": 2, "checkpoint_every": 2}
    whole = Tuner(model)
    before = whole.fit(data, tmp_path / "whole", **{**given, "checkpoint_every": None})

    def fail(done, *_):
        if done == 22:
            raise MemoryError

    with pytest.raises(MemoryError):
        Tuner(model).fit(data, tmp_path / "part", progress=fail, **given)
    resumed = Tuner(model)
    run = resumed.fit(data, tmp_path / "part", resume=True, **given)
    assert len(run.batch_losses[-1]) == 2  # of six batches of the second epoch
    assert run.state.history[-1].train_loss == pytest.approx(before.state.history[-1].train_loss, rel=1e-12)
    for name, array in whole.values.items():
        np.testing.assert_array_equal(resumed.values[name], array)


def test_resumed_on_another_day(tmp_path, data):
    """A template that writes the date goes on to write that of the first day."""
    year = "{% if strftime_now('%Y') == '2001' %}hello {% endif %}"
    folder = make_folder(tmp_path / "model", template=year + TEMPLATE)
    first, later = Tuner(folder), Tuner(folder)
    first.adapted.tokenizer.template.use_date("2001-02-03")
    with pytest.raises(Interrupted):
        first.fit(data, tmp_path / "part", epochs=2, progress=interrupt)
    assert later.adapted.tokenizer.template.render([]) == ""
    later.fit(data, tmp_path / "part", resume=True)
    assert later.adapted.tokenizer.template.render([]) == "hello "


def test_resumption_of_another_run(tmp_path, model, data):
    Tuner(model).fit(data, tmp_path, epochs=1)
    with pytest.raises(ValueError, match=r"last.checkpoint is of another fine-tuning: lora was .*'rank': 8"):
        Tuner(model, lora="rank=4").fit(data, tmp_path, epochs=2, resume=True)
    with pytest.raises(FileNotFoundError, match=r"there is no .*last.checkpoint to go on from"):
        Tuner(model).fit(data, tmp_path / "other", resume=True)


def test_adapter_is_trained_further(tmp_path, model, data, tuned):
    before = tuned[1].state.history
    further = Tuner(model, adapter=tuned[1].output)
    run = further.fit(data, tmp_path / "further", **{**SETTINGS, "epochs": 1, "learning_rate": 1e-3})
    assert run.state.history[0].train_loss < before[0].train_loss / 3
    assert further.adapters == Tuner(model, adapter=tmp_path / "further").adapters


def test_weights_are_trained_themselves(tmp_path, model, data):
    tuner = Tuner(model, train="*mlp*")
    run = tuner.fit(data, tmp_path / "full", **SETTINGS)
    before, after = (
        {each.name: each.raw_data for each in onnx.load(folder / "model.onnx").graph.initializer}
        for folder in (model, tmp_path / "full")
    )
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if "mlp" in name}
    assert run.state.history[-1].train_loss < run.state.history[0].train_loss
    again = Tuner(tmp_path / "full")
    assert again.write("hello", max_new_tokens=4) == tuner.write("hello", max_new_tokens=4)


def test_gradients_are_clipped(tmp_path, model, data):
    """To less than the epsilon of AdamW, so that a step changes nearly nothing."""
    tuner = Tuner(model)
    tuner.fit(data, tmp_path, epochs=1, learning_rate=1e-2, clip_norm=1e-12)
    assert 0 < max(np.abs(array).max() for name, array in tuner.values.items() if "lora_B" in name) < 1e-4


def test_gradients_are_weighted_by_tokens(tmp_path, model, data):
    """Two batches accumulated give the gradient of the mean over all of their tokens."""
    one, two = Tuner(model), Tuner(model)
    one.fit(data, tmp_path / "one", epochs=1, batch_size=12, schedule="constant")
    two.fit(data, tmp_path / "two", epochs=1, batch_size=3, accumulate=4, schedule="constant")
    for name, array in one.values.items():
        np.testing.assert_allclose(two.values[name], array, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lora": "rank=2", "train": "*"}, ValueError, "more than one of lora, train and adapter"),
        ({"train": "nothing.*"}, ValueError, "train has 'nothing.*', which matches no weight of the model"),
        ({"lora": Lora(target="x")}, ValueError, "lora has the target 'x'"),
    ],
)
def test_wrong_options(tmp_path, model, data, options, error, message):
    with pytest.raises(error, match=message):
        Tuner(model, **options).fit(data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapter_of_another_base(tmp_path, tuned):
    other = make_folder(tmp_path, layers=1, seed=1)
    with pytest.raises(ValueError, match="is an adapter of another base: it names"):
        Tuner(other, adapter=tuned[1].output)


def test_folder_without_a_model(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"has no .onnx file, expected a folder with model.onnx and tokenizer.json"
    ):
        Tuner(tmp_path)


def test_tokenizer_of_another_model(tmp_path, data):
    folder = make_folder(tmp_path, layers=1)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["many"] = 25
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="the tokenizer has 26 tokens, expected at most 25"):
        Tuner(folder).fit(data, tmp_path / "out")


def test_weights_in_a_file_of_their_own(tmp_path, model, data, monkeypatch):
    """Both models are loaded by onnx, which refuses a file that has two names; the base's bytes stay."""
    monkeypatch.setattr(tensor_values, "HUGE", 0)
    base = tmp_path / "base"
    shutil.copytree(model, base)
    outside = {"save_as_external_data": True, "location": "model.onnx.data", "size_threshold": 0}
    onnx.save(onnx.load(base / "model.onnx"), base / "model.onnx", **outside)
    before = {each.name: each.read_bytes() for each in base.iterdir()}
    run = Tuner(base).fit(data, tmp_path / "tuned", **{**SETTINGS, "epochs": 1})
    assert {each.name: each.read_bytes() for each in base.iterdir()} == before
    assert (run.output / "model.onnx.data").read_bytes() == before["model.onnx.data"]
    for folder in (base, run.output):
        onnx.load(folder / "model.onnx")
    assert Tuner(base, adapter=run.output).adapted.checksum == Tuner(base).adapted.checksum


def test_full_disk_loses_nothing(tmp_path, model, data, monkeypatch):
    """What was trained stays in the checkpoint when the results cannot be written."""
    real, tried = files.new_file, []

    def full(path, content):
        if path.name in tried:
            raise OSError(28, "No space left on device", str(path))
        tried.append(path.name)
        real(path, content)

    monkeypatch.setattr("opgrad.tune.peft.new_file", full)
    with pytest.raises(RuntimeError, match=r"parameters are in .*last.checkpoint, but: .*No space left on device"):
        Tuner(model).fit(data, tmp_path, epochs=1)
    assert {each.name for each in tmp_path.iterdir()} == {"last.checkpoint", "metrics.csv", "metrics.jsonl"}
    monkeypatch.undo()
    for epochs in (1, 2):
        run = Tuner(model).fit(data, tmp_path, epochs=epochs, resume=True)
        assert "adapter.onnx_adapter" in run.files


@pytest.mark.parametrize("options", [{}, {"train": "*mlp*"}])
def test_what_cannot_be_written_fails_before_the_training(tmp_path, model, data, monkeypatch, options):
    def fail(*_):
        raise ValueError("cannot be made")

    monkeypatch.setattr("opgrad.tune.outputs.with_inputs", fail)
    monkeypatch.setattr("opgrad.tune.outputs.replaced", fail)
    monkeypatch.setattr("opgrad.tune.tuner.Fit.run", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(ValueError, match="cannot be made"):
        Tuner(model, **options).fit(data, tmp_path)
    assert not list(tmp_path.iterdir())


# --- the command ---


def test_command(tmp_path, model, data):
    output = tmp_path / "tuned"
    options = ("--lora", "rank=4, alpha=8, target=*q_proj*|*v_proj*", "--epochs", 2, "--sample", "hello")
    text = succeeds("tune", model, "--data", data, "--output", output, "--validation", 3, *options)
    epochs = [f"{model.name}: epoch {number} of 2, {50 * number}%" for number in (1, 2)]
    more = ["after epoch 2: 'hello'", "perplexity", "tokens/s", "adapter.onnx_adapter"]
    assert [part for part in ["2 adapters", "12 examples", *epochs, *more] if part not in text] == []
    text = succeeds("tune", model, "--adapter", output, "--prompt", "hello", "--tokens", 4)
    text = succeeds("tune", model, "--adapter", output, "--merge", tmp_path / "merged")
    assert (tmp_path / "merged" / "model.onnx").is_file()


def test_command_tells_of_products_that_saturate(tmp_path, model, data, monkeypatch):
    monkeypatch.setattr("opgrad.tune.tuner.note", lambda model: f"products of {len(model.graph.node)} nodes saturate")
    text = succeeds("tune", model, "--data", data, "--epochs", 1, "--output", tmp_path / "tuned")
    assert "note: products of" in text


def test_file_that_validates(tmp_path, model, data):
    """It is told where a run goes on without it."""
    other = write_lines(tmp_path / "other.jsonl", LINES[:2] * 2)
    given = {**SETTINGS, "epochs": 2, "patience": 1}
    run = Tuner(model).fit(data, tmp_path / "tuned", validation=other, **given)
    assert (run.rows, run.validation_rows, len(run.perplexities())) == (12, 4, 3)
    same = Tuner(model).fit(other, tmp_path / "same", validation=other, **given)
    assert run.state.initial_loss == pytest.approx(same.state.initial_loss, rel=1e-5)
    text = succeeds("tune", model, "--data", data, "--validation", other, "--epochs", 1, "--output", tmp_path / "by")
    assert "validation: 4 examples with" in text.replace("\n", " ")
    stopped = Tuner(model)
    with pytest.raises(Interrupted):
        stopped.fit(data, tmp_path / "part", validation=other, progress=interrupt, **given)
    with pytest.raises(ValueError, match=r"another fine-tuning: validation was [0-9]+, and is None"):
        Tuner(model).fit(data, tmp_path / "part", resume=True, **given)


@pytest.mark.parametrize("given", [{}, {"train": "*lm_head*"}, {"pack": True}])
def test_weights_of_messages(tmp_path, model, given):
    """An answer with twice the weight counts as one that is there twice, in the loss and in the step."""
    first, second = (each["messages"] for each in LINES[:2])
    twice = write_lines(tmp_path / "twice.jsonl", [{"messages": each} for each in (first, second, second)])
    weighed = [second[0], {**second[1], "weight": 2.0}]
    once = write_lines(tmp_path / "once.jsonl", [{"messages": each} for each in (first, weighed)])
    settings = {**SETTINGS, "epochs": 2, "batch_size": 3}
    runs = [Tuner(model, **given).fit(data, tmp_path / data.stem, **settings) for data in (twice, once)]
    losses = [[each.train_loss for each in run.state.history] for run in runs]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def interrupt(done, *_):
    signal.raise_signal(signal.SIGINT)


def test_examples_are_shown(tmp_path, model, data):
    text = succeeds("tune", model, "--data", data, "--show", 2, "--output", tmp_path / "tuned")
    shown = " ".join(text.replace("│", " ").split())
    assert "<|user|> what is red <unk> <|end|> <|assistant|>«the tree is red . <|end|>»" in shown
    assert ("line 2" in text, "line 3" in text, (tmp_path / "tuned").exists()) == (True, False, False)
    assert "12 examples with" in text


def test_examples_do_not_act_on_the_terminal(model, data, monkeypatch):
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: "red\x1b[31m\nblue")
    text = succeeds("tune", model, "--data", data, "--show", 1)
    assert r"red\x1b[31m" in text
    assert "\x1b" not in text
    assert r"\n" not in text  # line feeds stay


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to do, expected --data to train, or --prompt or --merge"),
        (["--prompt", "x", "--data", "DATA"], "--prompt and --merge use what is there, expected no --data"),
        (["--memory", "much", "--data", "DATA"], "--memory is 'much', expected a size such as 4GB"),
        (["--data", "DATA", "--train-on", "none"], "--train-on is 'none', expected one of assistant, last, all"),
        (["--data", "DATA", "--validation", "99"], "validation is 99, expected fewer than the 12 rows"),
        (["--prompt", "x", "--show", 2], "--show is for --data, which is not given"),
        (["--prompt", "x", "--epochs", 2], "--epochs is for --data, which is not given"),
        (["--prompt", "x", "--lora", "rank=2"], "--lora is for --data, which is not given"),
        (["--prompt", "x", "--output", "tuned"], "--output is for --data or --adapter, which is not given"),
        (["--merge", "merged", "--seed", 1], "--seed is for --data or --prompt, which is not given"),
        (["--data", "DATA", "--temperature", 0.5], "--temperature is for --prompt, which is not given"),
        (["--data", "DATA", "--task", "embed, temperature=-1"], "--task option temperature is -1.0, expected a number"),
        (["--data", "DATA", "--lora", "rank=0"], "--lora option rank is 0, expected a whole number from 1 to 4096"),
        (["--data", "DATA", "--log", "paper"], "loggers is 'paper', expected tensorboard"),
    ],
)
def test_wrong_usage(model, data, words, message):
    code, text = cli("tune", model, *[str(data) if each == "DATA" else each for each in words])
    assert code == 1
    assert message in text
    assert text.count("\n") <= 2
