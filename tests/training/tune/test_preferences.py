"""Preferences: the losses of pairs of answers are those of TRL, and pairs are read as data sets have them."""

import json

import numpy as np
import pytest
import torch
from command import cli, succeeds
from language_models import make_folder, write_lines
from onnx import numpy_helper
from torch.nn import functional

from opgrad.training import Trainer
from opgrad.tune import Tuner
from opgrad.tune.tokenizer import Tokenizer

PAIRS = [
    {"prompt": "what is red ?", "chosen": "the tree is red .", "rejected": "i am a small bird ."},
    {"prompt": "who are you", "chosen": "i am a cat .", "rejected": "the dog sees a bird . the bird sees the dog ."},
    {"prompt": "hello", "chosen": "hello", "rejected": "who are you"},
    {"prompt": "a dog", "chosen": "likes the tree .", "rejected": "is blue"},
] * 2
RATE, STEPS, BATCH = 3e-3, 50, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("data") / "pairs.jsonl", PAIRS)


class Decoder:
    """The model of `language_models.make_model` in torch, with adapters."""

    def __init__(self, tuner):
        base = tuner.adapted.base
        held = {each.name: numpy_helper.to_array(each) for each in base.source.graph.initializer}
        self.w = {name: torch.tensor(array) for name, array in held.items()}
        self.trained = {name: torch.tensor(array, requires_grad=True) for name, array in tuner.values.items()}
        self.adapters = {each.name: each for each in tuner.adapters}

    def product(self, x, name, tuned):
        y, adapter = x @ self.w[f"{name}.weight"], self.adapters.get(name)
        if tuned and adapter is not None:
            y = y + x @ self.trained[adapter.a] @ self.trained[adapter.b] * adapter.lora.scale
        return y

    def norm(self, x, name):
        return functional.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], 1e-6)

    def scores(self, tokens, tuned=True):
        x, name = self.w["model.embed_tokens.weight"][tokens], "model.layers.0"
        normal = self.norm(x, f"{name}.input_layernorm")
        q, k, v = (
            self.product(normal, f"{name}.self_attn.{role}_proj", tuned).unflatten(-1, (-1, 16)).transpose(1, 2)
            for role in "qkv"
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.product(y.transpose(1, 2).flatten(2), f"{name}.self_attn.o_proj", tuned)
        normal = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = (self.product(normal, f"{name}.mlp.{role}_proj", tuned) for role in ("gate", "up"))
        x = x + self.product(functional.silu(gate) * up, f"{name}.mlp.down_proj", tuned)
        return self.product(self.norm(x, "model.norm"), "lm_head", tuned)

    def logps(self, arrays, tuned=True):
        """The logarithms of all tokens' probabilities, [2n, length]."""
        log_prob = self.scores(torch.tensor(arrays["input_ids"]), tuned).log_softmax(-1)
        labels = torch.tensor(arrays["labels"])
        return log_prob.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0)


def log1mexp(x):
    return torch.where(x > -0.6931472, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def loss_of_trl(decoder, arrays, task):
    """DPOTrainer's loss "sigmoid", with the smoothing of cDPO; CPOTrainer's "simpo" with alpha 0; ORPOTrainer's."""
    logps, mask = decoder.logps(arrays), torch.tensor(arrays["weights"])
    sums = (logps * mask).sum(1)
    (chosen, rejected), smooth = sums.chunk(2), task.label_smoothing
    if task.loss == "dpo":
        with torch.no_grad():
            before = (decoder.logps(arrays, tuned=False) * mask).sum(1).chunk(2)
        logits = (chosen - rejected) - (before[0] - before[1])
    else:
        chosen, rejected = (sums / mask.sum(1)).chunk(2)
        logits = (chosen - rejected) - 0.5 / task.scale
    if task.loss == "orpo":
        odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
        half = len(logps) // 2
        written = -logps[:half].sum() / (torch.tensor(arrays["labels"])[:half] >= 0).sum()
        return written - (task.scale * functional.logsigmoid(odds)).mean()
    x = task.scale * logits
    return (-functional.logsigmoid(x) * (1 - smooth) - functional.logsigmoid(-x) * smooth).mean()


@pytest.mark.parametrize("options", ["", "beta=0.5, label_smoothing=0.1", "loss=orpo, beta=0.3", "loss=simpo"])
def test_losses_of_fifty_steps_are_those_of_trl(model, data, options):
    tuner = Tuner(model, task=f"prefer, {options}", lora="rank=4, target=all-linear", seed=1)
    task, adapted = tuner.adapted.task, tuner.adapted
    rows = task.rows(adapted, adapted.examples(data), BATCH)
    decoder, trainer = Decoder(tuner), Trainer(adapted.setting(*rows.shape()).artifacts, RATE)
    optimizer, random = torch.optim.AdamW(decoder.trained.values(), RATE, weight_decay=0.0), np.random.default_rng(0)
    losses = []
    for _ in range(STEPS):
        arrays = rows.take(random.choice(rows.rows, BATCH, replace=False)).arrays
        loss = loss_of_trl(decoder, arrays, task)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((trainer.step(arrays), float(loss.detach())))
    found, expected = np.array(losses).T
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert expected[-5:].mean() < 0.7 * expected[0]


@pytest.mark.parametrize("train", [(), ("*v_proj*", "lm_head.weight")])
def test_pairs_are_learned(tmp_path, data, train):
    """The reference is the base, whatever is trained."""
    run = {"epochs": 8, "batch_size": 4, "learning_rate": 1e-2, "validation": 2}
    tuner = Tuner(
        make_folder(tmp_path / "model"), task="prefer", lora=None if train else "target=all-linear", train=train
    )
    tuned = tuner.fit(data, tmp_path / "tuned", **run)
    before, after = zip(*(tuned.figures[name] for name in ("reward margin", "reward accuracy")), strict=True)
    assert before == (0.0, 0.0)
    assert after[0] > 0.1
    assert after[1] == 1
    assert tuned.state.initial_loss == pytest.approx(np.log(2), rel=1e-5)
    assert tuned.perplexities() == []
    metrics = json.loads((tmp_path / "tuned" / "metrics.json").read_text())
    assert metrics["epochs"][-1]["validation_loss"] < metrics["epochs"][0]["validation_loss"] < np.log(2)
    assert tuner.write("hello", max_new_tokens=3)


def learned(folder, rows):
    examples = Tuner(folder, task="prefer").adapted.examples(write_lines(folder / "pairs.jsonl", rows))
    decode, found = Tokenizer(folder).decode, [examples[int(number)] for number in examples.pairs.ravel()]
    return [(decode(each.tokens[~each.trained]), decode(each.tokens[each.trained])) for each in found]


def chat(*texts):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]


