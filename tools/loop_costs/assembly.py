"""Finds the innermost loops of a function in the text of its assembly, and what each of them executes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

LABEL = re.compile(r"^(\.?[\w$.]+):")
JUMP = re.compile(r"^(?:j[a-z]+|b|b\.\w+|cbn?z|tbn?z)\b.*?(\.?L[\w$.]+)$")
VECTOR_REGISTER = re.compile(r"%([xyz])mm\d+|\b([qvd])\d+\b")
STACK = re.compile(r"\(%[re]sp|\(%[re]bp|\[sp\b")
REGISTER_BYTES = {"x": 16, "y": 32, "z": 64, "q": 16, "v": 16, "d": 8}
STORE = re.compile(
    r"^v?mov\w*\s+.*,\s*[^,]*\([^)]*\)(?:\s*\{.*)?$|^vcvtps2ph\s.*\)(?:\s*\{.*)?$|^vpmov\w+\s.*\)(?:\s*\{.*)?$|^st"
)
# A move between memory and a register that leaves some lanes out. A mask on another instruction selects values.
MASKED_MOVE = re.compile(r"^vp?maskmov|^vp?mov\w* .*\(.*\{%k[1-7]\}")


@dataclass(frozen=True)
class Loop:
    """The instructions of an innermost loop, in the assembler's syntax."""

    lines: tuple[str, ...]

    @property
    def has_vectors(self) -> bool:
        return any(VECTOR_REGISTER.search(line) for line in self.lines)

    @property
    def stack_loads(self) -> int:
        """How many instructions read the stack, where values lie that found no register."""
        return sum(bool(STACK.search(line)) and not is_store(line) for line in self.lines)

    @property
    def stored_bytes(self) -> int:
        """The bytes that an iteration writes to memory, those on the stack apart."""
        return sum(moved_bytes(line) for line in self.lines if is_store(line) and not STACK.search(line))

    @property
    def is_masked(self) -> bool:
        """Whether a part of the lanes is loaded or stored, as at the end of a row."""
        return any(MASKED_MOVE.match(line) for line in self.lines)


def is_store(line: str) -> bool:
    return bool(STORE.match(line))


def moved_bytes(line: str) -> int:
    """The bytes of the registers that a store writes."""
    found = [REGISTER_BYTES[x86 or arm] for x86, arm in VECTOR_REGISTER.findall(line)]
    return sum(found) if line.startswith("stp") else max(found, default=0)


def innermost_loops(text: str) -> Iterator[Loop]:
    """The loops that no other loop lies in and that work on vectors, in the order of the text."""
    lines, places = _instructions(text)
    ends: dict[int, int] = {}  # of each loop, by where it begins: several jumps may lead back there
    for place, line in enumerate(lines):
        found = JUMP.match(line)
        if found and places.get(found[1], place + 1) <= place:
            ends[places[found[1]]] = place
    for begin, end in sorted(ends.items()):
        if not any(begin < other <= end for other in ends):
            loop = Loop(tuple(lines[begin : end + 1]))
            if loop.has_vectors:
                yield loop


def _instructions(text: str) -> tuple[list[str], dict[str, int]]:
    """The instructions without comments and directives, and for each label the number of the one that follows it."""
    lines: list[str] = []
    places: dict[str, int] = {}
    for line in text.splitlines():
        line = re.split(r"\s+(?:# |//|##)", line)[0].strip()
        if label := LABEL.match(line):
            places[label[1]] = len(lines)
        elif line and not line.startswith((".", "#", "//")):
            lines.append(line.replace("\t", " "))
    return lines, places
