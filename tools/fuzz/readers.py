"""What is fuzzed: readers of others' files, each given bytes, with the files that it starts from.

A reader may raise what its documentation names for a bad file, in `REFUSED`. Anything else, a crash, or a run that
takes long or much memory is a find.
"""

import atexit
import hashlib
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
    from opgrad.training.inspect.inspection import inspect

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
    from opgrad.training.formats.safetensors import Damaged, decode

    with suppress(Damaged):
        decode(data)


def tensors() -> Iterator[bytes]:
    from opgrad.training.formats.safetensors import encode

    values = {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float16)}
    yield encode(values, {"format": "pt"})
    yield encode({}, {})


def _inputs() -> tuple[object, ...]:
    from opgrad.training import TensorSpec

    return TensorSpec("x", np.dtype(np.float32), ("n", 2)), TensorSpec("y", np.dtype(np.int64), ("n",))


def examples(path: Path) -> None:
    from opgrad.training import load_file

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
    from opgrad.training import Recipe

    Recipe.load(path.parent)


def recipes() -> Iterator[bytes]:
    for path in sorted(ROOT.glob("examples/*/recipe.toml")):
        yield path.read_bytes()


def state(data: bytes) -> None:
    from opgrad.training.run.state import RunState

    RunState.from_text(data.decode("utf-8", "replace"))


def states() -> Iterator[bytes]:
    from opgrad.training import Recipe
    from opgrad.training.run.state import RunState

    yield RunState(Recipe(), 0, 2).to_text().encode()


# --- language models -------------------------------------------------------------------------------------------------


def tokenizer(data: bytes) -> None:
    """A tokenizer's folder: three files, which the bytes hold one behind the other."""
    from opgrad.training.tune.tokenizer import Tokenizer

    place = folder() / "tokenizer"
    place.mkdir(exist_ok=True)
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    for name, part in zip(names, data.split(b"\0\0"), strict=False):
        (place / name).write_bytes(part)
    found = Tokenizer(place)
    if found.template is not None:
        found.template.render([{"role": "user", "content": "a"}])


def tokenizers() -> Iterator[bytes]:
    vocabulary = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "</s>": 2}, "unk_token": "a"}}
    template = "{% for m in messages %}{{ m['role'] }}: {{ m.content | trim }}{{ eos_token }}{% endfor %}"
    config = {"eos_token": "</s>", "chat_template": template}
    parts = json.dumps(vocabulary), json.dumps(config), json.dumps({"eos_token_id": [2]})
    yield b"\0\0".join(part.encode() for part in parts)
    yield b"\0\0".join([*(part.encode() for part in parts), template.encode()])


# --- packs -----------------------------------------------------------------------------------------------------------


def pack(data: bytes) -> None:
    """A pack whose index has the right checksum, whatever is in it."""
    from opgrad.cpu.compiler.packs import INDEX_AT, LENGTH_AT, MAGIC, Pack, PackError, made_with

    size = int.from_bytes(data[:2], "little")
    text, body = data[2 : 2 + size], data[2 + size :]
    with suppress(ValueError, RecursionError):
        text = json.dumps(made_with() | json.loads(text)).encode()
    path = folder() / "kernels.pack"
    head = MAGIC + hashlib.sha256(text).digest() + len(text).to_bytes(INDEX_AT - LENGTH_AT, "little")
    path.write_bytes(head + text + body)
    path.chmod(0o600)
    with suppress(PackError):
        Pack(str(path)).everything()


def packs() -> Iterator[bytes]:
    import zlib

    body = zlib.compress(b"code")
    for index in ({"kernels": {"aarch64": {"name": [0, len(body), "00"]}}}, {"kernels": {}}):
        text = json.dumps(index).encode()
        yield len(text).to_bytes(2, "little") + text + body


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
    "pack": Target(pack, packs, JSON_WORDS),
}
