"""Examples as tokens: chats, prompts with completions and texts; which tokens are learned; batches of them."""

import gzip
import json
import multiprocessing
import sys
import time
import types

import numpy as np
import pytest
from language_models import TEMPLATE, WORDS, make_folder, write_lines

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from opgrad.tune import lines
from opgrad.tune.examples import MULTIPLE, TokenData, TokenExamples
from opgrad.tune.tokenizer import ChatTemplate, Tokenizer
from opgrad.tune.tuner import notes

CHAT = {
    "messages": [
        {"role": "user", "content": "what is red ?"},
        {"role": "assistant", "content": " a tree . "},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello you"},
    ]
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(make_folder(tmp_path_factory.mktemp("model")))


def examples(tmp_path, tokenizer, lines, longest=64, train_on="assistant"):
    return TokenExamples(write_lines(tmp_path / "data.jsonl", lines), tokenizer, longest, train_on)


def learned(tokenizer, example):
    return tokenizer.decode(example.tokens[example.trained])


def test_last_answer_and_weights(tmp_path, tokenizer):
    """Of messages; those of a prompt are not learned."""
    first, second, third, fourth = CHAT["messages"]
    unweighed = {"messages": [first, {**second, "weight": 0}, third, {**fourth, "weight": 1}]}
    completion = {"prompt": [first, second, third], "completion": [fourth]}
    for line, train_on in ((CHAT, "last"), (unweighed, "assistant"), (completion, "assistant")):
        found = examples(tmp_path, tokenizer, [line], train_on=train_on)[0]
        assert learned(tokenizer, found) == "hello you"
    assert examples(tmp_path, tokenizer, [completion], train_on="all")[0].trained[1:].all()
    every = examples(tmp_path, tokenizer, [unweighed], train_on="all")[0]
    assert learned(tokenizer, every) == "what is red ? hello hello you".replace("?", "").replace("  ", " ")


@pytest.mark.parametrize("packed", [False, True])
def test_weights_between_and_above(tmp_path, tokenizer, packed):
    first, second, third, fourth = CHAT["messages"]
    chat = {"messages": [first, {**second, "weight": 0.5}, third, {**fourth, "weight": 2}]}
    found = examples(tmp_path, tokenizer, [chat, {"text": "a dog"}])
    assert (found.weighted, found.counts.tolist(), found.told.trained) == (True, [4 * 0.5 + 3 * 2, 2], 9)
    batch = TokenData(found, np.arange(2), 2, "input_ids", "labels", packed=packed).take(np.arange(2))
    weights = batch.arrays["weights"]
    assert (batch.weight(), weights.shape) == (10, batch.arrays["labels"].shape)
    np.testing.assert_array_equal(weights > 0, batch.arrays["labels"] != -100)
    assert not examples(tmp_path, tokenizer, [CHAT]).weighted


def test_contents_in_parts_and_arguments_as_json(tmp_path):
    """Arguments are objects for templates that write these as JSON, and texts for those that write texts."""
    call = {"function": {"name": "red", "arguments": '{"cat": "dog"}'}}
    chat = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "you"}]},
            {"role": "assistant", "tool_calls": [call]},
        ]
    }
    source = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ ' ' + ARGUMENTS + ' ' }}"
    for arguments in ("c.function.arguments | tojson", "c.function.arguments"):
        template = source.replace("ARGUMENTS", arguments) + "{% endfor %} <|end|> {% endfor %}"
        found = Tokenizer(make_folder(tmp_path / "model", ["hello", "you", '{"cat":', '"dog"}'], template=template))
        [example] = examples(tmp_path, found, [chat])
        assert found.decode(example.tokens, special=True) == 'hello you <|end|> {"cat": "dog"} <|end|>'
        assert learned(found, example) == '{"cat": "dog"}'


def test_messages_of_tables(tmp_path):
    """All have all names there; weights are no business of templates."""
    source = (
        "{% for m in messages[::-1] %}{% set last = m %}\n{% endfor %}{% for m in messages %}"
        "{% if m.tool_calls is defined %}{{ raise_exception('a call') }}{% endif %}{{ m.content }} "
        "{{ m.weight | default('<|end|>') }} {% endfor %}"
    )
    found = Tokenizer(make_folder(tmp_path, template=source))
    messages = [{**each, "tool_calls": None, "weight": None} for each in CHAT["messages"][1:]]
    example = examples(tmp_path, found, [{"messages": messages}])[0]
    assert found.decode(example.tokens, special=True) == "a tree . <|end|> hello <|end|> hello you <|end|>"
    assert learned(found, example) == "tree . hello you"


