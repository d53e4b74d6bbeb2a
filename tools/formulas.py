"""The formulas of the operators' documentation, which are written as text, as LaTeX.

A formula is statements such as `dx = y * (dy - sum(y * dy))`, between which semicolons stand, and prose. A statement
that Python can parse once a few notations are spelled out is typeset; what it cannot parse stays text.
"""

import ast
import re

GREEK = {"alpha", "beta", "epsilon", "pi"}
FUNCTIONS = {"exp", "log", "tanh", "max", "min"}  # for which LaTeX has commands
SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: r"\,", ast.MatMult: r"\,"}
COMPARISONS = {ast.Eq: "=", ast.Gt: ">", ast.Lt: "<", ast.LtE: r"\le", ast.GtE: r"\ge"}
# Where the prose begins that follows an expression.
PROSE = re.compile(
    r",? (?:where(?!\(| .* else )|over|reduced|with|that|summed|likewise|rounded once)\b"
    r"|, (?:where|the|also|f|r)\b(?! =)"
)
WORDS = re.compile(r"\b(?:of|the|is|are|no|joined|along)\b")  # of a statement that is prose altogether
BETWEEN = re.compile(r"; |, (?=\w+(?:\[[^\]]*\])? = )")


def latex(formula: str) -> str:
    """A formula as one LaTeX array, a line for each statement."""
    lines = [_statement(each.strip()) for each in BETWEEN.split(formula.strip().rstrip("."))]
    return lines[0] if len(lines) == 1 else "\\begin{array}{l}\n" + " \\\\\n".join(lines) + "\n\\end{array}"


def _statement(text: str) -> str:
    """One statement, with the prose before and behind it."""
    head, colon, rest = text.partition(": ")
    if colon and re.fullmatch(r"[\w ,]+", head):
        return rf"{_text(head + ': ')} {_statement(rest)}"
    ends = PROSE.search(text)
    body, prose = (text[: ends.start()], text[ends.start() :]) if ends else (text, "")
    try:
        python = _spelled_out(body)
        if WORDS.search(python):
            return _text(text)
        (parsed,) = ast.parse(python).body
        written = _write(parsed)
    except (SyntaxError, ValueError, KeyError):
        return _text(text)
    return f"{written} {_text(prose)}" if prose else written


def _spelled_out(text: str) -> str:
    """Python for the notations of formulas that Python does not have."""
    text = re.sub(r"\bsum of (.*)", r"sum(\1)", text)
    text = re.sub(r"= (.+?) where (.+) else (.+)", r"= (\1) if (\2) else (\3)", text)
    text = re.sub(r"\b(\w+) before\b", r"\1_before", text)
    text = text.replace("u'", "u_prime").replace("2 pi", "2 * pi").replace("..", "dots").replace("dz/dx", "dz_dx")
    text = re.sub(r"\b([bj])dots", r"\1_dots", text)
    # Two names side by side are a product of matrices.
    return re.sub(r"(?<=[\w)]) (?=[A-Za-z(])(?!(?:if|else)\b)(?<!if )(?<!else )", " @ ", text)


def _text(text: str) -> str:
    return r"\text{" + re.sub(r"([_&%#{}])", r"\\\1", text).replace("**", "^") + "}"


# --- the syntax tree ------------------------------------------------------------------------------------------------


def _write(node: ast.AST) -> str:
    """A statement or an expression; ValueError for what formulas do not have."""
    write = WRITERS.get(type(node))
    if write is None:
        raise ValueError(f"formulas: {type(node).__name__} is not typeset")
    return write(node)


def _name(node: ast.Name) -> str:
    return _word(node.id)


def _word(name: str) -> str:
    """A name: Greek where it is a Greek letter's, what follows its first underscore as an index."""
    if name == "dz_dx":
        return r"\frac{dz}{dx}"
    if name.endswith("_prime"):
        return name.removesuffix("_prime") + "'"
    if name.endswith("dots"):
        return r"\ldots" if name == "dots" else rf"{name[0]}_{{\ldots}}"
    base, _, index = name.partition("_")
    if index and (len(base) < 3 or index in ("i", "k")):
        return f"{_word(base)}_{{{_word(index)}}}"
    if name in GREEK:
        return f"\\{name}"
    return name if len(name) == 1 else rf"\mathrm{{{name}}}".replace("_", r"\_")


def _number(node: ast.Constant) -> str:
    return str(node.value)


def _assign(node: ast.Assign) -> str:
    return f"{' = '.join(map(_write, node.targets))} = {_write(node.value)}"


