"""The tokenizer of a model's folder: texts to tokens and back, by the package `tokenizers`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from opgrad.base.reading import json_object, read_regular
from opgrad.tune.chat import WHO, ChatTemplate

CANNOT = "cannot encode a text"
CONFIGS = ("genai_config.json", "generation_config.json", "config.json")  # that name tokens which end a text
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """The tokenizer of a folder.

    folder: with tokenizer.json and, as far as there are such, tokenizer_config.json, chat_template.jinja and
        genai_config.json, generation_config.json.
    end: the token that ends a text; None if the folder does not say. ends: all tokens after which a text is finished.
    special: the texts of special tokens by their names in tokenizer_config.json.
    template: what writes the messages of a chat as one text; None if the folder has no template.
    Raises FileNotFoundError without tokenizer.json, ValueError if one of the files is damaged.
    """

    def __init__(self, folder: Path):
        import tokenizers

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{WHO}: {folder} has no tokenizer.json, expected the file that the package tokenizers writes"
            )
        self._path = path
        with self._naming("is no tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_str(read_regular(path, f"{WHO}: {path}").decode())
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        self.special = {name: text for name in SPECIAL if (text := _text(config.get(name))) is not None}
        self.ends = self._ends(*(read_json(folder / name) for name in CONFIGS))
        self.end = self.ends[0] if self.ends else None
        self.template = _template(folder, config, self.special)

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn what the package raises, which is Exception itself or a panic of Rust, into a ValueError."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{WHO}: {self._path} {what}: {' '.join(str(error).split())}") from None

    def _ends(self, *configs: dict[str, Any]) -> list[int]:
        """The tokens that end a text, as the files of the folder name them."""
        named = self._tokenizer.token_to_id(self.special.get("eos_token", ""))
        found = [] if named is None else [named]
        for config in configs:
            inner = config.get("model")
            given = (inner if isinstance(inner, dict) else config).get("eos_token_id")
            found += [each for each in (given if isinstance(given, list) else [given]) if type(each) is int]
        return list(dict.fromkeys(found))

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, special: bool) -> np.ndarray:
        """The tokens of a text, int32 [n]. special: whether the tokenizer adds those that begin or end a text."""
        with self._naming(CANNOT):
            return np.array(self._tokenizer.encode(text, add_special_tokens=special).ids, np.int32)

    @property
    def pad(self) -> int:
        """The token that fills rows; 0 if the folder does not say."""
        return self._tokenizer.token_to_id(self.special.get("pad_token", "")) or 0

    def encode_with_types(self, text: str, other: str | None = None) -> np.ndarray:
        """The tokens of a text, or of two in one row, with special ones, and the types of these, int32 [2, n]."""
        with self._naming(CANNOT):
            found = self._tokenizer.encode(text, other)
            return np.array([found.ids, found.type_ids], np.int32)

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a text, int32 [n], and the first and last character behind of each, int64 [n, 2]."""
        with self._naming(CANNOT):
            found = self._tokenizer.encode(text, add_special_tokens=False)
            return np.array(found.ids, np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, tokens: "np.ndarray | list[int]", special: bool = False) -> str:
        """The text of tokens. special: with special ones."""
        with self._naming("cannot decode"):
            return str(self._tokenizer.decode([int(each) for each in tokens], skip_special_tokens=not special))


def folder_of(file: Path) -> Path:
    """The folder with the tokenizer of a model: its file may lie in a folder of that, such as onnx."""
    above = file.parent.parent
    is_above = not (file.parent / "tokenizer.json").is_file() and (above / "tokenizer.json").is_file()
    return above if is_above else file.parent


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file. Raises ValueError for another content."""
    if not path.is_file():
        return {}
    return json_object(read_regular(path, f"{WHO}: {path}"), f"{WHO}: {path}")


def _text(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json, where it is a text or an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _template(folder: Path, config: dict[str, Any], special: dict[str, str]) -> ChatTemplate | None:
    """The template for chats: that of chat_template.jinja, or the default one of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            source = read_regular(path, f"{WHO}: {path}").decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{WHO}: {path} is no text in UTF-8: {error.reason} at byte {error.start}") from None
        return ChatTemplate(source, special, str(path))
    given = config.get("chat_template")
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        given = named.get("default", next(iter(named.values()), None))
    if given is None:
        return None
    path = folder / "tokenizer_config.json"
    if not isinstance(given, str):
        raise ValueError(f"{WHO}: chat_template in {path} is {type(given).__name__}, expected a text")
    return ChatTemplate(given, special, str(path))
