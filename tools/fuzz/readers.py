"""What is fuzzed: readers of others' files, each given bytes, with the files that it starts from.

A reader may raise what its documentation names for a bad file, in `REFUSED`. Anything else, a crash, or a run that
takes long or much memory is a find.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
REFUSED = (ValueError, TypeError, NotImplementedError, OSError)


class Target(NamedTuple):
    """A reader: what it does with bytes, the contents that it starts from, and words that such files hold."""

    read: Callable[[bytes], object]
    seeds: Callable[[], Iterator[bytes]]
    words: tuple[bytes, ...] = ()


@cache
def folder() -> Path:
    """A folder of this process, in memory where the system has one there; it goes with the process."""
    made = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def from_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of bytes that writes them into a file of this name, which `read` is given."""

    def run(data: bytes) -> object:
        path = folder() / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return run


# --- ONNX ------------------------------------------------------------------------------------------------------------

TEXTS = (
    "g (float[n, 4] x) => (float[n, 3] y) { h = Gemm(x, w, b)  a = Relu(h)  y = Softmax<axis = -1>(a) }",
    "g (float[2, 3, 4, 4] x) => (float[2, 3] y) { p = AveragePool<kernel_shape = [2, 2]>(x)"
    " y = ReduceMean<axes = [2, 3], keepdims = 0>(p) }",
    "g (float[n, 4] x, bool c) => (float[n, 4] y) { y = If(c) <then_branch = t () => (float[n, 4] a) { a = Exp(x) },"
    " else_branch = e () => (float[n, 4] b) { b = Neg(x) }> }",
)  # fmt: skip


def models() -> Iterator[bytes]:
    """Small models: layers, windows, a branch."""
    for text in TEXTS:
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
        if "Gemm" in text:
            weights = {"w": np.ones((4, 3), np.float32), "b": np.zeros(3, np.float32)}
            model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
        yield model.SerializeToString()


def differentiated(data: bytes) -> None:
    """The graph of a model's gradients."""
    from opgrad.gradients import gradients

    model = onnx.ModelProto()
    with suppress(Exception):
        model.ParseFromString(data)
    gradients(data, "y", [each.name for each in model.graph.input][:1])


def inspected(path: Path) -> None:
    """What `opgrad inspect` tells of a model."""
    from opgrad.cli.inspection import inspect

    inspect(path)


# --- files of training -----------------------------------------------------------------------------------------------


def checkpoint(path: Path) -> None:
    from opgrad.training import read_checkpoint

    read_checkpoint(path)


def checkpoints() -> Iterator[bytes]:
    """A checkpoint in each of the two formats that have small ones."""
    from opgrad.training import Checkpoint, write_checkpoint

    values = {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)}
    path = folder() / "made"
    write_checkpoint(
        Checkpoint(values, {"f": np.ones(2, np.float32)}, properties={"epoch": 1, "x": 0.5, "t": "text"}), path
    )
    yield path.read_bytes()
    yield (DIGITS / "checkpoint").read_bytes()


def safetensors(data: bytes) -> None:
    from opgrad.training.files.weights import Damaged
    from opgrad.training.files.weights import decode_tensors as decode

    with suppress(Damaged):
        decode(data)


def tensors() -> Iterator[bytes]:
    from opgrad.training.files.weights import encode_tensors as encode

    values = {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float16)}
    yield encode(values, {"format": "pt"})
    yield encode({}, {})


def _inputs() -> tuple[object, ...]:
    from opgrad.training import TensorSpec

    return TensorSpec("x", np.dtype(np.float32), ("n", 2)), TensorSpec("y", np.dtype(np.int64), ("n",))


def examples(path: Path) -> None:
    from opgrad.training.files.dataset import load_file

    load_file(path, _inputs())  # type: ignore[arg-type]


def archives() -> Iterator[bytes]:
    """Arrays in .npz files, compressed and not."""
    for save in (np.savez, np.savez_compressed):
        file = BytesIO()
        save(file, x=np.ones((3, 2), np.float32), y=np.arange(3))
        yield file.getvalue()


def arrays() -> Iterator[bytes]:
    for table in (np.ones((3, 3)), np.ones((2, 3), ">f4", order="F")):
        file = BytesIO()
        np.save(file, table)
        yield file.getvalue()


