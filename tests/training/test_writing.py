"""Writing that fails, at every step of it: one line with the file's name, old files as they were, nothing left."""

import ast
import builtins
import json
import os
import shutil
import signal
import stat
import warnings
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from command import cli, fails
from small_models import build, normal, perceptron

import opgrad
from opgrad.base.files import finish_interrupted, replace_file, staged
from opgrad.cli import compile as packing
from opgrad.onnx.plain import lowering
from opgrad.onnxruntime.loading import lower_file
from opgrad.training import ArtifactSet, Checkpoint, Trainer, write_checkpoint
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts
from opgrad.training.engine.export import declared_outputs, export_model
from opgrad.training.export import building
from opgrad.training.export.export import export_step
from opgrad.training.files import tensor_values
from opgrad.training.make import artifacts as making
from opgrad.training.run import fit
from opgrad.training.run.metrics import EpochMetrics, plot_losses, write_csv

resource = pytest.importorskip("resource", reason="needs limits of file sizes")
DIGITS = Path(__file__).parents[2] / "examples" / "digits"


SOURCE = Path(opgrad.__file__).parent
OTHER_WRITERS = ("write_bytes", "write_text", "save", "save_model", "savez", "savez_compressed", "savetxt", "tofile")


def _writing_calls(file):
    """The calls in a file of the package by which files are written."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        modes = [each.value for each in node.args if isinstance(each, ast.Constant)]
        modes += [each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)]
        writes = any(
            isinstance(mode, str) and set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes
        )
        of_a_tuner = ast.unparse(node.func) in (
            "tuner.save",
            "self.adapted.save",
            "model.save",
            "self.task.save",
            "super().save",
        )  # which writes through that module
        if (name in ("open", "fdopen") and writes) or (name in OTHER_WRITERS and not of_a_tuner):
            yield f"{file.relative_to(SOURCE)}: {ast.unparse(node)}"


def test_one_module_writes_files():
    """What training, exports and commands write takes its place at once, or leaves what was there."""
    rooms = ("training", "tune", "cli", "onnxruntime", "onnx")
    found = [call for room in rooms for file in sorted((SOURCE / room).rglob("*.py")) for call in _writing_calls(file)]
    assert found == [
        "training/run/metrics.py: path.open('a', encoding='utf-8')",  # line by line, while a run goes
        "onnxruntime/sessions.py: open(descriptor, 'wb', closefd=False)",  # in memory, without a folder
    ]
    assert len(list(_writing_calls(SOURCE / "base" / "files.py"))) == 1


def _checkpoint(path, external_data=False):
    write_checkpoint(Checkpoint({"w": np.ones(5000, np.float32)}, {}), path, external_data=external_data)


@cache
def _digits():
    return ArtifactSet.load(DIGITS)


def _model(path, seed=0):
    artifacts = _digits()
    values = {name: array + np.float32(seed) for name, array in artifacts.trainable.items()}
    outputs = declared_outputs(artifacts.eval_model, [artifacts.scores])
    export_model(artifacts.eval_model, "m", values, outputs, path)


def _lowered(path):
    lower_file(DIGITS / "training_model.onnx", path)


@pytest.mark.parametrize("write", [_checkpoint, _model, _lowered], ids=lambda write: write.__name__)
def test_a_full_disk(tmp_path, write):
    """Files can have so many bytes: what is written beyond fails as on a full disk, without a name."""
    path, limit = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_text("old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limit[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/file'") as caught:
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    write(path)
    assert path.stat().st_size > 1024


# --- every step ---


def _wide(seed):
    """A model with 65,536 numbers that nobody trains."""
    text = "g (float[n, 64] x) => (float[n, 3] y) { h = MatMul(x, w0) a = Relu(h) y = MatMul(a, w1) }"
    arrays = normal(w0=(64, 1024), w1=(1024, 3))
    return build(text, {name: array + seed for name, array in arrays.items()})


def _set_of(model, folder, trained):
    generate_artifacts(model, [trained], None, LossType.CrossEntropyLoss, OptimType.SGD, folder)


def _artifacts(folder, seed):
    """A set whose models share a file, in the place of another, or one without in the place of one with it."""
    _set_of(_wide(seed), folder, "w1")


def _smaller_artifacts(folder, seed):
    _set_of(_wide(0), folder, "w1") if not seed else _set_of(perceptron(), folder, "w1")


def _exported(folder, seed):
    _model(folder / "model.onnx", seed)


def _exported_beside(folder, seed):
    """Beyond what one file can hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_values, "LARGEST_MODEL", 1000)
        _exported(folder, seed)


