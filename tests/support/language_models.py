"""Small language models with tokenizers, as exporters write them into folders."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

WORDS = ["the", "cat", "dog", "bird", "sees", "likes", "a", "red", "blue", "small", "tree", ".", "hello", "what", "is"]
WORDS += ["who", "are", "you", "i", "am"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] | trim + ' <|end|> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)


def path(module: str) -> str:
    """The names of a module's nodes begin with this: /model/layers.0/self_attn/q_proj."""
    return "/" + re.sub(r"\.(?!\d)", "/", module)


class Writer:
    """Nodes and weights of a decoder in the names of Llama's modules. Every product is x · W.

    vocabulary, width, heads, shared: sizes; `shared` is the number of heads of keys and values.
    cached: whether attention is GroupQueryAttention with caches of keys and values, as onnxruntime-genai runs it; else
        it is ONNX's Attention, which is causal.
    """

    def __init__(self, vocabulary: int, width: int, heads: int, shared: int, cached: bool, seed: int):
        self.vocabulary, self.width, self.heads, self.shared, self.cached = vocabulary, width, heads, shared, cached
        self.head = width // heads
        self.generator = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def weight(self, name: str, *shape: int) -> str:
        values = self.generator.standard_normal(shape) / np.sqrt(shape[0]) if len(shape) > 1 else np.ones(shape)
        self.tensors.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def constant(self, value: np.ndarray, name: str) -> str:
        self.tensors.append(numpy_helper.from_array(value, name))
        return name

    def node(self, op: str, inputs: list[str], name: str, domain: str = "", outputs: int = 1, **given: object) -> str:
        results = [f"{name}/output_{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, results, name, domain=domain, **given))
        return results[0]

    def product(self, x: str, name: str, rows: int, columns: int) -> str:
        return self.node("MatMul", [x, self.weight(f"{name}.weight", rows, columns)], f"{path(name)}/MatMul")

    def norm(self, x: str, name: str) -> str:
        given = {"axis": -1, "epsilon": 1e-6, "stash_type": 1}
        node = f"{path(name)}/LayerNorm"
        return self.node("SimplifiedLayerNormalization", [x, self.weight(f"{name}.weight", self.width)], node, **given)

    def layer(self, x: str, number: int) -> str:
        name, width, shared = f"model.layers.{number}", self.width, self.shared * self.head
        normal = self.norm(x, f"{name}.input_layernorm")
        q, k, v = (
            self.product(normal, f"{name}.self_attn.{role}_proj", width, size)
            for role, size in (("q", width), ("k", shared), ("v", shared))
        )
        attended = self.attention(q, k, v, number)
        x = self.node("Add", [x, self.product(attended, f"{name}.self_attn.o_proj", width, width)], f"{path(name)}/add")
        normal = self.norm(x, f"{name}.post_attention_layernorm")
        gate = self.product(normal, f"{name}.mlp.gate_proj", width, 2 * width)
        up = self.product(normal, f"{name}.mlp.up_proj", width, 2 * width)
        active = self.node(
            "Mul", [gate, self.node("Sigmoid", [gate], f"{path(name)}/mlp/sigmoid")], f"{path(name)}/mlp/silu"
        )
        inner = self.node("Mul", [active, up], f"{path(name)}/mlp/mul")
        return self.node(
            "Add", [x, self.product(inner, f"{name}.mlp.down_proj", 2 * width, width)], f"{path(name)}/add_1"
        )

    def attention(self, q: str, k: str, v: str, number: int) -> str:
        name = f"/model/layers.{number}/self_attn/attention"
        if not self.cached:
            given = {"q_num_heads": self.heads, "kv_num_heads": self.shared, "is_causal": 1}
            return self.node("Attention", [q, k, v], name, **given)
        past = [f"past_key_values.{number}.{what}" for what in ("key", "value")]
        present = [f"present.{number}.{what}" for what in ("key", "value")]
        node = helper.make_node(
            "GroupQueryAttention", [q, k, v, *past, "seqlens", "total", "cosines", "sines"],
            [f"{name}/output_0", *present], name, domain="com.microsoft",
            num_heads=self.heads, kv_num_heads=self.shared, do_rotary=1,
        )  # fmt: skip
        self.nodes.append(node)
        return f"{name}/output_0"

    def lengths(self) -> None:
        """What GroupQueryAttention reads of the mask, and its cosines and sines."""
        one = self.constant(np.array([1], np.int64), "one")
        counts = self.node("ReduceSum", ["attention_mask", one], "/model/mask/ReduceSum")
        last = self.node("Sub", [counts, one], "/model/mask/Sub")
        self.nodes.append(helper.make_node("Cast", [last], ["seqlens"], "/model/mask/Cast", to=TensorProto.INT32))
        shape = self.node("Shape", ["attention_mask"], "/model/mask/Shape")
        size = self.node("Gather", [shape, self.constant(np.array(1), "place")], "/model/mask/Gather", axis=0)
        self.nodes.append(helper.make_node("Cast", [size], ["total"], "/model/mask/Cast_1", to=TensorProto.INT32))
        angles = np.outer(np.arange(512), 10000.0 ** -(np.arange(self.head // 2) * 2 / self.head)).astype(np.float32)
        self.constant(np.cos(angles), "cosines")
        self.constant(np.sin(angles), "sines")


def make_model(
    vocabulary: int, layers: int = 2, width: int = 32, heads: int = 2, shared: int = 1, cached: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:  # fmt: skip
    """A decoder with random weights."""
    writer = Writer(vocabulary, width, heads, shared, cached, seed)
    table = writer.weight("model.embed_tokens.weight", vocabulary, width)
    x = writer.node("Gather", [table, "input_ids"], "/model/embed_tokens/Gather")
    if cached:
        writer.lengths()
    for number in range(layers):
        x = writer.layer(x, number)
    logits = writer.product(writer.norm(x, "model.norm"), "lm_head", width, vocabulary)
    writer.nodes.append(helper.make_node("Identity", [logits], ["logits"], "/lm_head/output"))
    float_type, integer = TensorProto.FLOAT, TensorProto.INT64
    inputs = [helper.make_tensor_value_info("input_ids", integer, ["batch_size", "sequence_length"])]
    outputs = [helper.make_tensor_value_info("logits", float_type, ["batch_size", "sequence_length", vocabulary])]
    if cached:
        inputs.append(helper.make_tensor_value_info("attention_mask", integer, ["batch_size", "total_sequence_length"]))
        for number in range(layers):
            for what in ("key", "value"):
                past = ["batch_size", shared, "past_sequence_length", width // heads]
                inputs.append(helper.make_tensor_value_info(f"past_key_values.{number}.{what}", float_type, past))
                present = ["batch_size", shared, "total_sequence_length", width // heads]
                outputs.append(helper.make_tensor_value_info(f"present.{number}.{what}", float_type, present))
    graph = helper.make_graph(writer.nodes, "main", inputs, outputs, writer.tensors)
    opsets = [helper.make_opsetid("", 23 if not cached else 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def add_behind_table(model: onnx.ModelProto, nodes: str) -> None:
    """Let y, which nodes in ONNX's text compute of the table's rows x, stand in the place of these."""
    graph = onnx.parser.parse_graph(f"g (float[b, l, 32] x) => (float[b, l, 32] y) {{ {nodes} }}")
    constants = {"zero": np.array(0), "one": np.array(1), "ends": np.array([0, 2])}
    constants["w"] = np.random.default_rng(0).normal(size=(32, 1, 3)).astype(np.float32)
    model.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in constants.items())
    renamed = {model.graph.node[0].output[0]: "y"}
    for node in model.graph.node:
        node.input[:] = [renamed.get(each, each) for each in node.input]
    model.graph.node[0].output[0] = "x"
    for place, node in enumerate(graph.node, 1):
        model.graph.node.insert(place, node)


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of so many bits along the last axis in bytes, the lowest bits first."""
    parts = 8 // bits
    padded = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % parts)])
    places = padded.reshape(*numbers.shape[:-1], -1, parts).astype(np.uint8) << np.arange(0, 8, bits, dtype=np.uint8)
    return places.sum(-1, dtype=np.uint8)


def quantize(path: Path, bits: int = 4, block: int = 16, zeros: bool = False, apart: bool = False) -> None:
    """Write the products of a model's file as MatMulNBits.

    zeros: with zero points. apart: whether all weights lie in model.onnx.data.
    """
    model, random, half = onnx.load(path), np.random.default_rng(0), 2 ** (bits - 1)
    weights = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights:
            continue
        module = node.input[1].removesuffix(".weight")
        w = weights.pop(node.input[1]).T
        rows, columns, blocks = *w.shape, -(-w.shape[1] // block)
        w = np.pad(w, [(0, 0), (0, blocks * block - columns)]).reshape(rows, blocks, block)
        scales = (np.abs(w).max(2) / (half - 1) + 1e-6).astype(np.float32)
        points = random.integers(half - 1, half + 2, (rows, blocks)) if zeros else np.full((rows, blocks), half)
        q = np.clip(np.round(w / scales[..., None]) + points[..., None], 0, 2 * half - 1).astype(np.int64)
        arrays = {"qweight": packed(q, bits), "scales": scales.reshape(-1)}
        arrays |= {"qzeros": packed(points, bits).reshape(-1)} if zeros else {}
        weights |= {f"{module}.MatMul.{name}": array for name, array in arrays.items()}
        inputs = [node.input[0], *(f"{module}.MatMul.{name}" for name in arrays)]
        given = {"N": rows, "K": columns, "bits": bits, "block_size": block, "domain": "com.microsoft"}
        node.CopyFrom(helper.make_node("MatMulNBits", inputs, list(node.output), node.name, **given))
    del model.graph.initializer[:]
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, path, save_as_external_data=apart, location="model.onnx.data", size_threshold=0)


def scores(
    model: onnx.ModelProto | Path, tokens: np.ndarray, values: dict[str, np.ndarray] | None = None,
    adapter: Path | None = None, exact: bool = False,
) -> np.ndarray:  # fmt: skip
    """The scores of a model, or of a file, in stock onnxruntime.

    values: its other inputs. adapter: a file of onnxruntime's. exact: without onnxruntime's own fusions.
    """
    options, run = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    options.log_severity_level = 3
    if exact:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if adapter is not None:
        held = onnxruntime.LoraAdapter()
        held.Load(str(adapter))
        run.add_active_adapter(held)
    given = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    session = onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"input_ids": tokens, **(values or {})}, run)[0]


def mean_loss(found: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """The mean cross-entropy of labels in float64, each with its weight."""
    wide = found.astype(np.float64)
    logs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    terms = -np.take_along_axis(logs, labels[..., None], -1)[..., 0]
    return float(np.average(terms, weights=weights))


def vary_attention(path: Path) -> None:
    """Give the attention of a model a window, a softcap, sinks, and pairs of neighbours in its rotary embedding."""
    model = onnx.load(path)
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    heads = next(each.i for each in nodes[0].attribute if each.name == "num_heads")
    model.graph.initializer.append(numpy_helper.from_array(np.linspace(-1, 2, heads, dtype=np.float32), "sinks"))
    for node in nodes:
        given = {"local_window_size": 4, "softcap": 5.0, "rotary_interleaved": 1}
        node.attribute.extend(helper.make_attribute(*each) for each in given.items())
        node.input.extend(["", "", "sinks"])
    onnx.save(model, path)


def make_tokenizer(words: list[str] = WORDS) -> str:
    """The content of tokenizer.json: words between blanks are tokens."""
    special = ["<unk>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    added = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for number, text in enumerate(special)
    ]  # fmt: skip
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    content = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return json.dumps(content | empty)


def make_folder(folder: Path, words: list[str] = WORDS, template: str | None = TEMPLATE, **given: object) -> Path:
    """A folder with a model, its tokenizer and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(make_model(5 + len(words), **given), folder / "model.onnx")
    (folder / "tokenizer.json").write_text(make_tokenizer(words))
    config = {"eos_token": "<|end|>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_lines(path: Path, examples: list[dict[str, object]]) -> Path:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(each) + "\n" for each in examples))
    return path