def tables() -> Iterator[bytes]:
    yield b"a,b,y\n0.5,1,0\n1e3,-2,1\n"
    yield b"0;1;2\n3;4;5"
    yield b"1\t2\t3\r\n"


def recipe(path: Path) -> None:
    from opgrad.training.run.recipe import Recipe

    Recipe.load(path.parent)


def recipes() -> Iterator[bytes]:
    for path in sorted(ROOT.glob("examples/*/recipe.toml")):
        yield path.read_bytes()


def state(data: bytes) -> None:
    from opgrad.training.run.state import RunState

    RunState.from_text(data.decode("utf-8", "replace"))


def states() -> Iterator[bytes]:
    from opgrad.training.run.recipe import Recipe
    from opgrad.training.run.state import RunState

    yield RunState(Recipe(), 0, 2).to_text().encode()


# --- language models -------------------------------------------------------------------------------------------------


def tokenizer(data: bytes) -> None:
    """A tokenizer's folder: three files, which the bytes hold one behind the other."""
    from opgrad.tune.tokenizer import Tokenizer

    place = folder() / "tokenizer"
    place.mkdir(exist_ok=True)
    names = ("tokenizer.json", "tokenizer_config.json", "genai_config.json", "chat_template.jinja")
    for name, part in zip(names, data.split(b"\0\0"), strict=False):
        (place / name).write_bytes(part)
    found = Tokenizer(place)
    if found.template is not None:
        found.template.render([{"role": "user", "content": "a"}])


