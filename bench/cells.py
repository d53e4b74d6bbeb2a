"""What is measured: the workloads of each kind of operator, in each dtype."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench import step_forms
from opgrad.contract import FLOATS, Operator, Shape
from opgrad.ops import graph_operators, operators

DTYPES = ("float32", "bfloat16", "float16")
UNASKED = "float64"  # what is measured only if it is asked for
PLAIN, GRAPH, LOSSES, ATTENTION = GROUPS = ("plain", "graph", "losses", "attention")
STEPS = (LOSSES, ATTENTION)  # groups of functions on PyTorch's tensors

SWEEP = "sweep"  # the group of the cells of bench/sweep.py, which are measured by themselves


@dataclass(frozen=True)
class Workload:
    """A shape with what belongs to it. `headline`: in the short table; `quick`: measured by `--quick`.

    Those of the group "graph" are the large examples of an operator of training graphs; `example`: which of them.
    Those of "losses" and "attention" are steps in PyTorch: `form` is one of bench/step_forms.py; a linear layer's shape
    has the tokens, classes and hidden features, attention's the batch, heads, heads of keys if these are fewer, length
    and size of a head.
    dtypes: those that it is measured in, for another group than "plain".
    """

    shape: Shape
    attributes: Mapping[str, Any] = field(default_factory=dict)
    indices: int = 0
    equal: bool = False
    headline: bool = False
    quick: bool = False
    group: str = PLAIN
    form: str = ""
    dtypes: tuple[str, ...] = ()
    example: int = 0

    @property
    def label(self) -> str:
        """The workload as tables write it."""
        parts = ["x".join(map(str, self.shape))]
        parts += [f"{name} {value}" for name, value in self.attributes.items()]
        parts += [self.form] if self.form else []
        parts += [f"{self.indices} indices"] if self.indices else []
        parts += [f"example {self.example}"] if self.example else []
        return ", ".join([each for each in parts if each] + ["all equal"] * self.equal)


ELEMENTS = (
    Workload((1 << 24,), headline=True),
    Workload((1 << 20,), quick=True),
    Workload((1000,)),
)
ROWS = (
    Workload((32768, 128), headline=True, quick=True),
    Workload((4096, 1000), headline=True),
    Workload((4096, 1001)),
    Workload((2048, 32000), headline=True),
    Workload((64, 32000)),
    Workload((16, 1000, 56, 56), {"axis": 1}, headline=True),
    Workload((1000, 4096), {"axis": 0}),
    Workload((100000, 10)),
    Workload((100, 10)),
    Workload((1, 1000)),
)
CLASSES = (
    Workload((4096, 1000), headline=True, quick=True),
    Workload((2048, 32000), headline=True),
    Workload((100000, 10)),
    Workload((16, 21, 128, 128)),
    Workload((100, 10)),
)
SLICES = (
    Workload((50257, 768), indices=8192, headline=True),
    Workload((1000, 256), indices=65536, headline=True, quick=True),
    Workload((1000, 256), indices=65536, equal=True, headline=True),
)


EXAMPLE = Workload((), group=GRAPH, quick=True)
MORE_EXAMPLES = {"conv_grad": 3}  # of the operators that have more than one large example


# --- steps in PyTorch ------------------------------------------------------------------------------------------------


def _forms(group: str, forms: Sequence[str], shapes: Sequence[Shape]) -> list[Workload]:
    """The first of them is quick."""
    found = [(shape, form) for shape in shapes for form in forms]
    return [
        Workload(shape, group=group, form=form, dtypes=STEP_DTYPES, quick=number == 0)
        for number, (shape, form) in enumerate(found)
    ]


STEP_DTYPES = ("float32", "bfloat16")
LOGITS_FORMS = [
    replace(workload, shape=step_forms.SHAPES.get(workload.form, workload.shape))
    for workload in _forms(LOSSES, list(step_forms.FORMS), ((512, 32000),))
]
LAYERS = _forms(LOSSES, [""], tuple((512, 32000, hidden) for hidden in (64, 256, 512, 1024)))
ONE_LAYER = LAYERS[1:2]
ATTENTIONS = _forms(ATTENTION, list(step_forms.ATTENTION_FORMS), step_forms.ATTENTION_SHAPES)

Workloads = Mapping[str, Sequence[Workload]]  # by kind of operator, or by the name of a step
WORKLOADS: Workloads = {
    "elements": ELEMENTS,
    "rows": ROWS,
    "classes": CLASSES,
    "slices": SLICES,
    step_forms.LOGITS: LOGITS_FORMS,
    step_forms.LINEAR: LAYERS,
    step_forms.DIVERGENCE: ONE_LAYER,
    step_forms.LOG_PROBABILITY: ONE_LAYER,
    step_forms.ATTENTION: ATTENTIONS,
}


@dataclass(frozen=True)
class Cell:
    """One operator on one workload in one dtype."""

    op: Operator
    workload: Workload
    dtype: str

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.op.name, self.workload.label, self.dtype)))

    @property
    def known(self) -> dict[str, Any]:
        """How a result file names the cell."""
        return {"operator": self.op.name, "workload": self.workload.label, "dtype": self.dtype}


def select(
    ops: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[str],
    quick: bool,
    workloads: Workloads = WORKLOADS,
    groups: Sequence[str] = (),
) -> list[Cell]:
    """The cells of these operators, dtypes, shapes and groups; an empty sequence means the default.

    A shape such as "4096x1000" that no workload has is added to all operators that take it. Examples and steps have
    their own shapes and dtypes, of which those asked for are left.

    Raises ValueError for a name that is not known.
    """
    others = {**graph_operators(), **step_forms.functions()} if workloads is WORKLOADS else {}
    declared = {**operators(), **others}
    _check("operator", ops, declared)
    _check("group", groups, GROUPS)
    check_dtypes(dtypes)
    asked = list(map(_shape, shapes))
    return [
        Cell(op, workload, dtype)
        for op in [declared[name] for name in ops or declared]
        for table in [_table(op, workloads)]
        for workload in (_of_shapes(op, table, asked) if asked else table)
        if (not groups or workload.group in groups) and (asked or workload.quick or not quick)
        for dtype in _dtypes(workload, dtypes, quick)
    ]


def _table(op: Operator, workloads: Workloads) -> Sequence[Workload]:
    """The plain workloads of an operator; those of a step; or the examples that there are."""
    return workloads[op.kind] if op.name in operators() else workloads.get(op.name) or _examples(op)


def _examples(op: Operator) -> list[Workload]:
    """The large examples of an operator of training graphs, the first of them quick, in the dtypes that it takes."""
    floats = {name for tensor in op.inputs.values() for name in tensor.dtypes}
    dtypes = tuple(dtype for dtype in (*DTYPES, UNASKED) if dtype in floats)
    count = 1 + MORE_EXAMPLES.get(op.name, 0)
    return [replace(EXAMPLE, example=number, quick=number == 0, dtypes=dtypes) for number in range(count)]


def _of_shapes(op: Operator, table: Sequence[Workload], shapes: Sequence[Shape]) -> Iterator[Workload]:
    """The workloads of these shapes; plain ones, layers and attention also of shapes that the table lacks."""
    for shape in shapes:
        known = [workload for workload in table if workload.shape == shape]
        yield from known
        if not known and step_forms.takes(op.name, shape):
            yield from (replace(form, shape=shape) for form in {each.form: each for each in table}.values())
        elif not known and table and table[0].group == PLAIN and len(shape) in next(iter(op.inputs.values())).ranks:
            yield Workload(shape, indices=shape[0] if op.kind == "slices" else 0)


def _dtypes(workload: Workload, dtypes: Sequence[str], quick: bool) -> Sequence[str]:
    """Those asked for, of a workload's own where it has any."""
    if workload.group == PLAIN:
        return dtypes or DTYPES
    found = [each for each in workload.dtypes if (each in dtypes if dtypes else each != UNASKED)]
    return found[:1] if quick else found


def check_dtypes(dtypes: Sequence[str]) -> None:
    """Raise ValueError for a dtype that is not known."""
    _check("dtype", dtypes, FLOATS)


def _check(what: str, names: Sequence[str], known: Sequence[str] | Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"bench: {what} is {name!r}, expected one of {', '.join(known)}")


def _shape(text: str) -> Shape:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"bench: shape is {text!r}, expected sizes such as 4096x1000")
    return tuple(map(int, sizes))