def test_answers_that_do_not_end_are_told(tmp_path):
    source = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    found = Tokenizer(make_folder(tmp_path, template=source))
    assert examples(tmp_path, found, [CHAT, {"text": "a"}]).told.endless == 1
    source = "{% for m in messages %}{{ ' <|end|> ' if not loop.first else '' }}{{ m.content + ' ' }}{% endfor %}"
    found = Tokenizer(make_folder(tmp_path, template=source))
    assert examples(tmp_path, found, [{"messages": CHAT["messages"][:3]}]).told.endless == 0


def test_completion_and_text(tmp_path, tokenizer):
    lines = [{"prompt": "who are you", "completion": " i am a bird"}, {"text": "the cat sees a dog"}]
    found = examples(tmp_path, tokenizer, lines)
    assert [learned(tokenizer, found[place]) for place in (0, 1)] == ["i am a bird", "cat sees a dog"]
    assert all(found[place].tokens[-1] == tokenizer.end and found[place].trained[-1] for place in (0, 1))
    every = examples(tmp_path, tokenizer, lines, train_on="all")
    assert learned(tokenizer, every[0]) == "are you i am a bird"


def test_long_examples_are_cut_and_told(tmp_path, tokenizer):
    text = {"text": " ".join(["cat"] * 30)}
    prompt = {"prompt": " ".join(["cat"] * 30), "completion": "dog"}
    found = examples(tmp_path, tokenizer, [text, prompt, {"text": "a dog"}], longest=10)
    assert (len(found), found.told.cut, found.told.empty, found.told.longest) == (2, 2, 1, 32)
    assert len(found[0].tokens) == 10


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is no JSON, expected an object with messages"),
        ("[1]", "it is list, expected an object"),
        ('{"question": "x"}', "it has 'question', expected messages, conversations, prompt"),
        ('{"text": 3}', "text is int, expected a text"),
        ('{"messages": []}', "messages is no list of objects with role and content"),
        ('{"messages": [{"content": "x"}]}', "messages is no list of objects with role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message 1 of messages has a content that is int"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "message 1 of messages has a part of the type image, expected parts of the type text",
        ),
        ('{"messages": [{"role": "user", "weight": -1}]}', "message 1 of messages has the weight -1, expected"),
        ('{"messages": [{"role": "assistant", "tool_calls": [3]}]}', "message 1 of messages has tool_calls"),
        ('{"messages": [{"role": "assistant", "tool_calls": 3}]}', "message 1 of messages has tool_calls"),
        (
            '{"conversations": [{"from": "function_call", "value": "{}"}]}',
            "turn 1 of conversations is from 'function_c",
        ),
        ('{"conversations": 3}', "conversations is no list of objects with from and value"),
        ('{"instruction": 3, "output": "a"}', "instruction is int, expected a text"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "it has 'prompt', 'chosen', 'rejected', expected messages"),
    ],
)
def test_wrong_lines_are_named(tmp_path, tokenizer, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a dog"}\n' + line + "\n")
    refused(path, tokenizer, f"data.jsonl: line 2: {message}")


def refused(path, tokenizer, message):
    with pytest.raises(ValueError, match=message):
        TokenExamples(path, tokenizer, 64)


CHATS = ("<|user|> hello <|end|> <|assistant|>", "you <|end|>")
QUESTION = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]}


@pytest.mark.parametrize(
    "line",
    [
        QUESTION,
        {"messages": json.dumps(QUESTION["messages"])},
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "you"}]},
        {"conversations": QUESTION["messages"]},
        {"instruction": "hello", "input": "", "output": "you"},
        {"instruction": "hello", "output": "you", "text": "the whole"},
        {"prompt": "hello", "response": "you"},
        {"question": "hello", "answer": "you"},
    ],
)
def test_forms_of_examples(tmp_path, tokenizer, line):
    found = examples(tmp_path, tokenizer, [line])[0]
    spans = [(tokenizer.decode(part, special=True), trained) for part, trained in found.spans()]
    assert spans == [(CHATS[0], False), (CHATS[1], True)]


