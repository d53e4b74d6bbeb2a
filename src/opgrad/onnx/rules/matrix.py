"""Products of matrices, Einstein summation, and Fourier transforms, with complex numbers as pairs on the last axis."""

import string
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.onnx.graph.sizes import Size, are_equal, known
from opgrad.onnx.rules.node import (
    Gradients,
    Node,
    NoGradient,
    gradient,
    numbers_of,
    recomputed,
    reshape_like,
    sizes_of,
    transposed,
    unbroadcast,
)
from opgrad.onnx.rules.quantization import gradient_through

GEMM = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}


@gradient("MatMul")
def matmul(node: Node) -> Gradients:
    """da = dy @ b.T, db = a.T @ dy, summed over what was broadcast."""
    a, b, dy = node.x, node.required(1), node.dy
    if (da := gradient_through(node, dy)) is not None:
        return [da, None]
    if a.sizes is None and b.sizes is not None and len(b.sizes) == 2:
        return [node.body.node("MatMul", dy, transposed(b)), _rows(a, b, 0).apply("Gemm", _rows(dy, b, 1), transA=1)]
    ranks = len(sizes_of(a)), len(sizes_of(b))
    if ranks == (2, 2):
        return [dy.apply("Gemm", b, transB=1), a.apply("Gemm", dy, transA=1)]
    # A vector is a matrix of one row, or of one column.
    row = node.with_sizes(a.unsqueeze(0), [1, *sizes_of(a)]) if ranks[0] == 1 else a
    column = node.with_sizes(b.unsqueeze(1), [*sizes_of(b), 1]) if ranks[1] == 1 else b
    dy = dy.unsqueeze(len(sizes_of(node.y))) if ranks[1] == 1 else dy
    dy = dy.unsqueeze(max(ranks[1] - 2, 0)) if ranks[0] == 1 else dy
    batch = list(sizes_of(node.y))[: len(sizes_of(node.y)) - 2 + ranks.count(1)]
    widths = known([sizes_of(each)[-1] for each in (a, b)])
    if ranks[1] == 2 and widths and all(widths):
        # The rows of all matrices, as one matrix.
        rows, drows = (each.reshape([-1, width]) for each, width in zip((a, dy), widths, strict=True))
        db = rows.apply("Gemm", drows, transA=1)
    else:
        db = _over_batches(node.body.node("MatMul", transposed(row), dy), batch, column)
    da = _over_batches(node.body.node("MatMul", dy, transposed(column)), batch, row)
    return [reshape_like(da, a) if ranks[0] == 1 else da, reshape_like(db, b) if ranks[1] == 1 else db]


def _rows(value: Value, matrix: Value, axis: int) -> Value:
    """A value of any rank as one matrix, whose rows are as long as an axis of another."""
    return value.reshape(value.body.concat(value.body.ints([-1]), matrix.shape(axis, axis + 1)))


def _over_batches(product: Value, batch: Sequence[int | str | None], target: Value) -> Value:
    """The gradient of a stack of matrices from the products for each matrix of the result: their sum over the batch."""
    whole = Value(product.body, product.name, product.element_type, [*batch, *sizes_of(target)[-2:]])
    return unbroadcast(product, whole, target)


@gradient("Gemm")
def gemm(node: Node) -> Gradients:
    """da = alpha * dy @ b.T, db = alpha * a.T @ dy, dc = beta * dy; transposed where a or b is."""
    a, b, dy = node.x, node.required(1), node.dy
    trans_a, trans_b, alpha, beta = (node.get(*each) for each in GEMM.items())
    if trans_a:
        da = b.apply("Gemm", dy, transA=trans_b, transB=1, alpha=alpha)
    elif (found := gradient_through(node, dy, bool(trans_b))) is not None:
        da = found if alpha == 1 else found * alpha
    else:
        da = dy.apply("Gemm", b, transB=1 - trans_b, alpha=alpha)
    if trans_b:
        db = dy.apply("Gemm", a, transA=1, transB=trans_a, alpha=alpha)
    else:
        db = a.apply("Gemm", dy, transA=1 - trans_a, alpha=alpha)
    return [da, db, None if node.input(2) is None else node.unbroadcast(dy if beta == 1 else dy * beta, 2)]


