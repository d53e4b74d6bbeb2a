"""PTX text to kernels: parameters, shared memory, registers and instructions.

What Triton's compiler writes is read: one kernel a module, with inline assembly in braces of its own.
"""

import re
from collections import namedtuple
from dataclasses import dataclass, field

from ptx.types import named

TOKEN = re.compile(
    r"@!?[%\w$]+|0[fF][0-9A-Fa-f]{8}|0[dD][0-9A-Fa-f]{16}|-?0[xX][0-9A-Fa-f]+U?|-?\d+U?"
    r"|[%$._A-Za-z][\w$]*(?:(?:::|\.)[\w$]+)*(?:<\d+>)?|[{}\[\](),;:!+|<>=-]|\"[^\"]*\""
)
COMMENT = re.compile(r"//.*|/\*.*?\*/")
LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')


class PtxError(Exception):
    """PTX that the executor does not know."""


# Operands.
Register = namedtuple("Register", "name type")
Immediate = namedtuple("Immediate", "text")
Special = namedtuple("Special", "name")  # a special register, such as %tid.x
Symbol = namedtuple("Symbol", "name")  # a variable's address, or a label
Address = namedtuple("Address", "base offset")  # [base + offset]
Vector = namedtuple("Vector", "items")
Not = namedtuple("Not", "register")  # !%p
Pair = namedtuple("Pair", "first second")  # %r|%p, or %p|%q: two results
Sink = namedtuple("Sink", "")  # _
Parameter = namedtuple("Parameter", "name type pointer")


@dataclass(frozen=True)
class Instruction:
    """guard: the predicate, and whether it is negated. line: of the PTX. source: file:line of the kernel's Python."""

    name: str
    operands: tuple[tuple, ...]
    guard: tuple[Register, bool] | None
    line: int
    source: str

    @property
    def opcode(self):
        return self.name.partition(".")[0]

    @property
    def modifiers(self):
        return self.name.split(".")[1:]


@dataclass
class Kernel:
    """labels: the number of the instruction behind each. shared: bytes that are declared, beside those of a launch."""

    name: str = ""
    target: str = ""
    parameters: list[Parameter] = field(default_factory=list)
    threads: int = 0
    ctas: int = 1
    local: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text):
    """The kernel of a module. Raises PtxError for what is not understood."""
    return _Parser(text).kernel


