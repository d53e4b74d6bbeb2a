"""Texts that a language model writes, one token after the other, each the one with the highest score or drawn."""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx
import onnxruntime

from opgrad.training.engine.binding import run
from opgrad.training.engine.training_graph import open_session
from opgrad.tune.language.model import WHO


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
