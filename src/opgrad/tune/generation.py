"""Texts that a language model writes, token by token: by a graph without caches, or by onnxruntime-genai."""

from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from opgrad.training.engine.training_graph import open_session, run
from opgrad.tune.tokenizer import WHO, read_json


class Writer:
    """Writes with a graph of scores that has no caches: each token costs a run over all before it.

    model: the graph. tokens, scores: names of its input and its output. fixed: the values of its other inputs, which
    may be changed between calls.
    """

    def __init__(
        self, model: onnx.ModelProto, tokens: str, scores: str, fixed: Mapping[str, np.ndarray],
        options: onnxruntime.SessionOptions,
    ):  # fmt: skip
        self._session = open_session(model, options, WHO)
        self._tokens, self._scores = tokens, scores
        names = {item.name for item in self._session.get_inputs()}
        self._fixed = {name: array for name, array in fixed.items() if name in names}

    def scores(self, tokens: np.ndarray) -> np.ndarray:
        """The scores of the token that follows some tokens, float32 [n]."""
        feeds = {self._tokens: tokens[None].astype(np.int64), **self._fixed}
        return np.asarray(run(self._session, [self._scores], feeds, WHO)[0][0, -1], np.float32)

    def write(
        self, prompt: np.ndarray, max_new_tokens: int, ends: Collection[int], temperature: float = 0.0, seed: int = 0
    ) -> Iterator[int]:
        """The tokens that follow a prompt, until one ends the text or there are `max_new_tokens`.

        temperature: 0 takes the token with the highest score; else tokens are drawn, from the softmax of the scores
        divided by it.
        """
        tokens, generator = np.asarray(prompt), np.random.default_rng(seed)
        for _ in range(max_new_tokens):
            token = _next(self.scores(tokens), temperature, generator)
            if token in ends:
                return
            yield token
            tokens = np.append(tokens, token)


def _next(scores: np.ndarray, temperature: float, generator: np.random.Generator) -> int:
    if not temperature:
        return int(scores.argmax())
    logits = scores.astype(np.float64) / temperature
    weights = np.exp(logits - logits.max())
    return int(generator.choice(len(weights), p=weights / weights.sum()))


CONFIG = "genai_config.json"
NAME = "tuned"  # of the adapter


def can_write(folder: Path) -> bool:
    """Whether onnxruntime-genai is installed and the folder has a model for it."""
    return (folder / CONFIG).is_file() and find_spec("onnxruntime_genai") is not None


def write_by_genai(
    folder: Path, adapter: Path | None, prompt: np.ndarray, max_new_tokens: int, temperature: float, seed: int
) -> Iterator[int]:
    """The tokens that a model writes behind a prompt, until one ends the text or there are `max_new_tokens`.

    folder: of the model. adapter: the file of an adapter, whose parameters are inputs of the model; None: none.
    temperature, seed: as of `Writer.write`.
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