class _Parser:
    def __init__(self, text):
        self.kernel = Kernel()
        self.files = dict(FILE.findall(text))
        self.scopes = [{}]
        self.renamed = 0
        self.source, self.line = "", 0
        self.tokens = self._tokens(text)
        while (token := next(self.tokens, None)) is not None:
            self._directive(token)

    def _tokens(self, text):
        for number, line in enumerate(text.splitlines(), 1):
            code = COMMENT.sub("", line).strip()
            if code.startswith(".section"):
                return
            if code.startswith((".loc ", ".loc\t")):
                self.source = self._location(code)
            elif not code.startswith((".file", ".version", ".address_size")):
                for token in TOKEN.findall(code):
                    self.line = number
                    yield token

    def _location(self, code):
        found = LOCATION.match(code)
        if found is None:
            raise PtxError(f"line {self.line}: {code} is no location")
        file, line, outer, caller = found.groups()
        name = self.files.get(file, file).rpartition("/")[2]
        called = f", called at {self.files.get(outer, outer).rpartition('/')[2]}:{caller}" if outer else ""
        return f"{name}:{line}{called}"

    def _next(self):
        token = next(self.tokens, None)
        if token is None:
            raise PtxError(f"line {self.line}: the text ends in the middle of a statement")
        return token

    def _until(self, *ends):
        found = []
        while (token := self._next()) not in ends:
            found.append(token)
        return found

    # --- outside of the kernel's body

    def _directive(self, token):
        if token.startswith(".target"):
            self.kernel.target = self._next()
        elif token in (".visible", ".weak", ".explicitcluster"):
            pass
        elif token == ".entry":
            self.kernel.name = self._next()
            self._parameters()
        elif token == ".reqntid":
            self.kernel.threads = int(self._next())
        elif token == ".reqnctapercluster":
            self.kernel.ctas = int(self._next())
        elif token in (".maxntid", ".minnctapersm", ".maxnreg"):
            self._next()
        elif token in (".global", ".extern", ".shared", ".const"):
            self._variable([token, *self._until(";")])
        elif token == "{":
            self._body()
        elif token != ",":
            raise PtxError(f"line {self.line}: unknown directive {token}")

    def _parameters(self):
        token = self._next()
        if token != "(":
            raise PtxError(f"line {self.line}: unknown directive {token}")
        for part in " ".join(self._until(")")).split(","):
            words = part.split()
            if words:
                of = next(found for word in words if (found := named(word.lstrip("."))))
                self.kernel.parameters.append(Parameter(words[-1], of, ".ptr" in words))

    def _variable(self, words):
        if ".shared" in words:
            sized = words[-2] if words[-1] == "]" and words[-2] != "[" else "0"
            name = words[words.index("[") - 1] if "[" in words else words[-1]
            of = next(found for word in words if (found := named(word.lstrip("."))))
            self.kernel.shared[name] = int(sized) * of.bits // 8

    # --- inside

    def _body(self):
        depth = 1
        while depth:
            token = self._next()
            if token == "{":
                self.scopes.append({})
                depth += 1
            elif token == "}":
                if len(self.scopes) > 1:
                    self.scopes.pop()
                depth -= 1
            else:
                self._statement(token)

    def _statement(self, token):
        if token == ".reg":
            self._registers(self._until(";"))
        elif token == ".local":
            words = self._until(";")
            self.kernel.local += int(words[-2]) if words[-1] == "]" else 8
        elif token in (".pragma", ".shared"):
            self._variable([token, *self._until(";")])
        elif token == ";":
            pass
        elif token.startswith("$"):  # as labels alone do
            if self._next() != ":":
                raise PtxError(f"line {self.line}: expected a colon behind {token}")
            self.kernel.labels[token] = len(self.kernel.instructions)
        else:
            self._instruction(token)

    def _registers(self, words):
        of = named(words[0].lstrip("."))
        if of is None:
            raise PtxError(f"line {self.line}: unknown type {words[0]} of registers")
        for word in words[1:]:
            if word == ",":
                continue
            name, _, count = word.rstrip(">").partition("<")
            inner = len(self.scopes) > 1
            self.renamed += inner
            for each in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                self.scopes[-1][each] = Register(f"{each}'{self.renamed}" if inner else each, of)

    def _register(self, name):
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def _instruction(self, token):
        guard = None
        if token.startswith("@"):
            negated, name = token.startswith("@!"), token.lstrip("@!")
            found = self._register(name)
            if found is None:
                raise PtxError(f"line {self.line}: unknown predicate {name}")
            guard = found, negated
            token = self._next()
        line, words, operands = self.line, self._until(";"), []
        try:
            while words:
                operands.append(self._operand(words))
                if words and words.pop(0) != ",":
                    raise PtxError(f"line {line}: {token}: expected a comma between operands")
        except (IndexError, ValueError) as error:
            raise PtxError(f"line {line}: {token}: an operand that is not whole") from error
        self.kernel.instructions.append(Instruction(token, tuple(operands), guard, line, self.source))

    # --- operands

    def _operand(self, words):
        """Take an operand off the front of an instruction's words."""
        word = words.pop(0)
        if word == "{":
            items = []
            while words[0] != "}":
                items.append(self._operand(words))
                if words[0] == ",":
                    words.pop(0)
            words.pop(0)
            return Vector(tuple(items))
        if word == "[":
            return self._address(words)
        if word == "!":
            return Not(self._operand(words))
        operand = self._named(word)
        if words[:1] == ["|"]:
            words.pop(0)
            return Pair(operand, self._operand(words))
        return operand

    def _address(self, words):
        base, *rest = words[: words.index("]")]
        del words[: len(rest) + 2]
        return Address(self._named(base), int(rest[-1].rstrip("U"), 0) if rest else 0)

    def _named(self, word):
        if word == "_":
            return Sink()
        if word[0].isdigit() or word[0] == "-":
            return Immediate(word.rstrip("U") if word[:2].lower() not in ("0f", "0d") else word)
        register = self._register(word)
        if register is not None:
            return register
        return Special(word) if word.startswith("%") else Symbol(word)