REST = "..."  # the axes without a letter, which are broadcast against each other


def _unused(count: int, *taken: str) -> str:
    """Letters that are not in these texts."""
    return "".join(each for each in string.ascii_letters if all(each not in text for text in taken))[:count]


@gradient("Einsum")
def einsum(node: Node) -> Gradients:
    """dx = einsum of dy and all other operands, to the axes of x; an axis that is there twice gets a diagonal."""
    text = node.get("equation").replace(" ", "")
    left, arrow, result = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(node.inputs):
        raise NoGradient(f"its equation {text!r} has {len(terms)} operands, the node {len(node.inputs)}")
    if not arrow:
        letters = left.replace(REST, "").replace(",", "")
        result = (REST if REST in left else "") + "".join(sorted(each for each in letters if letters.count(each) == 1))
    count = [node.rank(index) - len(term.replace(REST, "")) if REST in term else 0 for index, term in enumerate(terms)]
    rest = _unused(max(count), *terms, result)  # the letters that `...` becomes
    terms = [term.replace(REST, rest[len(rest) - own :]) for term, own in zip(terms, count, strict=True)]
    result = result.replace(REST, rest)
    places = range(len(node.inputs))
    return [_gradient_of(node, terms, result, rest, index) if index in node.needed else None for index in places]


def _gradient_of(node: Node, every: Sequence[str], result: str, rest: str, place: int) -> Value:
    """The gradient of one operand. every: the letters of each operand's axes. rest: those that `...` became."""
    x, others, own = node.required(place), [index for index in range(len(every)) if index != place], ""
    terms, operands = [every[index] for index in others], [node.required(index) for index in others]
    if result:
        terms, operands = [result, *terms], [node.dy, *operands]
    for axis, letter in enumerate(every[place]):
        if letter in own:  # made distinct by an identity matrix among the operands
            new = _unused(1, *every, own, *terms, result)
            size = x.shape(axis, axis + 1)
            terms.append(letter + new)
            operands.append(node.body.number(0, x).expand(node.body.concat(size, size)).apply("EyeLike"))
            letter = new
        own += letter
    there = "".join(terms)
    kept = "".join(each for each in own if each in there)
    sizes, sizes_of_x = _sizes(terms, operands), dict(zip(own, sizes_of(x), strict=True))
    dx = node.body.node("Einsum", *operands, equation=f"{','.join(terms)}->{kept}") if operands else node.dy
    dx = dx if result or not operands else dx * node.dy
    alone = [index for index, each in enumerate(own) if each not in there]
    if alone:
        dots = [each for each in rest if each in kept and sizes[each] != 1]
        open_ = [each for each in dots if not are_equal([sizes_of_x[each]], [sizes[each]])]
        if any(not isinstance(sizes_of_x[each], int) for each in open_):
            raise NoGradient("the graph does not tell which axes of the dots are broadcast")
        summed = [kept.index(each) for each in open_]
        dx = dx.sum(summed) if summed else dx
        return (dx.unsqueeze(*alone) if kept else dx).expand(x.shape())
    whole = [sizes[each] if each in rest or size == 1 else size for each, size in sizes_of_x.items()]
    return unbroadcast(dx, node.with_sizes(dx, whole), x)


def _sizes(terms: Sequence[str], operands: Sequence[Value]) -> dict[str, Size]:
    """The size of each letter's axis, that of the operand which is not broadcast along it."""
    found: dict[str, Size] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, size in zip(term, operand.sizes or [None] * len(term), strict=True):
            if found.get(letter, 1) == 1:
                found[letter] = size
    return found


AXIS_IS_INPUT = 20  # opset of DFT
LENGTH, AXIS = 1, 2  # indices of DFT's inputs


def _transform(x: Value, axis: int, **attributes: int) -> Value:
    """DFT in the form of the opset."""
    if x.body.opset >= AXIS_IS_INPUT:
        return x.body.node("DFT", x, None, x.body.constant(np.array(axis)), **attributes)
    return x.body.node("DFT", x, axis=axis, **attributes)


