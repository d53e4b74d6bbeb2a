"""Products of matrices."""

from collections.abc import Sequence

from opgrad.onnx.graph.formulas import Value
from opgrad.onnx.rules.frozen_weights import gradient_through
from opgrad.onnx.rules.node import Node, reshape_like, sizes_of, transposed, unbroadcast
from opgrad.onnx.rules.registry import Gradients, gradient

GEMM = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}


@gradient("MatMul")
def matmul(node: Node) -> Gradients:
    """da = dy @ b.T, db = a.T @ dy, summed over what was broadcast."""
    a, b, dy = node.x, node.required(1), node.dy
    if (da := gradient_through(node, dy, 1)) is not None:
        return [da, None]
    if a.sizes is None and b.sizes is not None and len(b.sizes) == 2:
        return [node.body.node("MatMul", dy, transposed(b)), _gemm(_rows(a, b, 0), _rows(dy, b, 1), transA=1)]
    ranks = len(sizes_of(a)), len(sizes_of(b))
    if ranks == (2, 2):
        return [_gemm(dy, b, transB=1), _gemm(a, dy, transA=1)]
    # A vector is a matrix of one row, or of one column.
    row = _with_axis(a, 0) if ranks[0] == 1 else a
    column = _with_axis(b, 1) if ranks[1] == 1 else b
    dy = dy.unsqueeze(len(sizes_of(node.y))) if ranks[1] == 1 else dy
    dy = dy.unsqueeze(max(ranks[1] - 2, 0)) if ranks[0] == 1 else dy
    batch = list(sizes_of(node.y))[: len(sizes_of(node.y)) - 2 + ranks.count(1)]
    if ranks[1] == 2 and _width(a) and _width(b):
        # The rows of all matrices, as one matrix.
        db = _gemm(a.reshape([-1, _width(a)]), dy.reshape([-1, _width(b)]), transA=1)
    else:
        db = _over_batches(node.body.node("MatMul", transposed(row), dy), batch, column)
    da = _over_batches(node.body.node("MatMul", dy, transposed(column)), batch, row)
    return [reshape_like(da, a) if ranks[0] == 1 else da, reshape_like(db, b) if ranks[1] == 1 else db]


def _gemm(a: Value, b: Value, *c: Value, **attributes: float) -> Value:
    return a.body.node("Gemm", a, b, *c, **attributes)


def _rows(value: Value, matrix: Value, axis: int) -> Value:
    """A value of any rank as one matrix, whose rows are as long as an axis of another."""
    size = sizes_of(matrix)[axis]
    if isinstance(size, int):
        return value.reshape([-1, size])
    return value.reshape(value.body.concat(value.body.ints([-1]), matrix.shape(axis, axis + 1)))


def _width(value: Value) -> int:
    """The size of the last axis, 0 if it is not known."""
    size = sizes_of(value)[-1]
    return size if isinstance(size, int) else 0


def _with_axis(vector: Value, axis: int) -> Value:
    """A vector as a matrix."""
    sizes = list(sizes_of(vector))
    matrix = vector.unsqueeze(axis)
    return Value(vector.body, matrix.name, vector.element_type, [*sizes[:axis], 1, *sizes[axis:]])


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
        da = _gemm(b, dy, transA=trans_b, transB=1, alpha=alpha)
    elif (found := gradient_through(node, dy, 1, bool(trans_b))) is not None:
        da = found if alpha == 1 else found * alpha
    else:
        da = _gemm(dy, b, transB=1 - trans_b, alpha=alpha)
    db = (
        _gemm(dy, a, transA=1, transB=trans_a, alpha=alpha)
        if trans_b
        else _gemm(a, dy, transA=1 - trans_a, alpha=alpha)
    )
    if node.input(2) is None:
        return [da, db]
    return [da, db, node.unbroadcast(dy if beta == 1 else dy * beta, 2)]