def _smaller_export(folder, seed):
    """In the place of one with a file beside it."""
    _exported(folder, seed) if seed else _exported_beside(folder, seed)


def _step(folder, seed):
    export_step(DIGITS, folder / "step.onnx", models=["eval"] * bool(seed))


def _figures(folder, seed):
    epoch = EpochMetrics(1, 1, 0.1, 1.0 + seed, None, None, 1.0, 1.0)
    picture = _picture(epoch)
    with staged(folder) as together:
        write_csv([epoch], together / "metrics.csv")
        replace_file(together / "loss.png", picture)


@cache
def _picture(epoch):
    """The picture of losses, whose drawing takes most of the time of writing it."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "loss.png")
        plot_losses([epoch], [[1.0, 2.0]], epoch.train_loss, "losses", path)
        return path.read_bytes()


WRITERS = _artifacts, _smaller_artifacts, _exported, _exported_beside, _smaller_export, _step, _figures


def failing_at(step, patch):
    """Let one of the operations on files fail, before or after it is done; returns what counts them."""
    steps = count()
    reached = [0]

    def failing(operation):
        def run(*arguments, **options):
            result = None
            for before in (True, False):
                reached[0] = next(steps)
                if reached[0] == step:
                    if not before and hasattr(result, "close"):
                        result.close()
                    raise OSError(28, "No space left on device")
                if before:
                    result = operation(*arguments, **options)
            return result

        return run

    def opening(name, mode="r", *arguments, **options):
        return (creating if "x" in mode else before_all)(name, mode, *arguments, **options)

    before_all, creating = builtins.open, failing(builtins.open)
    for module, name in ((os, "replace"), (os, "fsync"), (Path, "mkdir")):
        patch.setattr(module, name, failing(getattr(module, name)))
    patch.setattr(builtins, "open", opening)
    return lambda: reached[0]


def remembered(make):
    """The same function of a model, which computes what it makes of equal arguments once."""
    found = {}

    def made(model, *given, **more):
        key = model.SerializeToString(), repr((given, more))
        if key not in found:
            found[key] = make(model, *given, **more)
        return found[key]

    return made


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_all_or_nothing_at_every_step(write, tmp_path, monkeypatch):
    monkeypatch.setattr(making, "OUTSIDE_FROM", 100_000)
    monkeypatch.setattr(making, "models_of", remembered(making.models_of))
    for seed, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        write(tmp_path / name, 0)
        if seed:
            write(tmp_path / name, 1)
    old, new = contents(tmp_path / "old"), contents(tmp_path / "new")
    assert old != new
    folder = tmp_path / "now"
    for step in count():
        shutil.copytree(tmp_path / "old", folder)
        done = False
        with pytest.MonkeyPatch.context() as patch:
            reached = failing_at(step, patch)
            with suppress(OSError):
                write(folder, 1)
                done = reached() < step
        found = contents(folder)
        assert found in (old, new), step
        shutil.rmtree(folder)
        if done:
            break
    assert found == new
    assert step > 5


def test_a_smaller_export_takes_the_file_beside_the_old_one_with_it(tmp_path):
    _exported_beside(tmp_path, 0)
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]
    _exported(tmp_path, 1)
    assert os.listdir(tmp_path) == ["model.onnx"]
    (tmp_path / "model.onnx.data").write_text("somebody else's")
    _exported(tmp_path, 0)
    assert (tmp_path / "model.onnx.data").read_text() == "somebody else's"


def test_models_written_in_pieces_are_what_protobuf_writes(tmp_path):
    trainer = Trainer(ArtifactSet.load(DIGITS))
    trainer.export(tmp_path / "model.onnx")
    content = (tmp_path / "model.onnx").read_bytes()
    assert onnx.ModelProto.FromString(content).SerializeToString(deterministic=True) == content


# --- what is in the place of an output ---


def _checkpoint_outside(path):
    _checkpoint(path, external_data=True)


ONE_FILE = (_checkpoint_outside, _model, _lowered)  # all files are written by one module


@pytest.mark.parametrize("write", ONE_FILE, ids=lambda write: write.__name__)
def test_what_is_no_regular_file_is_not_replaced(write, tmp_path):
    path = tmp_path / "file.onnx"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"file\.onnx is no regular file, expected a regular file to replace, or none"):
        write(path)
    assert path.is_fifo()
    assert os.listdir(tmp_path) == [path.name]


def test_a_missing_folder_is_named(tmp_path):
    """Functions make no folders, unlike commands, and write nothing elsewhere."""
    missing = tmp_path / "missing"
    write_models = _artifacts, _exported, _step, _figures
    for write in (*ONE_FILE, *(lambda path, write=write: write(path.parent, 0) for write in write_models)):
        with pytest.raises(FileNotFoundError, match=f"there is no folder {missing}$"):
            write(missing / "file.onnx")
    with pytest.raises(FileNotFoundError, match=f"^Trainer.export: there is no folder {missing}$"):
        Trainer(_digits()).export(missing / "file.onnx")
    (tmp_path / "file.onnx").symlink_to("missing/file.onnx")
    with pytest.raises(FileNotFoundError, match=f"there is no folder {missing}$"):
        _model(tmp_path / "file.onnx")
    assert os.listdir(tmp_path) == ["file.onnx"]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("write", ONE_FILE, ids=lambda write: write.__name__)
def test_the_target_of_a_link_is_written(write, there, tmp_path):
    (tmp_path / "folder").mkdir()
    real, link = tmp_path / "folder" / "real.onnx", tmp_path / "file.onnx"
    if there:
        real.write_text("old")
        real.chmod(0o600)
    link.symlink_to("folder/real.onnx")
    write(link)
    assert os.listdir(tmp_path) == ["folder", "file.onnx"] or os.listdir(tmp_path) == ["file.onnx", "folder"]
    assert link.is_symlink()
    assert real.stat().st_size > 10
    assert stat.S_IMODE(real.stat().st_mode) == 0o600 if there else real.stat().st_mode & 0o600


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("precious")], ids=["fifo", "link"])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (_artifacts, "training_model.onnx"),
        (_step, "step.json"),
        (_exported_beside, "model.onnx.data"),
        (_figures, "metrics.csv"),
    ],
)
def test_links_and_pipes_in_a_folder_stay(write, name, make, tmp_path, monkeypatch):
    monkeypatch.setattr(making, "OUTSIDE_FROM", 100_000)
    (tmp_path / "precious").write_text("somebody's")
    make(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is (a link|no regular file), expected a regular file"):
        write(tmp_path, 0)
    assert sorted(os.listdir(tmp_path)) == sorted(["precious", name])
    assert (tmp_path / "precious").read_text() == "somebody's"


def test_permissions_are_kept(tmp_path):
    for write in (_exported_beside, _artifacts):
        write(tmp_path, 0)
        before = os.umask(0)
        try:
            for file in tmp_path.iterdir():
                file.chmod(0o640)
            write(tmp_path, 1)
        finally:
            os.umask(before)
        assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o640}
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


def test_commands_refuse_a_pipe_before_they_begin(tmp_path, monkeypatch):
    pipe, folder = tmp_path / "pipe.onnx", tmp_path / "out"
    os.mkfifo(pipe)
    folder.mkdir()
    os.mkfifo(folder / "model.onnx")
    os.mkfifo(folder / "eval_model.onnx")

    def never(*_, **__):
        raise AssertionError

    for module, name in ((fit.Fit, "run"), (lowering, "lower"), (building, "plain_gradients"), (packing, "_compile")):
        monkeypatch.setattr(module, name, never)
    digits, model = str(DIGITS), str(DIGITS.parent / "digits_lstm" / "model.onnx")
    for arguments in (
        ["train", digits, "--output", str(folder)],
        ["train", digits, "--output", str(tmp_path / "other"), "--export", str(pipe)],
        ["lower", f"{digits}/training_model.onnx", "-o", str(pipe)],
        ["step", digits, "-o", str(pipe)],
        ["artifacts", model, "--loss", "cross-entropy", "-o", str(folder)],
        ["compile", digits, "--for", "x86-64-v3", "-o", str(pipe)],
    ):
        told = " ".join(fails(*arguments).split())
        assert "is no regular file, expected a regular file to replace, or none" in told
    assert sorted(os.listdir(folder)) == ["eval_model.onnx", "model.onnx"]


# --- writers that are killed ---

# What other libraries of this process say of a child that writes files and ends.
FORKS = pytest.mark.filterwarnings("ignore:.*fork")


def _killed_at(step, folder, files):
    """Let another process replace files of a folder and be killed there; returns whether it was."""
    child = os.fork()
    if not child:
        steps, replace = count(), os.replace

        def killing(*names):
            for before in (True, False):
                if next(steps) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                if before:
                    replace(*names)

        os.replace = killing
        with staged(folder, lambda names: ["gone"]) as new:
            for name, content in files.items():
                (new / name).write_bytes(content)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@FORKS
@pytest.mark.parametrize("reads", [True, False])
def test_the_next_one_finishes_what_was_interrupted(reads, tmp_path):
    for step in count():
        folder = tmp_path / str(step)
        folder.mkdir()
        old = {name: b"old " + name.encode() for name in ("a", "b", "gone")}
        new = {name: b"new " + name.encode() for name in ("a", "b", "c")}
        for name, content in old.items():
            (folder / name).write_bytes(content)
        killed = _killed_at(step, folder, new)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if reads:
                finish_interrupted(folder)
            else:
                replace_file(folder / "other", b"")
                (folder / "other").unlink()
        assert contents(folder) in (old, new), step
        assert len(told) == (step < 11)  # behind the last one nothing is left to be done
        assert not told or "a writer was ended while it replaced files; it is finished: " in str(told[0].message)
        if not killed:
            break
    assert step == 12


def test_a_writer_at_work_is_left_alone(tmp_path):
    with staged(tmp_path) as folder:
        (folder / "a").write_text("new")
        assert not finish_interrupted(tmp_path)
        replace_file(tmp_path / "b", b"")
        assert (folder / "a").read_text() == "new"
        with pytest.raises(OSError, match="another one is writing there, expected one at a time"), staged(tmp_path):
            pass
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@FORKS
def test_a_set_is_read_after_its_writer_was_killed(tmp_path):
    for name, trained in (("old", "w0"), ("new", "w1")):
        (tmp_path / name).mkdir()
        _set_of(perceptron(), tmp_path / name, trained)
    for read in (ArtifactSet.load, lambda folder: cli("inspect", folder)):
        folder = shutil.copytree(tmp_path / "old", tmp_path / read.__name__)
        assert _killed_at(7, folder, contents(tmp_path / "new"))
        assert not (folder / "checkpoint").exists()
        with pytest.warns(RuntimeWarning, match="a writer was ended while it replaced files"):
            read(folder)
        assert contents(folder) == contents(tmp_path / "new")


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "@training_model.onnx"],
        ["artifacts", "@eval_model.onnx", "--output", "made"],
        ["lower", "@training_model.onnx", "--output", "lowered.onnx"],
        ["train", "@eval_model.onnx"],
        ["train", ".", "--resume", "@checkpoint"],
        ["tune", "@eval_model.onnx", "--prompt", "a"],
        ["tune", ".", "--adapter", "@checkpoint", "--prompt", "a"],
        ["step", ".", "--checkpoint", "@checkpoint", "--output", "step.onnx"],
        ["compile", "@checkpoint"],
    ],
    ids=" ".join,
)
def test_commands_take_a_file_whose_writer_was_killed_before_it_took_its_place(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    _set_of(perceptron(), tmp_path / "set", "w0")
    name = next(word for word in words if word.startswith("@"))[1:]
    hidden = tmp_path / "set" / f".{'0' * 16}.tmp"
    hidden.mkdir()
    (hidden / ".journal").write_text("[]")
    (tmp_path / "set" / name).rename(hidden / name)
    with pytest.warns(RuntimeWarning, match=f"a writer was ended while it replaced files; it is finished: {name}"):
        _, text = cli(*(Path("set", word.strip("@")) if word[0] in "@." else word for word in words))
    assert "does not exist" not in text
    assert (tmp_path / "set" / name).is_file()


@pytest.mark.parametrize("name", ["../outside", "..", ".", "", "inner", "inner/mine", "/outside", 5, None])
def test_a_journal_of_others_moves_files_of_its_folder_alone(name, tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    hidden = folder / f".{'0' * 16}.tmp"
    for path in (hidden / "file", folder / "file", folder / "inner/mine", outside):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (hidden / ".journal").write_text(json.dumps(["file", str(tmp_path / "outside") if name == "/outside" else name]))
    before = _tree(tmp_path)
    for call in (finish_interrupted, lambda folder: replace_file(folder / "other", b"")):
        with pytest.raises(ValueError, match=rf"{hidden}/.journal is about .*, expected names of files in {folder}$"):
            call(folder)
        assert _tree(tmp_path) == before


def _tree(folder):
    return {path: path.is_file() and path.read_text() for path in folder.rglob("*")}


def test_a_journal_with_a_folder_among_its_files_moves_nothing(tmp_path):
    hidden = tmp_path / f".{'0' * 16}.tmp"
    (hidden / "inner").mkdir(parents=True)
    (hidden / ".journal").write_text("[]")
    with pytest.raises(ValueError, match="is about 'inner', expected names of files"):
        finish_interrupted(tmp_path)
    assert (hidden / "inner").is_dir()


def test_a_hidden_folder_that_is_a_link_is_left_alone(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("mine")
    (folder / f".{'1' * 16}.tmp").symlink_to(tmp_path)
    assert not finish_interrupted(folder)
    assert outside.read_text() == "mine"