def test_forms_of_examples_with_more(tmp_path, tokenizer):
    """A system's message; what belongs to a question; and no chat template."""
    turns = [{"from": "user", "value": "hello"}, {"from": "gpt", "value": "you"}]
    asked = {"prompt": QUESTION["messages"][:1], "completion": QUESTION["messages"][1:]}
    for told in (
        {"system": "the cat", "conversations": turns},
        {"system": "a", "conversations": [{"from": "system", "value": "the cat"}, *turns]},
        {"system": "the cat", **asked},
        {"system_prompt": "the cat", **QUESTION},
    ):
        [found] = examples(tmp_path, tokenizer, [told])
        assert tokenizer.decode(found.tokens) == "the cat hello you"
    alpaca = {"instruction": "who", "input": "a cat", "output": "you", "system": "red"}
    [found] = examples(tmp_path, tokenizer, [alpaca])
    assert tokenizer.decode(found.tokens) == "red who a cat you"
    plain = Tokenizer(make_folder(tmp_path / "model", template=None))
    [found] = examples(tmp_path, plain, [alpaca])
    spans = [(plain.decode(part, special=True), trained) for part, trained in found.spans()]
    assert spans == [("red who a cat", False), ("you <|end|>", True)]


def test_what_is_not_read_is_told(tmp_path, tokenizer):
    masked = {"messages": [*QUESTION["messages"], {**QUESTION["messages"][1], "train": False}]}
    told = examples(tmp_path, tokenizer, [masked, {"text": "a dog", "history": [["who", "you"]], "id": 3}]).told
    assert "not read of the examples: 'train of messages', 'history', 'id'" in notes(told, 64)


LINES = [{"text": "a dog"}, {"prompt": "hello", "completion": "you"}, {"text": "the cat sees"}]
TEXTS = ["a dog", "hello you", "the cat sees"]


def write_file(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", "\n".join(map(json.dumps, LINES))),
        ("a.json", "\n".join(map(json.dumps, LINES))),
        ("a.json", json.dumps(LINES)),
        ("a.json", "\ufeff" + json.dumps(LINES, indent=2)),
        ("a.csv", 'text,more\na dog,1\nhello you,2\n"the cat\nsees",3\n'),
    ],
)
def test_files_of_every_form(tmp_path, tokenizer, name, content, packed, monkeypatch):
    monkeypatch.setattr(lines, "BLOCK", 7)
    path = write_file(tmp_path / f"{name}{packed}", content.encode())
    found = TokenExamples(path, tokenizer, 64)
    assert [tokenizer.decode(found[number].tokens) for number in range(3)] == TEXTS


class FakeParquet(types.ModuleType):
    """pyarrow, as far as it is used, with JSON in the place of files."""

    class ArrowException(Exception):
        pass

    class ParquetFile:
        def __init__(self, path):
            self.rows = json.loads(path.read_bytes())

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def iter_batches(self, size):
            return [self]

        def to_pylist(self):
            if "broken" in self.rows:
                raise FakeParquet.ArrowException("it is broken")
            return [{name: text.encode() for name, text in row.items()} for row in self.rows]  # columns of bytes


