"""Files of examples as lines of JSON, larger than the memory or not, and what an example says, in any known form."""

import bisect
import csv
import gzip
import io
import json
import zlib
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from opgrad.base.files import check_regular, open_regular
from opgrad.tune.template_process import Message, said_of

LONGEST_LINE = 1 << 26  # bytes
FORMS = (".jsonl", ".json", ".csv", ".parquet")  # of files in a folder, perhaps with .gz behind them
BLOCK = 1 << 16  # characters that are read at once
MOST_UNREAD = 64  # names that are kept
T = TypeVar("T")


class Entry(UserDict[str, Any]):
    """The object of a line. read: the names of the values that were looked at.

    kinds: what it shall have, for messages. Raises ValueError.
    """

    def __init__(self, line: bytes, kinds: str):
        self.read = set[str]()
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"it is no JSON, expected an object with {kinds}") from None
        if not isinstance(found, dict):
            raise ValueError(f"it is {type(found).__name__}, expected an object with {kinds}")
        super().__init__(found)

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


class Lines:
    """The lines of a file, or of all files of a folder, each the JSON of an object.

    source: a .jsonl, .json (an array), .csv, each perhaps with .gz behind, or .parquet file, or a folder of these.
    unread: the names of values that nobody looked at, in the lines so far.
    Going over them raises OSError, ValueError that names the place of what is wrong, and ModuleNotFoundError without
    pyarrow.
    """

    def __init__(self, source: Path):
        self._files, self._parts, self.unread = [source], list[tuple[int, Path, str]](), dict[str, None]()
        if source.is_dir():
            self._files = sorted(each for each in source.iterdir() if _form(each, "") in FORMS)
            if not self._files:
                raise ValueError(f"{source} has no file with the ending {', '.join(FORMS)}")

    def note(self, names: Iterable[str]) -> None:
        """Note names of values that nobody looked at, up to a limit."""
        self.unread |= dict.fromkeys(islice(names, max(MOST_UNREAD - len(self.unread), 0)))

    def where(self, number: int) -> str:
        """Where a line came from, for messages. number: from 1."""
        start, path, unit = self._parts[bisect.bisect_left(self._parts, number, key=lambda each: each[0]) - 1]
        return f"{path}: {unit} {number - start}"

    def made(self, make: Callable[[Entry], T], kinds: str, skip_bad: bool, bad: list[str]) -> Iterator[tuple[int, T]]:
        """The numbers of lines that are not empty, and what `make` makes of their objects.

        kinds: what objects shall have, for messages. skip_bad: whether wrong lines are left out; then `bad` gets the
        reasons. Raises ValueError that names the line.
        """
        number = 0
        for file in self._files:
            unit, lines = _read(file)
            self._parts.append((number, file, unit))
            for line in lines:
                number += 1
                if len(line) >= LONGEST_LINE:
                    raise ValueError(f"{self.where(number)} has {LONGEST_LINE} bytes or more, expected fewer")
                if not line.strip():
                    continue
                try:
                    entry = Entry(line, kinds)
                    found = make(entry)
                except ValueError as error:
                    bad.append(f"{self.where(number)}: {error}")
                    if not skip_bad:
                        raise ValueError(bad[-1]) from None
                else:
                    self.note(each for each in entry if each not in entry.read)
                    yield number, found


def _form(path: Path, other: str = ".jsonl") -> str:
    """The ending of a file's name that tells its form."""
    ending = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if ending == ".json" and path.is_file() and not _is_array(path):
        return ".jsonl"
    return ending if ending in FORMS else other


def _read(path: Path) -> tuple[str, Iterable[bytes]]:
    """What messages call an entry of a file, and the entries as JSON."""
    form = _form(path)
    if form == ".parquet":
        return "row", map(_encoded, _parquet(path))
    if form == ".csv":
        return "row", map(_encoded, _csv(path))
    return ("entry", _array(path)) if form == ".json" else ("line", _lines(path))


