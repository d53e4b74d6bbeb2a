"""What an example says, in the forms that data sets have: as messages, as a prompt and a completion, or as a text."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from opgrad.tune.chat import Message, said_of

KINDS = "messages, conversations, prompt and completion, instruction and output, or text"
# The names under which data sets have questions, what belongs to these, and answers; and the roles of ShareGPT.
ASKED, GIVEN, ANSWERED = ("instruction", "prompt", "question"), ("input", "context"), ("output", "response", "answer")
HEAVIEST = 1_000_000  # weight of a message
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
         "tool": "tool", "observation": "tool"}  # fmt: skip


def messages_of(values: Mapping[str, Any], all_count: bool) -> list[Message] | None:
    """The messages of an example, each with a weight; None if it has none. Raises ValueError for wrong ones.

    A question with an answer is a message of the user and one of the assistant.
    all_count: whether messages of a prompt count; else they weigh nothing.
    """
    told = [{"role": "system", "content": values["system"]}] if values.get("system") else []
    if "messages" in values:
        return _messages(values["messages"], "messages")
    if "conversations" in values:
        return _messages([*told, *_turns(values["conversations"])], "conversations")
    if "prompt" in values and "completion" in values:
        if not isinstance(values["prompt"], list):
            return None
        prompt = _messages(values["prompt"], "prompt")
        prompt = prompt if all_count else [{**each, "weight": 0} for each in prompt]
        return [*prompt, *_messages(values["completion"], "completion")]
    if (pair := question_and_answer(values)) is None:
        return None
    said = zip(("user", "assistant"), pair, strict=True)
    return _messages([*told, *({"role": role, "content": content} for role, content in said)], "example")


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


def _messages(value: Any, name: str) -> list[Message]:
    """The messages of a value of this name. Raises ValueError for what is not understood."""
    found = unpacked(value)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) and "role" in each for each in found):
        raise ValueError(f"{name} is no list of objects with role and content")
    return [_message(each, f"message {number} of {name}") for number, each in enumerate(found, 1)]


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