def test_folder_of_files(tmp_path, tokenizer, monkeypatch):
    """In the order of their names; messages name the file, and its line, row or entry."""
    fake = FakeParquet("pyarrow")
    fake.parquet = fake
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", fake)
    folder = tmp_path / "data"
    folder.mkdir()
    write_file(folder / "a.parquet", json.dumps(LINES[:1]).encode())
    write_file(folder / "b.jsonl.gz", f"{json.dumps(LINES[1])}\n\n".encode())
    write_file(folder / "c.json", json.dumps(LINES[2:]).encode())
    write_file(folder / "README.md", b"no data")
    found = TokenExamples(folder, tokenizer, 64)
    assert [tokenizer.decode(found[number].tokens) for number in range(3)] == TEXTS
    assert [found.origin(number).removeprefix(f"{folder}/") for number in range(3)] == [
        "a.parquet: row 1", "b.jsonl.gz: line 1", "c.json: entry 1"]  # fmt: skip
    write_file(folder / "c.json", json.dumps([*LINES[2:], {"text": 3}]).encode())
    refused(folder, tokenizer, r"c.json: entry 2: text is int, expected a text")
    write_file(folder / "a.parquet", b'{"broken": 1}')
    refused(folder, tokenizer, r"a.parquet: it is broken")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tokenizer, r"empty has no file with the ending \.jsonl, \.json, \.csv, \.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"\n\n", "it has no example with a token to learn from"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "a.jsonl.gz is no whole .gz file"),
        ("a.jsonl.gz", b"a dog", "a.jsonl.gz is no whole .gz file"),
        ("a.csv", b"text,more\na dog\n", "a.csv: row 1 has not as many fields as the first line has names"),
        ("a.csv", b"text\n\xff\n", "a.csv is no text in UTF-8"),
        ("a.csv", b"text,text\na,a dog\n", "a.csv: the first line has a name twice"),
        ("a.json", b'[{"text": "a dog"}, {"te', "a.json: entry 2 is no whole JSON"),
        ("a.json", b'[{"text": "a dog"} {"text": "a"}]', "a.json: a comma or ] is missing behind entry 1"),
        ("a.json", b'[{"text": "a dog"}] [{"text": "a"}]', "a.json: something stands behind the array, expected"),
        ("a.json", b'[{"text": "a dog"}', "a.json: entry 1 is no whole JSON"),
    ],
)
def test_damaged_files(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, tokenizer, message)


def test_wrong_examples_are_skipped_when_asked(tmp_path, tokenizer):
    path = write_lines(tmp_path / "data.jsonl", [LINES[0], {"text": 3}, [], LINES[2], {}])
    found = TokenExamples(path, tokenizer, 64, skip_bad=True)
    assert [tokenizer.decode(found[number].tokens) for number in range(len(found))] == ["a dog", "the cat sees"]
    assert (found.told.lines, found.told.bad, len(found.told.reasons)) == (5, 3, 3)
    shown = notes(found.told, 64)
    assert shown[0].startswith("2 examples with")
    assert f"3 of 5 examples are wrong and were left out, such as: {path}: line 2: text is int, expected" in shown[1]
    with pytest.raises(ValueError, match=r"no example with a token to learn from: .*: line 1: it has 'a', expected"):
        TokenExamples(write_lines(path, [{"a": 1}]), tokenizer, 64, skip_bad=True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "a"}], "line 1 has no message of the role assistant"),
        ([{"role": "assistant"}], "line 1 has answers alone that say nothing, or whose weight is 0"),
        ([{"role": "assistant", "content": " "}], "line 1 has answers alone that say nothing, or whose weight is 0"),
        ([{**CHAT["messages"][1], "weight": 0}], "line 1 has answers alone that say nothing, or whose weight is 0"),
        (
            [{"role": "user", "content": "a " * 80}, CHAT["messages"][1]],
            "line 1 has no answer .* the limit of 64 tokens",
        ),
    ],
)
def test_chat_of_which_nothing_is_learned(tmp_path, tokenizer, messages, message):
    with pytest.raises(ValueError, match=f"no example with a token to learn from: .*data.jsonl: {message}"):
        examples(tmp_path, tokenizer, [{"messages": messages}])


def test_file_that_changes(tmp_path, tokenizer):
    found = examples(tmp_path, tokenizer, [{"text": "a dog"}, {"text": "a cat sees you"}])
    write_lines(tmp_path / "data.jsonl", [{"text": "a cat sees you"}, {"text": "a dog"}])
    assert tokenizer.decode(found[0].tokens) == "a dog"


# --- templates ---


def template(source):
    return ChatTemplate(source, {"eos_token": "</s>"}, "tokenizer_config.json")


QWEN3 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% if loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' }}{{ c.function | tojson }}{{ '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER, THOUGHT = CHAT["messages"][0], {"role": "assistant", "content": "a", "reasoning_content": "so"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}], "content": ""}


