"""A small encoder of BERT's shape in PyTorch, and its folder as sentence-transformers and transformers.js ship such."""

import copy
import functools
import io
import json
import warnings

import numpy as np
import onnxruntime
import tokenizers
import torch
from runtime_cases import exact_options
from torch import nn

WORDS = ["the", "cat", "dog", "bird", "fish", "sees", "likes", "eats", "a", "red", "blue", "small", "big", "tree"]
WORDS += ["house", "water", ".", "hello", "what", "is", "who", "are", "you"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WIDTH, HEADS, LONGEST = 32, 4, 64
NOUNS, COLOURS = "cat dog bird fish tree house water".split(), "red blue small big".split()  # noqa: SIM905


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, 1e-12)

    def forward(self, x, mask):
        batch, length, _ = x.shape
        q, k, v = (
            each(x).view(batch, length, HEADS, -1).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5 + mask
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.norm(x + self.dense(y))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH, 1e-12)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, mask):
        x = self.attention(x, mask)
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


class Encoder(nn.Module):
    """The vectors of all tokens; with `labels`, the scores of a head on the first."""

    def __init__(self, vocabulary, labels=0, layers=1):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.types, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, 1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.classifier = nn.Linear(WIDTH, labels) if labels else None

    def forward(self, input_ids, attention_mask, token_type_ids):
        places = self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.norm(self.words(input_ids) + places + self.types(token_type_ids))
        mask = (1.0 - attention_mask[:, None, None].float()) * torch.finfo(torch.float32).min
        for layer in self.layers:
            x = layer(x, mask)
        return x if self.classifier is None else self.classifier(x[:, 0])


def tokenizer():
    """A tokenizer of words, which begins texts with [CLS] and ends them with [SEP]."""
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(["[PAD]", "[CLS]", "[SEP]"])
    return made


@functools.cache
def exported(labels, seed, layers):
    """An encoder, and its model as torch exports it."""
    torch.manual_seed(seed)
    encoder, file = Encoder(len(SPECIAL) + len(WORDS), len(labels), layers).eval(), io.BytesIO()
    with torch.no_grad():
        for each in encoder.parameters():
            each += 0.01 * torch.randn_like(each)  # the exporter lets equal parameters be one
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in names}
    output = "logits" if labels else "last_hidden_state"
    axes[output] = {0: "batch_size"} if labels else {0: "batch_size", 1: "sequence_length"}
    given = tuple(torch.ones(2, 6, dtype=torch.int64) for _ in names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(encoder, given, file, dynamo=False, opset_version=17, input_names=names,
                          output_names=[output], dynamic_axes=axes)  # fmt: skip
    return encoder, file.getvalue()


def make_encoder(folder, pooling="mean", labels=(), seed=0, layers=1):
    """Write a folder with onnx/model.onnx; returns the encoder in PyTorch. pooling: None writes no such file."""
    encoder, content = exported(tuple(labels), seed, layers)
    (folder / "onnx").mkdir(parents=True)
    (folder / "onnx" / "model.onnx").write_bytes(content)
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "model_max_length": LONGEST}))
    config = {"model_type": "bert", **({"id2label": dict(enumerate(labels))} if labels else {})}
    (folder / "config.json").write_text(json.dumps(config))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        mode = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({each: name == pooling for name, each in mode.items()})
        )
    return copy.deepcopy(encoder)


def pairs(count=96, negatives=1):
    """Questions, each with a sentence of the same thing, and others."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(count):
        noun, other, colour = generator.choice(NOUNS), generator.choice(NOUNS), generator.choice(COLOURS)
        row = {"anchor": f"what is {colour} {noun}", "positive": f"the {noun} likes a {colour} {other} ."}
        found.append(row | {f"negative_{place}": f"the {generator.choice(NOUNS)} eats" for place in range(negatives)})
    return found


def vectors_in_torch(encoder, tokenizer, texts, pooling):
    """The vectors of texts of a column, padded to its longest."""
    rows = [tokenizer.encode(each).ids for each in texts]
    length = max(map(len, rows))
    ids = torch.tensor([each + [0] * (length - len(each)) for each in rows])
    mask = torch.tensor([[1] * len(each) + [0] * (length - len(each)) for each in rows])
    hidden, counted = encoder(ids, mask, torch.zeros_like(ids)), mask[:, :, None]
    if pooling == "mean":
        return (hidden * counted).sum(1) / counted.sum(1)
    return hidden[:, 0] if pooling == "cls" else hidden[torch.arange(len(rows)), mask.sum(1) - 1]


def loss_in_torch(columns, sizes, temperature):
    """MultipleNegativesRankingLoss, and MatryoshkaLoss around it."""
    total = 0
    for size in sizes:
        first, *others = [nn.functional.normalize(each[:, :size]) for each in columns]
        scores = first @ torch.cat(others).T / temperature
        total = total + nn.functional.cross_entropy(scores, torch.arange(len(first))) / len(sizes)
    return total


def step_in_torch(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def session_options():
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return options


def stock_vectors(file, rows):
    """The vectors of stock onnxruntime for the first texts of rows, by mean pooling."""
    given = {name: array for name, array in rows.take(np.arange(8)).arrays.items() if name in rows.inputs}
    hidden = onnxruntime.InferenceSession(file, exact_options(), ["CPUExecutionProvider"]).run(None, given)[0]
    counted = given["attention_mask"][:, :, None]
    pooled = (hidden * counted).sum(1) / counted.sum(1)
    return given, pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def losses_beside_torch(tuner, data, encoder, optimizer, steps, pooling="mean", sizes=(None,), temperature=0.05):
    """The losses of steps on random batches of a file by a tuner that trains all weights, and by torch."""
    adapted, batch, rate = tuner.adapted, 16, optimizer.defaults["lr"]
    rows = adapted.task.rows(adapted, adapted.examples(data), batch)
    trainer = adapted.task.trainer(adapted)(adapted.setting(*rows.shape()).artifacts, rate, session_options())
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    generator, found, expected = np.random.default_rng(1), [], []
    for _ in range(steps):
        chosen = generator.choice(len(lines), batch, replace=False)
        found.append(trainer.compute_gradients(rows.take(chosen).arrays))
        trainer.update()
        texts = [[lines[row][name] for row in chosen] for name in lines[0]]
        columns = [vectors_in_torch(encoder, adapted.tokenizer._tokenizer, each, pooling) for each in texts]
        expected.append(step_in_torch(optimizer, loss_in_torch(columns, sizes, temperature)))
    return found, expected
