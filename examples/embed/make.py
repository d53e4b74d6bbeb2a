"""Makes what this example trains: a small encoder with random weights, its tokenizer, and pairs of texts.

The texts come with Python: docstrings of the standard library, whose first paragraphs shall find what follows them.
"""

import ast
import json
import random
import sysconfig
from pathlib import Path

import numpy as np
import onnx
import tokenizers
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).parent
VOCABULARY, LAYERS, WIDTH, HEADS, LONGEST = 4096, 2, 128, 4, 128
LEAST, MOST = 40, 400  # characters of what follows the first paragraph
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
INPUTS = ("input_ids", "attention_mask")
SKIPPED = {"test", "tests", "idlelib", "turtledemo", "lib2to3", "site-packages", "dist-packages"}


def pairs():
    """The first paragraph of each docstring, and what follows."""
    library, seen = Path(sysconfig.get_path("stdlib")), set()
    for path in sorted(library.rglob("*.py")):
        if SKIPPED.intersection(path.relative_to(library).parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            told = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
            first, _, rest = (told or "").partition("\n\n")
            first, rest = " ".join(first.split()), " ".join(rest.split())[:MOST]
            if 15 <= len(first) <= MOST and len(rest) >= LEAST and seen.isdisjoint((first, rest[:80])):
                seen |= {first, rest[:80]}
                yield {"anchor": first, "positive": rest}


def make_model():
    """An encoder with random weights, from tokens to a vector for each."""
    generator, nodes, weights = np.random.default_rng(0), [], []

    def weight(name, *shape, scale=0.02):
        values = generator.standard_normal(shape) * scale if len(shape) > 1 else np.full(shape, "norm" in name)
        weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def constant(name, value):
        weights.append(numpy_helper.from_array(np.array(value), name))
        return name

    def add(op, inputs, output, **attributes):
        nodes.append(helper.make_node(op, inputs, [output], f"/{output.replace('.', '/')}", **attributes))
        return output

    def linear(x, module, rows, columns):
        product = add("MatMul", [x, weight(f"{module}.weight", rows, columns)], f"{module}.product")
        return add("Add", [product, weight(f"{module}.bias", columns)], module)

    def norm(x, module):
        parts = [x, weight(f"{module}.norm.weight", WIDTH), weight(f"{module}.norm.bias", WIDTH)]
        weights[-1].CopyFrom(numpy_helper.from_array(np.zeros(WIDTH, np.float32), parts[2]))
        return add("LayerNormalization", parts, f"{module}.norm", epsilon=1e-12)

    def heads(x, name, order):
        return add("Transpose", [add("Reshape", [x, "heads"], f"{name}.split")], f"{name}.turned", perm=order)

    constant("heads", [0, 0, HEADS, WIDTH // HEADS])
    constant("flat", [0, 0, WIDTH])
    scale, one, least = (constant(name, np.float32(value)) for name, value in
                         (("scale", (WIDTH / HEADS) ** -0.5), ("one", 1), ("least", -1e9)))  # fmt: skip
    first, second, step, axes = (constant(name, value) for name, value in
                                 (("first", 0), ("second", 1), ("step", 1), ("axes", [1, 2])))  # fmt: skip
    length = add("Gather", [add("Shape", ["input_ids"], "shape"), second], "length")
    places = add(
        "Gather", [weight("positions.weight", LONGEST, WIDTH), add("Range", [first, length, step], "range")], "places"
    )
    words = add("Gather", [weight("words.weight", VOCABULARY, WIDTH), "input_ids"], "words")
    x = norm(add("Add", [words, places], "sum"), "embeddings")
    seen = add("Unsqueeze", [add("Cast", ["attention_mask"], "floats", to=TensorProto.FLOAT), axes], "seen")
    mask = add("Mul", [add("Sub", [one, seen], "hidden"), least], "mask")
    for number in range(LAYERS):
        name = f"layer.{number}"
        q, k, v = (
            heads(linear(x, f"{name}.attention.{each}", WIDTH, WIDTH), f"{name}.{each}", order)
            for each, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3]))
        )
        scores = add("Mul", [add("MatMul", [q, k], f"{name}.dots"), scale], f"{name}.scores")
        shares = add("Softmax", [add("Add", [scores, mask], f"{name}.masked")], f"{name}.shares", axis=-1)
        mixed = add("Transpose", [add("MatMul", [shares, v], f"{name}.mixed")], f"{name}.back", perm=[0, 2, 1, 3])
        out = linear(add("Reshape", [mixed, "flat"], f"{name}.joined"), f"{name}.attention.output", WIDTH, WIDTH)
        x = norm(add("Add", [x, out], f"{name}.sum"), f"{name}.attention")
        inner = add("Relu", [linear(x, f"{name}.up", WIDTH, 4 * WIDTH)], f"{name}.active")
        x = norm(add("Add", [x, linear(inner, f"{name}.down", 4 * WIDTH, WIDTH)], f"{name}.whole"), name)
    nodes.append(helper.make_node("Identity", [x], ["last_hidden_state"], "/last"))
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in INPUTS]
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "length", WIDTH])
    graph = helper.make_graph(nodes, "encoder", inputs, [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def make_tokenizer(texts):
    """A tokenizer of lower-case pieces of words, which begins texts with [CLS] and ends them with [SEP]."""
    made = tokenizers.BertWordPieceTokenizer(lowercase=True)
    made.train_from_iterator(texts, VOCABULARY, special_tokens=SPECIAL, show_progress=False)
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def make(folder=HERE):
    """Write model/, in the layout of sentence-transformers and transformers.js, and pairs.jsonl into a folder."""
    found = sorted(pairs(), key=lambda each: each["anchor"])
    random.Random(0).shuffle(found)
    model = folder / "model"
    for part in ("onnx", "1_Pooling"):
        (model / part).mkdir(parents=True, exist_ok=True)
    make_tokenizer(text for each in found for text in each.values()).save(str(model / "tokenizer.json"))
    configs = {
        "tokenizer_config.json": {"pad_token": "[PAD]", "model_max_length": LONGEST},
        "config.json": {"model_type": "bert", "hidden_size": WIDTH, "max_position_embeddings": LONGEST},
        "1_Pooling/config.json": {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True},
    }
    for name, config in configs.items():
        (model / name).write_text(json.dumps(config, indent=1))
    onnx.save(make_model(), model / "onnx" / "model.onnx")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found), encoding="utf-8")


if __name__ == "__main__":
    make()