def parts(source, messages):
    text, _, answers = template(source).render_with_parts(messages)
    return {index: text[first:last] for index, first, last in answers}


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        # Llama 2: blanks around the answer; no prompt for an answer.
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
            "{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
            [USER, {"role": "assistant", "content": "a"}] * 2,
            {1: " a </s>", 3: " a </s>"},
        ),
        # Phi-3: the text ends behind the loop, where else the prompt stands.
        (
            "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
            [USER, {"role": "assistant", "content": "a"}],
            {1: "a<|end|>\n</s>"},
        ),
        # Zephyr: the prompt stands in the loop.
        (
            "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
            "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}",
            [USER, {"role": "assistant", "content": "a"}],
            {1: "\na</s>\n"},
        ),
        # DeepSeek: what ends the results of tools is written for the answer, and stands in the prompt, too.
        (
            "{% set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
            "{% set ns.tool = true %}{{ '<out>' + m.content }}{% elif m.role == 'user' %}"
            "{{ '<user>' + m.content }}{% else %}{% if ns.tool %}"
            "{{ '</out>' }}{% set ns.tool = false %}{% else %}{{ '<answer>' }}{% endif %}{{ m.content + eos_token }}"
            "{% endif %}{% endfor %}{% if ns.tool %}{{ '</out>' }}{% elif add_generation_prompt %}{{ '<answer>' }}"
            "{% endif %}",
            [USER, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "r"}, CHAT["messages"][3]],
            {1: "a</s>", 3: "hello you</s>"},
        ),
        # Qwen3: thoughts of the last answer alone; calls of tools.
        (
            QWEN3,
            [USER, THOUGHT, USER, THOUGHT],
            {1: "a<|im_end|>\n", 3: "<think>\nso\n</think>\n\na<|im_end|>\n"},
        ),
        (
            QWEN3,
            [USER, CALL],
            {
                1: "<think>\n\n</think>\n\n"
                '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>\n'
            },
        ),
        # What is marked is learned, and nothing else; here by a macro, in a loop that skips.
        (
            "{% macro say(t) %}{% for c in [t] %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}"
            "{% if m.role == 'user' %}{{ m.content }}{% continue %}{% endif %}<a>{% set t = say(m.content) %}"
            "{% generation %}{{ t + '!' }}{% endgeneration %}</s>{% endfor %}",
            [USER, {"role": "assistant", "content": "a"}],
            {1: "a!"},
        ),
    ],
)  # fmt: skip
def test_what_a_template_writes_for_answers(source, messages, expected):
    assert parts(source, messages) == expected


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "assistant", "content": "a", "thinking": "so"}, "it does not write thinking of message 2, which has "
         "content, thinking; it names content, reasoning_content, tool_calls"),
        ({**CALL, "tool_calls": None, "function_call": {"name": "f"}}, "it does not write function_call of message 2"),
    ],
)  # fmt: skip
def test_what_a_template_does_not_write(message, error):
    with pytest.raises(ValueError, match=f"config.json fails: {error}"):
        parts(QWEN3, [USER, message])


def test_template_without_a_loop(tmp_path):
    found = Tokenizer(make_folder(tmp_path, template="{{ messages[0].content + ' ' + messages[1].content }}"))
    chat = {"messages": CHAT["messages"][:2]}
    with pytest.raises(ValueError, match="line 1: the chat template writes messages in no loop over them, so that"):
        examples(tmp_path, found, [chat])
    assert examples(tmp_path, found, [chat], train_on="all")[0].trained[1:].all()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
        ("{% for i in range(100000000000) %}{% endfor %}", "Range too big"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "it is nested too deeply"),
        ("{{ 'x' * 70000000 }}", "it writes more than 67108864 characters"),
    ],
)
def test_template_that_fails(source, message):
    with pytest.raises(ValueError, match=rf"the chat template of tokenizer_config.json fails: {message}"):
        template(source).render(CHAT["messages"])


@pytest.mark.parametrize(
    "text",
    [
        "'x' * n",
        "'x' | center(n)",
        "'x'.ljust(n)",
        "'x'.zfill(n)",
        "'%20000000000d' % 1",
        "'{:20000000000d}'.format(1)",
        "'x' | replace('x', 'y' * n)",
        "[1] | batch(n, 1) | list",
        "messages * n",
        "'x' | center(20000000000)",  # which is computed when the template is read
    ],
)
def test_memory_of_a_template_is_limited(text):
    with pytest.raises(ValueError, match="fails: it takes more than 1024 MiB of memory"):
        template("{% set n = 20000000000 %}{{ " + text + " }}").render(CHAT["messages"])