def tokenizers() -> Iterator[bytes]:
    vocabulary: dict[str, object] = {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "</s>": 2}, "unk_token": "a"}
    }
    vocabulary["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    said = "{{ m['role'] }}: {{ m.content | trim }}{{ m.tool_calls or '' }}{{ eos_token }}"
    template = "{% for m in messages %}" + said + "{% endfor %}"
    config = {"eos_token": "</s>", "chat_template": template}
    parts = json.dumps(vocabulary), json.dumps(config), json.dumps({"eos_token_id": [2]})
    yield b"\0\0".join(part.encode() for part in parts)
    yield b"\0\0".join([*(part.encode() for part in parts), template.encode()])


@cache
def known_tokenizer() -> object:
    """A tokenizer with a chat template, whose files nobody changes."""
    from opgrad.tune.tokenizer import Tokenizer

    place = folder() / "known"
    place.mkdir()
    names = ("tokenizer.json", "tokenizer_config.json")
    for name, part in zip(names, next(tokenizers()).split(b"\0\0"), strict=False):
        (place / name).write_bytes(part)
    return Tokenizer(place)


def lines(path: Path) -> None:
    """The examples of a .jsonl file, each read by every way of training."""
    from opgrad.tune.examples import TRAIN_ON, TokenExamples

    for train_on in TRAIN_ON:
        found = TokenExamples(path, known_tokenizer(), 16, train_on)  # type: ignore[arg-type]
        assert sum(len(found[number].tokens) for number in range(len(found))) == found.told.tokens


def line_files() -> Iterator[bytes]:
    chat = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b"}]
    yield json.dumps({"messages": chat, "tools": [{"name": "f"}]}).encode() + b"\n"
    yield b'{"prompt": "a", "completion": "b a"}\n\n{"text": "a b"}\r\n'
    yield json.dumps({"prompt": chat[:1], "completion": chat[1:]}).encode()
    call = {**chat[1], "weight": 0.5, "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    yield "\n".join(map(json.dumps, [{"messages": [chat[0], call]}, {"conversations": turns}])).encode()
    yield b'{"instruction": "a", "input": "b", "output": "a"}\n{"prompt": "a", "response": "b", "system": "a"}'


@cache
def known_base() -> object:
    """A language model with two products beside its table."""
    from opgrad.tune.language_model import read

    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (int64[b, n] input_ids) => (float[b, n, 4] logits) {'
        " x = Gather(table, input_ids)  h = MatMul(x, q)  logits = MatMul(h, w) }"
    )
    model = onnx.parser.parse_model(text)
    names = {"table": "embed_tokens.weight", "q": "layers.0.self_attn.q_proj.weight", "w": "lm_head.weight"}
    for node in model.graph.node:
        node.name = node.output[0]
        node.input[:] = [names.get(name, name) for name in node.input]
    arrays = (np.ones((4, 3), np.float32), np.ones((3, 3), np.float32), np.ones((3, 4), np.float32))
    made = [onnx.numpy_helper.from_array(each, name) for each, name in zip(arrays, names.values(), strict=True)]
    model.graph.initializer.extend(made)
    path = folder() / "base.onnx"
    path.write_bytes(model.SerializeToString())
    return read(path)


def adapter(data: bytes) -> None:
    """A folder of PEFT: its configuration and its tensors, which the bytes hold one behind the other."""
    from opgrad.tune import peft

    place = folder() / "adapter"
    place.mkdir(exist_ok=True)
    config, _, tensors = data.partition(b"\0\0\0\0")
    (place / peft.CONFIG).write_bytes(config)
    (place / peft.WEIGHTS).write_bytes(tensors)
    peft.read(place, known_base())  # type: ignore[arg-type]


def adapters() -> Iterator[bytes]:
    from opgrad.training.files.weights import encode_tensors as encode

    name = "base_model.model.layers.0.self_attn.q_proj"
    values = {f"{name}.lora_A.weight": np.ones((2, 3), np.float32), f"{name}.lora_B.weight": np.ones((3, 2), "f2")}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {}}
    yield json.dumps(config).encode() + b"\0\0\0\0" + encode(values, {"format": "pt"})


# --- packs -----------------------------------------------------------------------------------------------------------


def pack(data: bytes) -> None:
    """A pack as it is read, each of its kernels, too."""
    from opgrad.cpu.compiler.target import Pack, PackedObjects, PackError

    path = folder() / "kernels.pack"
    path.write_bytes(data)
    path.chmod(0o600)
    with suppress(PackError):
        found = Pack(str(path))
        for processor, names in found.names.items():
            for name in names:
                with suppress(PackError):
                    PackedObjects(found, processor).read(name)


def packs() -> Iterator[bytes]:
    from opgrad.cpu.compiler.cache import ObjectCache
    from opgrad.cpu.compiler.target import packed

    place = folder() / "processors"
    for names in ((), ("name", "another")):
        for name in names:
            ObjectCache("aarch64", str(place)).write(name, b"code")
        place.mkdir(mode=0o700, exist_ok=True)
        yield packed(str(place))


JSON_WORDS = (b'{"', b'":', b"[", b"]", b"null", b"1e999", b"NaN", b"-1", b"9223372036854775808")
READERS = {
    "onnx": Target(differentiated, models, (b"Relu", b"Gemm", b"com.microsoft", b"MatMul", b"Reshape", b"Loop")),
    "inspect": Target(from_file("model.onnx", inspected), models, (b"Conv", b"ai.onnx.ml", b"labels")),
    "checkpoint": Target(from_file("checkpoint", checkpoint), checkpoints, (b"ODTC",)),
    "safetensors": Target(safetensors, tensors, (*JSON_WORDS, b"data_offsets", b"BF16", b"F8_E4M3", b"__metadata__")),
    "npz": Target(from_file("data.npz", examples), archives, (b"PK\3\4", b"\x93NUMPY", b"descr", b"|O")),
    "npy": Target(from_file("data.npy", examples), arrays, (b"\x93NUMPY", b"'|O'", b"shape", b"fortran_order")),
    "csv": Target(from_file("data.csv", examples), tables, (b"nan", b"inf", b"1e400", b'"', b"#", b"0x1p3", b"1_0")),
    "toml": Target(from_file("recipe.toml", recipe), recipes, (b"[divide]", b"[[", b"inf", b"epochs = ", b'"""')),
    "state": Target(state, states, JSON_WORDS),
    "tokenizer": Target(
        tokenizer, tokenizers, (*JSON_WORDS, b"{{", b"}}", b"{%", b"%}", b"range(", b"__class__", b"**")
    ),
    "jsonl": Target(from_file("data.jsonl", lines), line_files, (*JSON_WORDS, b"\\ud800", b"messages", b"content")),
    "peft": Target(adapter, adapters, (*JSON_WORDS, b"rank_pattern", b"lora_dropout", b"F8_E4M3", b"lora_embedding_A")),
    "pack": Target(pack, packs, (*JSON_WORDS, b"PK\3\4", b"PK\1\2")),
}
