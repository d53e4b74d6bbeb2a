"""A language model with adapters, or with weights that are trained: what it writes, and the files that it leaves."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from opgrad.base.arguments import naming
from opgrad.base.locks import once
from opgrad.cpu.runtime.threads import get_num_threads
from opgrad.onnx.graph.messages import import_microsoft
from opgrad.training.engine.training_graph import open_session, run, session_options
from opgrad.training.files.artifact_set import AdamWRule
from opgrad.training.make.checks import quantity
from opgrad.tune import outputs, peft
from opgrad.tune.caches import PLACES, STARTS
from opgrad.tune.language_model import LABELS, LanguageModel
from opgrad.tune.lora import Adapter, Lora, choose, slices, squared_norms
from opgrad.tune.tasks import TRAIN_ON, Write, task_of
from opgrad.tune.tokenizer import Tokenizer, folder_of, read_json
from opgrad.tune.trained_set import Room, Setting, ends_of_layers, limit_of, prepare, scoring

MAX_LENGTH = 2048  # tokens of an example
Computing: TypeAlias = Callable[[Mapping[str, np.ndarray]], np.ndarray]
NEAR = 2e-4  # losses that differ by rounding: by 5e-7 in two layers
SEEN = 8  # tokens of an example by which is seen which tokens act on which


class AdaptedModel:
    """A language model and what is trained of it; the arguments are those of `Tuner`, which trains it.

    file, folder: of the model. base: as it was read.
    """

    @naming("tune")
    def __init__(
        self, model: str | PathLike[str], *, lora: Lora | str | Sequence[Lora | str] | None = None,
        train: str | Sequence[str] = (), adapter: str | PathLike[str] | None = None, memory: int | None = None,
        max_length: int = MAX_LENGTH, weight_decay: float = 0.0, seed: int = 0, pack: bool = False,
        task: str = Write.NAME,
    ):  # fmt: skip
        self.task = task_of(task)
        self.task.refuse(pack=pack)
        self.file = model_file(Path(model))
        self.folder = folder_of(self.file)
        self.base: LanguageModel = self.task.read(self.file)
        self.train = (train,) if isinstance(train, str) else tuple(train)
        max_length = min(max_length, self.task.longest(self.folder) or max_length)
        self.memory, self.max_length, self.weight_decay, self.seed = memory, max_length, weight_decay, seed
        self.pack = pack
        if sum((lora is not None, bool(self.train), adapter is not None)) > 1:
            raise ValueError("more than one of lora, train and adapter, expected one of them")
        self.adapters: list[Adapter] = []
        self.values: dict[str, np.ndarray] = {}
        if adapter is not None:
            place = Path(adapter)
            if place.is_file():
                self.adapters, self.values = peft.read_step_weights(place, self.base, self.checksum)
            else:
                about = read_json(place / outputs.ABOUT) if (place / outputs.ABOUT).is_file() else {}
                if (named := about.get("base_sha256")) not in (None, self.checksum):
                    it = f"it names {str(named)[:16]}…, and the model is {self.checksum[:16]}…"
                    raise ValueError(f"{place} is an adapter of another base: {it}")
                self.adapters, self.values = peft.read(place, self.base)
        elif not self.train:
            given = [lora] if isinstance(lora, Lora | str) or lora is None else list(lora)
            loras = [Lora.parse(each) if isinstance(each, str) else each or Lora() for each in given]
            self.adapters = choose(self.base, loras)
            for each in self.adapters:
                self.values |= each.initial(seed)
        self.adapters = [
            replace(each, norms=squared_norms(self.base, each)) if each.lora.dora else each for each in self.adapters
        ]
        for each in self.adapters:
            if each.norms is not None and adapter is None:
                self.values[each.magnitude] = np.sqrt(each.norms).astype(np.float32)
        self._setting: Setting | None = None
        self._form = 0
        self._scores: Computing | None = None  # of the present values

    @once
    def checksum(self) -> str:
        """The SHA-256 of the base's files."""
        return outputs.checksum(self.base, self.file)

    @once
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's folder. Raises FileNotFoundError if there is none."""
        return Tokenizer(self.folder)

    @naming("tune")
    def setting(self, batch_size: int = 1, length: int | None = None, form: int | None = None) -> Setting:
        """The graphs that train, for batches of so many rows of tokens: those decide what is kept in memory.

        form: that of the task's examples; None: as before.
        """
        before = self._setting
        if before is not None and form in (None, self._form):
            return before
        self._form = self._form if form is None else form
        base, length = self.base, length or self.max_length
        limit = limit_of(base.bytes, batch_size * length) if self.memory is None else self.memory
        sizes, is_given = base.axes(batch_size, length), self.memory is not None
        room = Room(ends_of_layers(base.products), sizes, base.bytes, limit, is_given)
        made = self._prepared(room, self.pack, plain=False)
        if before is not None:
            made = replace(made, artifacts=replace(made.artifacts, trainable=self.values))
        self._setting, self.values = made, dict(made.artifacts.trainable)
        return made

    @naming("tune")
    def for_other_runtimes(self) -> Setting:
        """The same graphs of operators that other runtimes have, or have plain forms of: the scores are a value of
        their own, and dropout has its seed in itself."""
        plan = self.setting().plan
        return self._prepared(plan.segments if plan is not None else None, pack=False, plain=True)

    def _prepared(self, cuts: Room | Sequence[str] | None, pack: bool, plain: bool) -> Setting:
        own = [name for each in self.adapters for name in each.shapes]
        values, rule = {name: self.values[name] for name in own}, AdamWRule(weight_decay=self.weight_decay)
        what = self.base, self.adapters, values, self.train, self.folder, rule, cuts
        return prepare(*what, seed=self.seed, pack=pack, plain=plain, task=self.task, form=self._form)

    @naming("tune")
    def examples(self, data: str | PathLike[str], train_on: str = TRAIN_ON, skip_bad: bool = False) -> Any:
        """The examples of a file or a folder, of the class that the task has for them."""
        return self.task.examples(self, Path(data), train_on, skip_bad)

    @naming("tune")
    def write(
        self, prompt: str, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0, chat: bool | None = None
    ) -> str:
        """The text that the model, with what was trained, writes after a prompt; see `Tuner.write`."""
        self.task.refuse(prompt=prompt or True)
        tokenizer = self.tokenizer
        tokens = self.prompt_tokens(prompt, chat)
        compute = self._scores = self._scores or self.computing()

        def scores(tokens: np.ndarray) -> np.ndarray:
            return compute({self.base.tokens: tokens[None].astype(np.int64)})[0, -1]

        return tokenizer.decode(list(written(scores, tokens, max_new_tokens, tokenizer.ends, temperature, seed)))

    @naming("tune")
    def computing(self, each: bool = False, tuned: bool = True, pack: bool = False) -> Computing:
        """What computes the output of the base's graph for other inputs.

        each: whether that is the losses of tokens, for labels. tuned: with what was trained, or as the base was.
        pack: for one row of several examples.
        """
        values = self.values if tuned else {}
        model, constants = scoring(self.base, self.adapters if tuned else [], values, each, pack)
        import_microsoft(model)  # of whose operators onnxruntime makes some itself
        session = open_session(model, session_options(get_num_threads(), patterns=False), self.file.name)
        names = {item.name for item in session.get_inputs()}
        fixed = {name: array for name, array in {**constants, **values}.items() if name in names}
        return lambda given: run(session, [model.graph.output[0].name], {**given, **fixed}, self.file.name)[0]

    @naming("tune")
    def check_sight(self) -> None:
        """Raise NotImplementedError where tokens see others than those before them in their own example.

        Behind caches of those before them they do not.
        """
        if not self.pack and any("past" in each.name or "cache" in each.name for each in self.base.source.graph.input):
            return
        tokens = np.tile(np.arange(SEEN), (2, 1))
        tokens[1, -1] = 0
        given = {self.base.tokens: tokens, LABELS: np.zeros_like(tokens)}
        apart = self.computing(each=True, tuned=False)(given).reshape(tokens.shape)
        near = 0.1 if any(node.op_type == "DynamicQuantizeLinear" for node in self.base.model.graph.node) else NEAR
        wrong = "tokens see those behind them, as in encoders, expected a model that writes"
        off = np.ptp(apart[:, :-1], 0)
        if self.pack and off.max() <= near:
            row = {name: array.reshape(1, -1) for name, array in given.items()}
            row |= {STARTS: np.array([[0, SEEN, 2 * SEEN]]), PLACES: np.tile(np.arange(SEEN), (1, 2))}
            off = np.abs(self.computing(each=True, tuned=False, pack=True)(row).ravel() - apart.ravel())
            wrong = "examples cannot be packed: tokens know their places in a row, or see other examples"
        if off.max() > near:
            raise NotImplementedError(f"{self.file}: {wrong}")

    @naming("tune")
    def prompt_tokens(self, prompt: str, chat: bool | None = None) -> np.ndarray:
        """The tokens of a prompt, int32 [n]; chat: see `Tuner.write`."""
        tokenizer = self.tokenizer
        if chat is None:
            chat = tokenizer.template is not None
        if not chat:
            tokens = tokenizer.encode(prompt, special=True)
            return tokens[:-1] if len(tokens) > 1 and tokens[-1] == tokenizer.end else tokens
        if tokenizer.template is None:
            raise ValueError(f"{self.folder} has no chat template, expected one for a prompt as a message")
        text = tokenizer.template.render([{"role": "user", "content": prompt}], begin_answer=True)
        return tokenizer.encode(text, special=False)

    def use(self, values: "dict[str, np.ndarray]") -> None:
        """Take values that training changes as the present ones."""
        self.values, self._scores = values, None

    @naming("tune")
    def save(self, output: str | PathLike[str], about: "dict[str, Any] | None" = None) -> list[str]:
        """Write what was trained into a folder; returns the files' names. about: further entries of tune.json."""
        return self.task.save(self, self._made(output), {**self.about(), **(about or {})})

    @naming("tune")
    def merge(self, output: str | PathLike[str]) -> list[str]:
        """Write one model that needs no adapter file into a folder; returns the files' names."""
        return self.task.merge(self, self._made(output), self.about())

    def _made(self, output: str | PathLike[str]) -> Path:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        outputs.check_names(folder, self.base)
        return folder

    def about(self) -> dict[str, Any]:
        """What identifies a fine-tuning, as plain values."""
        loras = list(dict.fromkeys(each.lora for each in self.adapters))
        return {
            "base": self.file.name,
            "base_sha256": self.checksum,
            "lora": [asdict(each) for each in loras],
            "modules": [each.name for each in self.adapters],
            "train": list(self.train),
            "longest": self.max_length,
            "pack": self.pack,
            "weight_decay": self.weight_decay,
            **self.task.about(),
        }