def _encoded(value: Any) -> bytes:
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> str | None:
    """What JSON has no form for as a text; None for bytes that are none."""
    if not isinstance(value, bytes):
        return str(value)
    with suppress(UnicodeDecodeError):
        return value.decode()
    return None


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """A file, unpacked if it is packed. Raises ValueError for a damaged one."""
    try:
        with open_regular(path) as file:
            yield io.BufferedReader(gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is no whole .gz file: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error.reason}") from None


def _lines(path: Path) -> Iterator[bytes]:
    with _open(path) as file:
        while line := file.readline(LONGEST_LINE):
            yield line


def _is_array(path: Path) -> bool:
    with _open(path) as file:
        return file.read(BLOCK).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _array(path: Path) -> Iterator[bytes]:
    """The entries of an array, of which no more than one is in memory."""
    decoder, text, number, at_end = json.JSONDecoder(), "", 0, False
    with _open(path) as file:
        reader = io.TextIOWrapper(file, "utf-8-sig")
        text = reader.read(BLOCK).lstrip()[1:]
        while True:
            text = text.lstrip(" \t\r\n")
            if text.startswith("]"):
                if text[1:].strip() or reader.read().strip():
                    raise ValueError(f"{path}: something stands behind the array, expected its end")
                return
            try:
                value, end = decoder.raw_decode(text)
                if end == len(text) and not at_end:  # a number may go on
                    raise ValueError
            except (ValueError, RecursionError):
                more = reader.read(max(BLOCK, len(text)))
                at_end, text = not more, text + more
                if not more or len(text) > LONGEST_LINE:
                    raise ValueError(f"{path}: entry {number + 1} is no whole JSON") from None
                continue
            number, text = number + 1, text[end:].lstrip(" \t\r\n")
            yield _encoded(value)
            while not text and not at_end:
                text = reader.read(BLOCK).lstrip(" \t\r\n")
                at_end = not text
            if not text.startswith(("]", ",")):
                raise ValueError(f"{path}: a comma or ] is missing behind entry {number}")
            text = text.removeprefix(",")


def _csv(path: Path) -> Iterator[Any]:
    with _open(path) as file:
        csv.field_size_limit(LONGEST_LINE)
        reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""))
        try:
            names = reader.fieldnames or ()
            if len(set(names)) < len(names):
                raise ValueError(f"{path}: the first line has a name twice")
            for number, row in enumerate(reader, 1):
                if None in row or None in row.values():
                    raise ValueError(f"{path}: row {number} has not as many fields as the first line has names")
                yield row
        except csv.Error as error:
            raise ValueError(f"{path}: line {reader.line_num}: {error}") from None


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    check_regular(path)
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: {error}") from None


# The names under which data sets have questions, what belongs to these, and answers; and the roles of ShareGPT.
ASKED, GIVEN, ANSWERED = ("instruction", "prompt", "question"), ("input", "context"), ("output", "response", "answer")
SYSTEM = ("system", "system_prompt")
HEAVIEST = 1_000_000  # weight of a message
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
         "tool": "tool", "observation": "tool"}  # fmt: skip


def messages_of(values: Mapping[str, Any], all_count: bool) -> list[Message] | None:
    """The messages of an example, each with a weight; None if it has none. Raises ValueError for wrong ones.

    A question with an answer is a message of the user and one of the assistant.
    all_count: whether messages of a prompt count; else they weigh nothing.
    """
    if "messages" in values:
        return _messages(values["messages"], "messages", values)
    if "conversations" in values:
        return _messages(_turns(values["conversations"]), "conversations", values)
    if "prompt" in values and "completion" in values:
        if not isinstance(values["prompt"], list):
            return None
        prompt = _messages(values["prompt"], "prompt", values)
        prompt = prompt if all_count else [{**each, "weight": 0} for each in prompt]
        return [*prompt, *_messages(values["completion"], "completion")]
    if (pair := question_and_answer(values)) is None:
        return None
    said = zip(("user", "assistant"), pair, strict=True)
    return _messages([{"role": role, "content": content} for role, content in said], "example", values)


def system_of(values: Mapping[str, Any]) -> str:
    """What stands beside an example for the system, "" without it."""
    name = next((each for each in SYSTEM if values.get(each)), None)
    return "" if name is None else text_of(values, name)


