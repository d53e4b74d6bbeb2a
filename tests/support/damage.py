"""Seeded damage to models and checkpoints, and what is tried with them.

`python tests/support/damage.py 5000` runs more of it than the tests do, and prints what was no ValueError.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import onnx
from google.protobuf.descriptor import FieldDescriptor

from opgrad.cli.inspection import inspect
from opgrad.onnxruntime import lower
from opgrad.onnxruntime.loading import lower_file
from opgrad.training import ArtifactSet, Trainer
from opgrad.training.api import CheckpointState, Module, Optimizer
from opgrad.training.files.artifact_set import FILES

ROOT = Path(__file__).parents[2]
SETS = [ROOT / "examples" / name for name in ("digits", "digits_attention")]
SETS += [ROOT / "tests" / "artifacts" / name for name in ("mlp_mse", "digits_cnn", "embedding")]
NUMBERS = (0, 1, -1, 2, 7, 16, 36, 255, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
NAMES = ("", "x", "labels", "lazy_reset_grad", "Relu", "Gemm", "com.microsoft", "ai.onnx", "a\0b", "é" * 9)
REFUSED = (ValueError, NotImplementedError)


# --- damage ----------------------------------------------------------------------------------------------------------


def damaged_bytes(content, chance):
    """The bytes with some flipped, overwritten, left out, or twice."""
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place, length = chance.randrange(len(found) or 1), chance.choice((1, 2, 4, 8, 64))
        kind = chance.randrange(6)
        if kind == 0:
            del found[place:]
        elif kind == 1:
            found[place : place + length] = chance.choice((b"\xff", b"\0", b"\x7f")) * length
        elif kind == 2:
            del found[place : place + length]
        elif kind == 3:
            found[place:place] = found[place : place + length]
        elif found:
            found[place] ^= 1 << chance.randrange(8)
    return bytes(found)


def damaged_model(content, chance):
    """The model with some fields changed, cleared, left out, or twice."""
    model = onnx.load_from_string(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        messages = [model.graph, *model.graph.node, *model.graph.input, *model.graph.output]
        message = chance.choice(messages if chance.random() < 0.4 else list(_messages(model)))
        fields = [field for field, _ in message.ListFields()]
        if chance.random() < 0.2 or not fields:
            fields = [field for field in message.DESCRIPTOR.fields if not _is_message(field)] or fields
        if fields:
            _damage(message, chance.choice(fields), chance)
    return model.SerializeToString()


def _messages(message):
    yield message
    for field, value in message.ListFields():
        if _is_message(field):
            for each in value if _repeats(field) else [value]:
                yield from _messages(each)


def _is_message(field):
    return bool(field.type == FieldDescriptor.TYPE_MESSAGE)


def _repeats(field):
    return bool(field.is_repeated)


def _damage(message, field, chance):
    if _repeats(field):
        _damage_list(getattr(message, field.name), field, chance)
    elif _is_message(field) or chance.random() < 0.3:
        message.ClearField(field.name)
    else:
        _try(lambda: setattr(message, field.name, _value(field, chance)))


def _damage_list(values, field, chance):
    kind = chance.randrange(4)
    if kind == 0 or not len(values):
        if not _is_message(field):
            _try(lambda: values.append(_value(field, chance)))
    elif kind == 1:
        del values[chance.randrange(len(values))]
    elif kind == 2:
        values.extend([values[chance.randrange(len(values))]])
    elif not _is_message(field):
        place = chance.randrange(len(values))
        _try(lambda: values.__setitem__(place, _value(field, chance)))
    else:
        del values[:]


def _value(field, chance):
    if field.type == FieldDescriptor.TYPE_STRING:
        return chance.choice(NAMES)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.choice((b"", b"mean", b"\xff" * 9))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return chance.choice((0.0, -1.0, float("nan"), float("inf"), 1e30))
    return chance.choice(NUMBERS)


def _try(act):
    """Leave the field alone if it does not take the value."""
    try:
        act()
    except (ValueError, TypeError):
        return


# --- what is tried ---------------------------------------------------------------------------------------------------


def open_module(folder):
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    Optimizer(folder / "optimizer_model.onnx", module)


def lower_all(folder):
    for name in FILES[:3]:
        lower(folder / name)
    lower_file(folder / "training_model.onnx", folder / "lowered.onnx")


ACTIONS = (
    *(ArtifactSet.load, lambda folder: Trainer(ArtifactSet.load(folder)), open_module, lower_all),
    *(inspect, lambda folder: inspect(folder / "training_model.onnx")),
)


def attempt(seed):
    """Damage a file of a set and try something with the set; what was raised that is no refusal, and where."""
    chance = random.Random(seed)
    source, damaged = chance.choice(SETS), chance.choice(FILES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in FILES:
            shutil.copy(source / file, folder / file)
        change = damaged_bytes if damaged == "checkpoint" or chance.random() < 0.4 else damaged_model
        (folder / damaged).write_bytes(change((source / damaged).read_bytes(), chance))
        try:
            chance.choice(ACTIONS)(folder)
        except REFUSED as error:
            return f"several lines: {error!r}" if "\n" in str(error) else None
        except Exception as error:
            ours = [each for each in traceback.extract_tb(error.__traceback__) if "/opgrad/" in each.filename][-1]
            return f"{Path(ours.filename).name}:{ours.lineno} {type(error).__name__}: {error}"
    return None


def in_a_child(seed, seconds=60):
    """The same in a process of its own, which may end or hang."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(seconds)
        os.write(writing, (attempt(seed) or "").encode()[:4000])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        found = file.read().decode(errors="replace")
    status = os.waitpid(child, 0)[1]
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else found or None


def main():
    found, count = 0, int(sys.argv[1])
    for seed in range(count):
        print(f"\r{seed}", end="", file=sys.stderr)
        problem = in_a_child(seed)
        if problem is not None:
            print(f"seed {seed}: {' '.join(problem[:200].split())}", flush=True)
            found += 1
    print(f"{found} of {count} raised what is no refusal")


if __name__ == "__main__":
    main()