def model_file(path: Path) -> Path:
    """The file of a model: the path itself, or the one in a folder."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}")
        return path
    inner = path / "onnx"
    found = sorted(path.glob("*.onnx")) or sorted(inner.glob("*.onnx"))
    named = (inner if found and found[0].parent == inner else path) / "model.onnx"
    if named in found or len(found) == 1:
        return named if named in found else found[0]
    what = "no .onnx file" if not found else f"{len(found)} .onnx files and no model.onnx"
    raise FileNotFoundError(f"{path} has {what}, expected a folder with model.onnx and tokenizer.json")


MEGABYTE = 10**6


@dataclass(frozen=True)
class Summary:
    """What is trained of a language model.

    adapters: see `adapted`. trained: how many numbers are trained. numbers: how many the weights of products have.
    base: the bytes of weights that stay as they are. rows, length: of a batch, length in tokens.
    step: the bytes that a process takes for a batch, as estimated. limit: the most bytes, of `--memory` or a default.
    again: the number of layers that are computed again in the backward part.
    unreached: how many products do not reach the scores, and so are not trained.
    """

    adapters: list[dict[str, Any]]
    trained: int
    numbers: int
    base: int
    rows: int
    length: int
    step: int
    limit: int
    again: int
    unreached: int

    def facts(self) -> dict[str, str]:
        """All of it but the adapters, in words."""
        of_base = f"{self.trained / self.numbers:.2%} of the {self.numbers:,} in products" if self.numbers else ""
        kept = f"for a limit of {megabytes(self.limit)}"
        again = f"; {quantity(self.again, 'layer')} computed again {kept}" if self.again else ""
        batch = f"{quantity(self.rows, 'row')} of up to {quantity(self.length, 'token')}"
        lost = f"{quantity(self.unreached, 'product')} of the model do not reach the scores: it was exported wrongly"
        return {
            **({"warning": lost} if self.unreached else {}),
            "trained": ", ".join(filter(None, (quantity(self.trained, "number"), of_base))),
            "base": f"{megabytes(self.base)} of weights",
            "memory": f"about {megabytes(self.step)} for a step of {batch}{again}",
        }


def megabytes(count: int) -> str:
    """Bytes as megabytes, of 10^6 bytes as `--memory` tells them."""
    return f"{count / MEGABYTE:,.{0 if count >= 10 * MEGABYTE else 2}f} MB"


def adapted(adapters: Iterable[Adapter]) -> list[dict[str, Any]]:
    """Adapters as plain values: the module's name, what its product is, the sizes of last axes, rank and numbers."""
    found = []
    for each in adapters:
        product = each.product
        role = next(role for module, role, _ in slices(product) if module == each.name)
        own = {"name": each.name, "role": role, "layer": product.layer, "operator": product.op, "bits": product.bits}
        own |= {"inputs": product.inputs, "outputs": each.outputs, "rank": each.lora.rank}
        found.append({**own, "numbers": sum(map(math.prod, each.shapes.values()))})
    return found