def question_and_answer(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The question of an example, with what belongs to it, and the answer; None if it has no such."""
    if {"messages", "conversations"} & values.keys() or {"prompt", "completion"} <= values.keys():
        return None
    asked, given, answered = (next((each for each in names if each in values), None) for names in
                              (ASKED, GIVEN, ANSWERED))  # fmt: skip
    if asked is None or answered is None:
        return None
    question, answer = text_of(values, asked), text_of(values, answered)
    more = text_of(values, given) if given is not None and values[given] is not None else ""
    return "\n\n".join(filter(None, (question, more))), answer


def text_of(values: Mapping[str, Any], name: str) -> str:
    """A text of an example. Raises ValueError if it is none."""
    found = values[name]
    if not isinstance(found, str):
        raise ValueError(f"{name} is {type(found).__name__}, expected a text")
    return found


def _turns(turns: Any) -> list[Any]:
    """ShareGPT's turns, which have `from` and `value`, as messages."""
    turns = unpacked(turns)
    if not isinstance(turns, list) or not all(isinstance(each, dict) for each in turns):
        raise ValueError("conversations is no list of objects with from and value")
    found = []
    for number, turn in enumerate(turns, 1):
        if "from" not in turn:
            found.append(turn)
            continue
        role = ROLES.get(str(turn["from"]))
        if role is None:
            raise ValueError(f"turn {number} of conversations is from {turn['from']!r}, expected {', '.join(ROLES)}")
        found.append({"role": role, "content": turn.get("value"), "weight": turn.get("weight")})
    return found


def _messages(value: Any, name: str, beside: Mapping[str, Any] | None = None) -> list[Message]:
    """The messages of a value of this name. Raises ValueError for what is not understood.

    beside: an example; what it has for the system becomes the first message, unless there is one.
    """
    found = unpacked(value)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) and "role" in each for each in found):
        raise ValueError(f"{name} is no list of objects with role and content")
    messages = [_message(each, f"message {number} of {name}") for number, each in enumerate(found, 1)]
    own = messages[0]["role"] in ("system", "developer")
    system = "" if own or beside is None else system_of(beside)
    return [{"role": "system", "content": system, "weight": 1}, *messages] if system else messages


def unpacked(value: Any) -> Any:
    """A value of which there may be the JSON alone."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _message(message: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """A message with a weight, and one text as its content if it has any."""
    content, calls, weight = (message.get(name) for name in ("content", "tool_calls", "weight"))
    if weight is not None and not (isinstance(weight, int | float) and 0 <= weight <= HEAVIEST):
        raise ValueError(f"{what} has the weight {weight!r}, expected a number from 0 to {HEAVIEST:,}")
    calls = unpacked(calls) or []
    are_objects = isinstance(calls, list) and all(isinstance(each, dict) for each in calls)
    if not are_objects or not all(isinstance(each.get("function", each), dict) for each in calls):
        raise ValueError(f"{what} has tool_calls that are no list of objects")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"{what} has a part of the type {kind}, expected parts of the type text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise ValueError(f"{what} has a content that is {type(content).__name__}, expected a text")
    # Tables have all names in every message; templates take a name with nothing behind it for something.
    given = {name: value for name, value in message.items() if value is not None or name == "content"}
    found = {"content": content, "tool_calls": calls, "weight": 1 if weight is None else weight}
    return {**given, **{name: value for name, value in found.items() if name == "weight" or value}}


def says(message: Mapping[str, Any]) -> bool:
    """Whether a message of the assistant says anything."""
    return bool(said_of(message, "assistant"))


def with_arguments(message: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    """A message with the arguments of its calls of tools in another form."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    found = []
    for call in calls:
        own = call.get("function", call)
        made = {**own, "arguments": form(own["arguments"])} if "arguments" in own else own
        found.append({**call, "function": made} if "function" in call else made)
    return {**message, "tool_calls": found}


def json_of(arguments: Any) -> Any:
    """The JSON of arguments, if they are none yet."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
