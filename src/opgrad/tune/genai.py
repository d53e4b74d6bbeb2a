"""Texts written by onnxruntime-genai, which keeps caches of keys and values, where it is installed."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from opgrad.tune.tokenizer import read_json

CONFIG = "genai_config.json"
NAME = "tuned"  # of the adapter


def can_write(folder: Path) -> bool:
    """Whether onnxruntime-genai is installed and the folder has a model for it."""
    return (folder / CONFIG).is_file() and find_spec("onnxruntime_genai") is not None


def write(
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