def summary(model: AdaptedModel, rows: int, length: int) -> Summary:
    """What is trained of a model with batches of so many rows and tokens.

    Raises what `AdaptedModel.setting` raises, whose graphs it has made.
    """
    setting = model.setting(rows, length)
    plan = setting.plan
    assert plan is not None
    weights = {model.base.place_of(each.weight): each.inputs * each.outputs for each in model.base.products}
    trained = sum(each.size for each in setting.artifacts.trainable.values())
    return Summary(
        adapters=adapted(model.adapters), trained=trained, numbers=sum(weights.values()), base=plan.base, rows=rows,
        length=length, step=plan.bytes, limit=plan.limit, again=len(plan.segments),
        unreached=model.base.unreached,
    )  # fmt: skip


def written(
    scores: Callable[[np.ndarray], np.ndarray], prompt: np.ndarray, max_new_tokens: int, ends: Collection[int],
    temperature: float, seed: int,
) -> Iterator[int]:  # fmt: skip
    """The tokens that follow a prompt, until one ends the text or there are `max_new_tokens`.

    scores: those of the token that follows some tokens; without caches each token costs a run over all before it.
    temperature: 0 takes the token with the highest score; else tokens are drawn by softmax(scores / temperature).
    """
    tokens, generator = np.asarray(prompt), np.random.default_rng(seed)
    for _ in range(max_new_tokens):
        found = scores(tokens).astype(np.float64)
        token = int(found.argmax())
        if temperature:
            logits = found / temperature
            weights = np.exp(logits - logits.max())
            token = int(generator.choice(len(weights), p=weights / weights.sum()))
        if token in ends:
            return
        yield token
        tokens = np.append(tokens, token)