def _add_to(node: ast.AugAssign) -> str:
    sign = {ast.Add: "{+}{=}", ast.Sub: "{-}{=}"}[type(node.op)]
    return f"{_write(node.target)} \\mathrel{{{sign}}} {_write(node.value)}"


def _binary(node: ast.BinOp) -> str:
    if isinstance(node.op, ast.Div):
        return rf"\frac{{{_write(node.left)}}}{{{_write(node.right)}}}"
    if isinstance(node.op, ast.Pow):
        return f"{_grouped(node.left)}^{{{_write(node.right)}}}"
    product = isinstance(node.op, ast.Mult | ast.MatMult)
    left = _grouped(node.left) if product and not isinstance(node.left, ast.UnaryOp) else _write(node.left)
    right = _grouped(node.right) if product or isinstance(node.op, ast.Sub) else _write(node.right)
    if product and isinstance(node.right, ast.Constant):
        return rf"{left} \cdot {right}"
    return f"{left} {SYMBOLS[type(node.op)]} {right}"


def _brackets(inside: str) -> str:
    """Round brackets, as tall as what they hold."""
    tall = any(sign in inside for sign in (r"\frac", r"\sum", r"\begin", r"\sqrt"))
    return rf"\left({inside}\right)" if tall else f"({inside})"


def _grouped(node: ast.AST) -> str:
    """In brackets where it is a sum, a choice or several things."""
    written = _write(node)
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
    is_open = is_sum or isinstance(node, ast.UnaryOp | ast.IfExp | ast.Tuple)
    return _brackets(written) if is_open else written


def _negative(node: ast.UnaryOp) -> str:
    return f"-{_grouped(node.operand)}"


def _compare(node: ast.Compare) -> str:
    (operator,), (right,) = node.ops, node.comparators
    return f"{_write(node.left)} {COMPARISONS[type(operator)]} {_write(right)}"


def _indexed(node: ast.Subscript) -> str:
    value, index = _write(node.value), _write(node.slice)
    return f"{{{value}}}_{{{index}}}" if "_{" in value else f"{value}_{{{index}}}"


def _range(node: ast.Slice) -> str:
    return ":".join(_write(each) for each in (node.lower, node.upper, node.step) if each is not None)


def _tuple(node: ast.Tuple) -> str:
    return ", ".join(map(_write, node.elts))


def _iverson(node: ast.List) -> str:
    """[k == label] is 1 where it holds, else 0: Iverson's bracket."""
    return rf"\left[{', '.join(map(_write, node.elts))}\right]"


def _spread(node: ast.Starred) -> str:
    return _write(node.value)


def _cases(value: ast.AST, condition: ast.AST, other: ast.AST) -> str:
    rows = rf"{_write(value)} & \text{{where }} {_write(condition)} \\ {_write(other)} & \text{{else}}"
    return rf"\begin{{cases}} {rows} \end{{cases}}"


def _choice(node: ast.IfExp) -> str:
    return _cases(node.body, node.test, node.orelse)


def _call(node: ast.Call) -> str:
    """A function; sums, square roots and choices have signs of their own."""
    if not isinstance(node.func, ast.Name):
        raise ValueError("formulas: only names are called")
    name = node.func.id
    if name == "where":
        mask, value, other = node.args
        return _cases(value, mask, other)
    given = ", ".join(map(_write, node.args))
    if name == "sqrt":
        return rf"\sqrt{{{given}}}"
    if name == "sum" or name.startswith("sum_"):
        index = name.partition("_")[2]
        brackets = _grouped(node.args[0]) if len(node.args) == 1 else given
        return (rf"\sum_{{{index}}} " if index else r"\sum ") + brackets
    base, _, index = name.partition("_")
    function = rf"\{name}" if name in FUNCTIONS else r"\sigma" if name == "sigmoid" else ""
    if not function:
        indexed = base in FUNCTIONS and len(index) == 1
        function = rf"\{base}_{{{index}}}" if indexed else rf"\mathrm{{{name}}}".replace("_", r"\_")
    return function + _brackets(given)


def _expression(node: ast.Expr) -> str:
    return _write(node.value)


WRITERS = {
    ast.Name: _name,
    ast.Constant: _number,
    ast.Assign: _assign,
    ast.AugAssign: _add_to,
    ast.BinOp: _binary,
    ast.UnaryOp: _negative,
    ast.Compare: _compare,
    ast.Subscript: _indexed,
    ast.Slice: _range,
    ast.Tuple: _tuple,
    ast.List: _iverson,
    ast.Starred: _spread,
    ast.IfExp: _choice,
    ast.Call: _call,
    ast.Expr: _expression,
}