def _axis(node: Node) -> int:
    if node.opset < AXIS_IS_INPUT:
        return int(node.get("axis", 1)) % node.rank()
    axis = node.constant(AXIS)
    if node.input(AXIS) is not None and axis is None:
        raise NoGradient("its axis is known at run time alone")
    return (-2 if axis is None else int(axis.reshape(()))) % node.rank()


@gradient("DFT", constant=(LENGTH, AXIS))
def dft(node: Node) -> Value:
    """dx = n * inverse(dy), of the inverse transform dx = transform(dy) / n; the part of it that x is.

    Of an inverse of one side, numbers that stand for two, themselves and their conjugates, count twice.
    """
    axis, inverse, onesided, last = _axis(node), node.get("inverse", 0), node.get("onesided", 0), node.rank() - 1
    own, given = node.x.shape(axis, axis + 1), node.input(LENGTH)
    if inverse and onesided:
        known, size = node.constant(LENGTH), sizes_of(node.x)[axis]
        if known is not None and isinstance(size, int) and size != (wanted := int(known.reshape(())) // 2 + 1):
            raise NoGradient(
                f"it is an inverse of one side with {size} numbers, expected {wanted} of a length of "
                f"{known.reshape(())}: of others onnxruntime computes something else than ONNX says"
            )
    length = node.y.shape(axis, axis + 1) if inverse else own if given is None else given.reshape([1])
    dy = _filled(node.dy, axis, length) if onesided and not inverse else node.dy
    count = length.squeeze(0).cast(node.dy.element_type or TensorProto.FLOAT)
    back = _transform(dy, axis, inverse=1 - inverse, onesided=inverse & onesided)
    back = back / count if inverse else back * count
    if inverse and onesided:
        # How many numbers of the whole each of one side stands for: the first, and of an even length the last, for one.
        whole, body = length.squeeze(0), node.body
        alone = body.node("Mod", body.range(whole / 2 + 1) * 2, whole).equals(0)
        back = back * body.where(alone, body.number(1, back), 2).reshape([-1, *[1] * (last - axis)])
    back = back if given is None else _filled(back, axis, own)
    return back.slice(0, 1, last) if numbers_of(node.x, last) == [1] else back


def _filled(value: Value, axis: int, length: Value) -> Value:
    """The first numbers along an axis, with zeros behind them where there are not enough."""
    body = value.body
    behind = body.concat(value.shape(0, axis), length, value.shape(axis + 1))
    return body.concat(value, body.full(behind, 0, value), axis=axis).slice(body.ints([0]), length, axis)


@recomputed("STFT", constant=(1, 3))
def stft(node: Node) -> Value:
    """y = the transforms of frames of the signal, each times the window."""
    body, window, size = node.body, node.input(2), node.input(3)
    if size is None and window is None:
        raise NoGradient("it has neither a window nor a length of frames")
    width = window.shape(0, 1).squeeze(0) if size is None and window is not None else node.required(3).scalar()
    width, step = width.cast(TensorProto.INT64), node.required(1).scalar().cast(TensorProto.INT64)
    end = node.x.shape(1, 2).squeeze(0) - width + 1
    starts = body.node("Range", body.constant(np.array(0)), end, step)
    frames = body.node("Gather", node.x, starts.unsqueeze(1) + body.range(width), axis=1)
    weighted = frames if window is None else frames * window.unsqueeze(1)
    return _transform(weighted, 2, onesided=node.get("onesided", 1))


@gradient("Det")
def determinant(node: Node) -> Value:
    """dx = dy * y * inverse(x).T."""
    if node.body.plain:
        raise NoGradient("ONNX has no inverse of a matrix, expected plain=False")
    rank = node.rank()
    return transposed(node.microsoft("Inverse", node.x), rank) * (node.dy * node.y).unsqueeze(rank - 2, rank - 1)


@gradient("Inverse", domain=MICROSOFT)
def inverse(node: Node) -> Value:
    """dx = -y.T @ dy @ y.T."""
    y = transposed(node.y, node.rank())
    return -node.body.node("MatMul", node.body.node("MatMul", y, node.dy), y)