def test_time_of_a_template_is_limited(monkeypatch):
    monkeypatch.setattr("opgrad.tune.tokenizer.SECONDS", 1)
    found = template(
        "{% if messages[0].content == 'long' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}done"
    )
    with pytest.raises(ValueError, match=r"template of tokenizer_config.json fails: it takes more than 1 s"):
        found.render([{"role": "user", "content": "long"}])
    assert found.render(CHAT["messages"]) == "done"  # in another process


def test_process_of_a_template_ends_with_it():
    found = template("a")
    process = found._process
    del found
    assert process.returncode is not None


@pytest.mark.filterwarnings("ignore:.*fork")  # JAX's and Python's, where a process of tests has threads
def test_template_in_a_forked_process():
    found = template("{{ messages[0].content }}")
    child = multiprocessing.get_context("fork").Process(target=found.render, args=(CHAT["messages"],))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert found.render(CHAT["messages"]) == "what is red ?"


@pytest.mark.parametrize(
    ("written", "texts"),
    [
        ("{{ m.content }}", [" one ", "user", "?", "\n<think>so</think>\ntwo\n", "\U0001f600 <"]),
        ("{{ m.content | trim }}", ["one", "user", "?", "<think>so</think>\ntwo", "\U0001f600 <"]),
        ("{{ m.content.split('</think>')[-1] }}", [" one ", "user", "?", "\ntwo\n", "\U0001f600 <"]),
        ("{{ m.content | upper }}", [" ONE ", "USER", "?", "\n<THINK>SO</THINK>\nTWO\n", "\U0001f600 <"]),
        ("{{ m.content | urlencode }}", ["%20one%20", "user", "%3F", "%0A%3Cthink%3Eso%3C/think%3E%0Atwo%0A",
                                         "%F0%9F%98%80%20%3C"]),
    ],
)  # fmt: skip
def test_answers_are_found(written, texts):
    """Whatever they hold, be it what the template itself writes or looks for, and characters of no script."""
    answers = [" one ", "user", "?", "\n<think>so</think>\ntwo\n", "\U0001f600 <"]
    asked = [{"role": "user", "content": chr(0x10FFFD - number)} for number in range(5)]
    messages = [each for pair in zip(asked, answers, strict=True)
                for each in (pair[0], {"role": "assistant", "content": pair[1]})]  # fmt: skip
    source = (
        "{% for m in messages %}<{% if m.role == 'user' %}user>{{ m.content }}{% else %}a>" + written + "{% endif %}"
        "</s>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    assert parts(source, messages) == {2 * at + 1: f"{each}</s>" for at, each in enumerate(texts)}


def test_chats_are_rendered_once(tmp_path, tokenizer, monkeypatch):
    """However often they are used."""
    asked = []
    ask = ChatTemplate.render_with_parts
    monkeypatch.setattr(ChatTemplate, "render_with_parts", lambda *given: asked.append(1) or ask(*given))
    found = examples(tmp_path, tokenizer, [CHAT, CHAT])
    first = found[1]
    assert len(asked) == 2
    for _ in range(3):
        np.testing.assert_array_equal(found[1].tokens, first.tokens)
        np.testing.assert_array_equal(found[1].trained, first.trained)
    assert len(asked) == 2


def test_chat_is_rendered_a_few_times_whatever_its_length(tmp_path, tokenizer):
    turns = [{"role": role, "content": f"the cat {number}"} for number in range(2000) for role in ("user", "assistant")]
    began = time.process_time()
    found = examples(tmp_path, tokenizer, [{"messages": turns}], longest=100000)
    assert found.told.trained == 2000 * 4
    assert time.process_time() - began < 10  # a rendering for each answer would take minutes


@pytest.mark.parametrize("source", ["{% if %}", "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "{% if 1 %}" * 5000])
def test_template_that_is_none(source):
    with pytest.raises(ValueError, match=r"^tokenizer_config.json: "):
        template(source)


def test_chat_that_is_nested_too_deeply():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match=r"config.json fails: the chat is nested too deeply"):
        template("a").render([{"role": "user", "content": deep}])


def test_template_in_another_encoding(tmp_path):
    folder = make_folder(tmp_path)
    (folder / "chat_template.jinja").write_bytes("{{ messages }}é".encode("utf-16"))
    with pytest.raises(ValueError, match=r"chat_template.jinja is no text in UTF-8: invalid start byte at byte 0"):
        Tokenizer(folder)


def test_chat_without_template(tmp_path):
    plain = Tokenizer(make_folder(tmp_path / "model", template=None))
    with pytest.raises(ValueError, match=r"line 1: it has messages, expected a chat template in tokenizer_config.json"):
        examples(tmp_path, plain, [CHAT])


# --- tokenizers ---


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"has no tokenizer.json, expected the file that the package tokenizers"
    ):
        Tokenizer(tmp_path)


def test_damaged_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer: "):
        Tokenizer(tmp_path)


def changed_tokenizer(folder, **changes):
    path = make_folder(folder) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_what_the_package_raises_itself(tmp_path):
    """Its own errors are Exception; a panic of Rust is none at all."""
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path = changed_tokenizer(tmp_path, normalizer=charsmap)
    with pytest.raises(ValueError, match=rf"^{path} is no tokenizer: Precompiled"):
        Tokenizer(path.parent)
    pieces = {"type": "FixedLength", "length": 0}
    unknown = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    large = {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}
    for changes, message in (
        ({"pre_tokenizer": pieces}, "chunk size must be non-zero"),
        ({"model": unknown}, "WordLevel error"),
        ({"model": large, "pre_tokenizer": None}, "out of bounds"),
    ):
        path = changed_tokenizer(tmp_path, **changes)
        tokenizer = Tokenizer(path.parent)
        with pytest.raises(ValueError, match=rf"^{path} cannot encode a text: .*{message}"):
            tokenizer.encode("a b", special=False)
        with pytest.raises(ValueError, match=rf"^{path} cannot encode a text: .*{message}"):
            tokenizer.encode_with_places("a b")
        with pytest.raises(ValueError, match=rf"^{path} cannot decode: "):
            tokenizer.decode([-1])


def test_ends_of_every_file(tmp_path):
    folder = make_folder(tmp_path)
    (folder / "genai_config.json").write_text(json.dumps({"model": {"eos_token_id": [1, 3]}}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = Tokenizer(folder)
    assert found.ends == [1, 3]
    assert found.template.render(CHAT["messages"]) == "what is red ?"


def test_template_by_name(tmp_path):
    folder = make_folder(tmp_path)
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "chat_template": named})
    )
    found = Tokenizer(folder)
    assert (found.end, "<|user|>" in found.template.render(CHAT["messages"])) == (1, True)