CHATS, WHO = (
    {"chosen": chat("who are", "you"), "rejected": chat("who are", "i")},
    [{"role": "system", "content": "who"}],
)
FORMS = {
    "texts": {"prompt": "who are", "chosen": "you", "rejected": "i"},
    "a question": {"question": "who", "input": "are", "chosen": "you", "rejected": "i"},
    "a system": {"system": "who", "prompt": "are", "chosen": "you", "rejected": "i"},
    "a system beside chats": {"system": "who", "chosen": chat("are", "you"), "rejected": chat("are", "i")},
    "chats with a system": {"prompt": "are", "chosen": WHO + chat("are", "you"), "rejected": WHO + chat("are", "i")},
    "texts without a prompt": {"chosen": "who are you", "rejected": "who are i"},
    "messages": {"prompt": chat("who are"), "chosen": chat("", "you")[1:], "rejected": chat("", "i")[1:]},
    "chats": CHATS,
    "chats beside a text": {"prompt": "who are", **CHATS},
    "chats with their prompt": {"prompt": chat("who are"), **CHATS},
    "answers beside a text": {"prompt": "who are", "chosen": chat("", "you")[1:], "rejected": chat("", "i")[1:]},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_pairs(model, form):
    assert learned(model, [FORMS[form]]) == [("who are", "you"), ("who are", "i")]


def test_several_turns(model):
    """What both have is the prompt, earlier answers included."""
    row = {name: chat("hello", "hello you", "who are", text) for name, text in (("chosen", "you"), ("rejected", "i"))}
    assert [answer for _, answer in learned(model, [row])] == ["you", "i"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "cat"}, "it has 'prompt', 'chosen', expected chosen and rejected"),
        ({"chosen": "cat", "rejected": "cat"}, "chosen and rejected are the same or of different kinds"),
        ({"chosen": "cat", "rejected": chat("cat")}, "chosen and rejected are the same or of different kinds"),
        ({"prompt": 1, "chosen": "cat", "rejected": "dog"}, "prompt is int, expected a text"),
        ({"prompt": "b", "chosen": chat("a", "cat"), "rejected": chat("a", "dog")}, "chosen and rejected are chats"),
        ({"chosen": chat("a"), "rejected": chat("a", "dog")}, "completion is no list of objects with role and content"),
    ],
)
def test_wrong_pairs_are_named(tmp_path, model, row, message):
    path = write_lines(tmp_path / "pairs.jsonl", [PAIRS[0], row])
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        Tuner(model, task="prefer").adapted.examples(path)
    told = Tuner(model, task="prefer").adapted.examples(path, skip_bad=True).told
    assert (told.lines, told.used, told.bad) == (2, 1, 1)


def test_pairs_whose_answers_are_cut_off_are_left_out(tmp_path, model):
    path = write_lines(tmp_path / "pairs.jsonl", [*PAIRS[:2], {"prompt": "a " * 9, "chosen": "cat", "rejected": "dog"}])
    told = Tuner(model, task="prefer", max_length=9).adapted.examples(path).told
    assert (told.lines, told.used, told.empty) == (3, 2, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "prefer, loss=kto"], "loss is 'kto', expected one of dpo, orpo, simpo"),
        (["--task", "prefer, beta=-1"], "beta is -1.0, expected a number above 0"),
        (["--task", "prefer, gamma=1"], "gamma is 1.0, expected none, as the loss is not simpo"),
        (["--task", "prefer, label_smoothing=0.6"], "label_smoothing is 0.6, expected a number from 0 to below 0.5"),
        (["--task", "prefer", "--pack"], "--pack is True, expected none for the task prefer"),
        (["--task", "prefer", "--train-on", "all"], "--train-on is 'all', expected assistant for the task prefer"),
    ],
)
def test_wrong_options(model, data, words, message):
    status, text = cli("tune", model, "--data", data, *words)
    assert status == 1
    assert message in " ".join(text.split())


def test_command(tmp_path, model, data):
    words = ["tune", model, "--data", data, "--task", "prefer, loss=simpo"]
    text = succeeds(*words, "--validation", 2, "--output", tmp_path / "tuned", "--sample", "hello")
    assert "reward margin" in text
    assert "perplexity" not in text
    text = succeeds(*words, "--show", 2)
    assert "«the tree is red . <|end|>»" in " ".join(text.replace("│", " ").split())
