"""Which axes an operator is tried along."""


def axis_choices(op, rank):
    """Every axis by both names, and tuples of adjacent ones where the operator takes them."""
    if "axis" not in op.attributes:
        return [{}]
    axes = list(range(-rank, rank))
    if op.kind == "rows":
        axes += [(0,), (-1,), (0, 1), (1, 2), (0, 1, 2), (-2, -1), (2, 1)] if rank == 3 else []
    return [{"axis": axis} for axis in axes]