CONFIG = "genai_config.json"
NAME = "tuned"  # of the adapter


def write_by_genai(
    folder: Path, adapter: Path | None, prompt: np.ndarray, max_new_tokens: int, temperature: float, seed: int
) -> Iterator[int]:
    """The tokens that a model writes behind a prompt, until one ends the text or there are `max_new_tokens`.

    folder: of the model. adapter: the file of an adapter that the model takes. temperature, seed: as of `written`.
    """
    import onnxruntime_genai as genai

    model = genai.Model(str(folder))
    options = genai.GeneratorParams(model)
    drawn = {"do_sample": True, "temperature": temperature, "random_seed": seed} if temperature else {}
    # A cache that slides holds a whole window; a text that is as long as it may be ends without its last token.
    config = read_json(folder / CONFIG).get("model", {})
    window = config.get("decoder", {}).get("sliding_window", {}).get("window_size", 0)
    length = max(len(prompt) + max_new_tokens + 1, window)
    length = min(length, config.get("context_length", length))
    options.set_search_options(max_length=length, **({"do_sample": False} | drawn))
    generator = genai.Generator(model, options)
    if adapter is not None:
        adapters = genai.Adapters(model)
        adapters.load(str(adapter), NAME)
        generator.set_active_adapter(adapters, NAME)
    generator.append_tokens(np.asarray(prompt, np.int32))
    for _ in range(max_new_tokens):
        if not generator.is_done():
            generator.generate_next_token()
        if generator.is_done():
            return
        yield int(generator.get_next_tokens()[0])
