"""Makes what this example trains: a small language model with random weights, its tokenizer, and two files of text.

The texts come with Python: the language reference that `help()` shows, and the docstrings of the standard library.
"""

import importlib
import inspect
import json
import logging
import re
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import onnx
import tokenizers
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

HERE = Path(__file__).parent
VOCABULARY, LAYERS, WIDTH, HEADS, SHARED, LONGEST = 1024, 4, 192, 6, 2, 512
HEAD = WIDTH // HEADS
PIECE = 400  # characters, about
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODULES = "builtins string math random statistics itertools functools collections re os os.path shutil glob json csv"
MODULES += " time datetime calendar zlib gzip hashlib socket threading subprocess inspect operator pathlib textwrap"


# --- texts -----------------------------------------------------------------------------------------------------------


def passages():
    """Pieces of the language reference, each of a few sentences."""
    for text in topics.values():
        piece = ""
        for sentence in re.split(r"(?<=[.:]) ", re.sub(r"\s+", " ", text).strip()):
            piece += sentence[:PIECE] + " "
            if len(piece) > PIECE:
                yield piece.strip()
                piece = ""
        if piece:
            yield piece.strip()


def questions():
    """Chats: what a function of the standard library does, answered by the first sentence of its docstring."""
    seen = set()
    for name in MODULES.split():
        module = importlib.import_module(name)
        holders = [(module, ""), *((each, f"{kind}.") for kind, each in vars(module).items() if inspect.isclass(each))]
        for holder, prefix in holders:
            for member, value in sorted(vars(holder).items()):
                first = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
                known = member[0] in "_ABCDEFGHIJKLMNOPQRSTUVWXYZ" or not callable(value) or first in seen
                if not known and re.fullmatch(r"[A-Z][\w ,'\"()-]{15,90}\.", first):
                    seen.add(first)
                    asked = {"role": "user", "content": f"What does {prefix}{member} do?"}
                    yield {"messages": [asked, {"role": "assistant", "content": first}]}


def write_lines(path, examples):
    path.write_text("".join(json.dumps(each) + "\n" for each in examples), encoding="utf-8")


# --- the model -------------------------------------------------------------------------------------------------------


def make_model():
    """A decoder with random weights in the graph that onnxruntime-genai runs, with caches of keys and values."""
    random, nodes, weights = np.random.default_rng(0), [], []
    nodes.append(helper.make_node("Gather", ["model.embed_tokens.weight", "input_ids"], ["x0"], "/model/embed_tokens"))

    def weight(name, *shape, scale=0.05):
        values = random.standard_normal(shape) * scale if len(shape) > 1 else np.ones(shape)
        weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def add(op, inputs, output, **attributes):
        nodes.append(helper.make_node(op, inputs, [output], f"/{output}", **attributes))
        return output

    def product(x, module, rows, columns):
        return add("MatMul", [x, weight(f"{module}.weight", rows, columns)], module)

    def norm(x, module):
        return add("SimplifiedLayerNormalization", [x, weight(f"{module}.weight", WIDTH)], module, epsilon=1e-6)

    weight("model.embed_tokens.weight", VOCABULARY, WIDTH)
    one, place = (numpy_helper.from_array(np.array(value), name) for value, name in (([1], "one"), (1, "place")))
    angles = np.outer(np.arange(LONGEST), 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD)).astype(np.float32)
    weights += [
        one,
        place,
        *(numpy_helper.from_array(f(angles), name) for f, name in ((np.cos, "cos"), (np.sin, "sin"))),
    ]
    add("ReduceSum", ["attention_mask", "one"], "counts")
    add("Cast", [add("Sub", ["counts", "one"], "last")], "seqlens", to=TensorProto.INT32)
    add("Cast", [add("Gather", [add("Shape", ["attention_mask"], "shape"), "place"], "size")], "total", to=6)
    x, caches = "x0", []
    for number in range(LAYERS):
        name = f"model.layers.{number}"
        normal = norm(x, f"{name}.input_layernorm")
        sizes = {"q": WIDTH, "k": SHARED * HEAD, "v": SHARED * HEAD}
        qkv = [product(normal, f"{name}.self_attn.{role}_proj", WIDTH, size) for role, size in sizes.items()]
        past, present = ([f"{what}.{number}.{role}" for role in ("key", "value")] for what in ("past", "present"))
        caches += zip(past, present, strict=True)
        nodes.append(helper.make_node(
            "GroupQueryAttention", [*qkv, *past, "seqlens", "total", "cos", "sin"], [f"{name}.attended", *present],
            f"/{name}.attention", domain="com.microsoft", num_heads=HEADS, kv_num_heads=SHARED, do_rotary=1,
        ))  # fmt: skip
        x = add("Add", [x, product(f"{name}.attended", f"{name}.self_attn.o_proj", WIDTH, WIDTH)], f"{name}.sum")
        normal = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (product(normal, f"{name}.mlp.{role}_proj", WIDTH, 3 * WIDTH) for role in ("gate", "up"))
        active = add("Mul", [gate, add("Sigmoid", [gate], f"{name}.sigmoid")], f"{name}.silu")
        inner = add("Mul", [active, up], f"{name}.inner")
        x = add("Add", [x, product(inner, f"{name}.mlp.down_proj", 3 * WIDTH, WIDTH)], f"{name}.out")
    add("MatMul", [norm(x, "model.norm"), weight("lm_head.weight", WIDTH, VOCABULARY)], "logits")
    inputs = [value("input_ids", "length"), value("attention_mask", "total_length")]
    inputs += [cache(past, "past_length") for past, _ in caches]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", VOCABULARY])]
    outputs += [cache(present, "total_length") for _, present in caches]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def value(name, length):
    return helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", length])


def cache(name, length):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", SHARED, length, HEAD])


def genai_config():
    """What onnxruntime-genai has to know of the model."""
    names = {f"{what}_{kind}_names": f"{what}.%d.{kind}" for what in ("past", "present") for kind in ("key", "value")}
    decoder = {
        "session_options": {"provider_options": []}, "filename": "model.onnx", "head_size": HEAD, "hidden_size": WIDTH,
        "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "num_key_value_heads": SHARED,
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask",
                   **{name: each for name, each in names.items() if "past" in name}},
        "outputs": {"logits": "logits", **{name: each for name, each in names.items() if "present" in name}},
    }  # fmt: skip
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = {"type": "llama", "context_length": LONGEST, "vocab_size": VOCABULARY, "decoder": decoder, **tokens}
    return {"model": model, "search": {"max_length": LONGEST}}


def make(folder=HERE):
    """Write model/, model-int4/, text.jsonl and chats.jsonl into a folder."""
    texts = list(passages())
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, VOCABULARY, special_tokens=SPECIAL, show_progress=False)
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    logging.getLogger("onnxruntime.quantization.matmul_nbits_quantizer").setLevel(logging.WARNING)
    quantizer = MatMulNBitsQuantizer(make_model(), block_size=32, is_symmetric=True)
    quantizer.process()
    for name, model in (("model", make_model()), ("model-int4", quantizer.model.model)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
        (folder / name / "genai_config.json").write_text(json.dumps(genai_config(), indent=1))
        onnx.save(model, folder / name / "model.onnx")
    write_lines(folder / "text.jsonl", [{"text": text} for text in texts])
    write_lines(folder / "chats.jsonl", questions())


if __name__ == "__main__":
    make()