# --- batches ---


def token_data(tmp_path, tokenizer, count=100, batch=4):
    generator = np.random.default_rng(0)
    lines = [{"text": " ".join(generator.choice(WORDS, size))} for size in generator.integers(1, 60, count)]
    return TokenData(examples(tmp_path, tokenizer, lines), np.arange(count), batch, "input_ids", "labels")


def test_batches_have_similar_lengths(tmp_path, tokenizer):
    data = token_data(tmp_path, tokenizer, 103)
    order = data.order(np.random.default_rng(1))
    assert sorted(order) == list(range(103))
    spread = [np.ptp(data.lengths(order[at : at + 4])) for at in range(0, 100, 4)]
    assert np.mean(spread) < 5
    firsts = [data.lengths(order[at : at + 1])[0] for at in range(0, 100, 4)]
    assert firsts != sorted(firsts)
    assert (data.order(np.random.default_rng(1)) == order).all()


def test_labels_are_the_tokens_that_follow(tmp_path, tokenizer):
    data = token_data(tmp_path, tokenizer)
    batch = data.take(np.array([3, 5]))
    tokens, labels = batch.arrays["input_ids"], batch.arrays["labels"]
    assert tokens.shape == labels.shape
    assert tokens.shape[1] % MULTIPLE == 0
    for row, number in enumerate((3, 5)):
        example = data.examples[number]
        count = len(example.tokens) - 1
        assert (tokens[row, :count] == example.tokens[:-1]).all()
        assert (labels[row, :count] == example.tokens[1:]).all()
        assert (labels[row, count:] == -100).all()
    assert batch.weight() == data.weight(np.array([3, 5])) == (labels != -100).sum()


def test_split_is_by_seed(tmp_path, tokenizer):
    data = token_data(tmp_path, tokenizer)
    training, validation = data.split(10, 3)
    assert sorted([*training.chosen, *validation.chosen]) == list(range(100))
    assert (data.split(10, 3)[1].chosen == validation.chosen).all()
    assert (data.split(10, 4)[1].chosen != validation.chosen).any()
