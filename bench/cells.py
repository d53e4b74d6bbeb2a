"""What is measured: the workloads of each kind of operator, in each dtype, and of losses and attention in PyTorch."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from opgrad.contract import FLOATS, Operator, Shape
from opgrad.ops import graph_operators, operators
from opgrad.ops.reference.attending import LARGEST_HEAD

LOGITS, LINEAR, DIVERGENCE, LOG_PROBABILITY = LOSS_FUNCTIONS = (
    "cross_entropy", "linear_cross_entropy", "linear_jsd", "linear_log_prob",
)  # fmt: skip
ATTENTION_FUNCTION = "scaled_dot_product_attention"

# `weight`, `ignored` and `probabilities` stand for tensors that the case makes, `entropy` for its share of the loss.
FORMS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "weight": {"weight": True},
    "half ignored": {"ignored": True},
    "z-loss": {"lse_square_scale": 1e-4},
    "softcap": {"softcap": 30.0},
    "temperature": {"temperature": 1.5},
    "shift": {"shift": 1},
    "num_items": {"num_items": 500},
    "probabilities": {"probabilities": True},
    "entropy": {"entropy": 0.01},
    "all": {
        "label_smoothing": 0.1, "weight": True, "ignored": True, "lse_square_scale": 1e-4, "softcap": 30.0,
        "temperature": 1.5, "shift": 1, "num_items": 500, "entropy": 0.01,
    },
    "of pixels": {},
    "of pixels, half ignored": {"ignored": True},
    "of pixels, weight": {"weight": True},
    "of patches": {},
}  # fmt: skip


# Classes along axis 1, with planes behind them: those forms have shapes of their own.
OF_PIXELS = (16, 21, 128, 128)
SHAPES: Mapping[str, Shape] = {
    **dict.fromkeys(("of pixels", "of pixels, half ignored", "of pixels, weight"), OF_PIXELS),
    "of patches": (8, 1000, 14, 14),
}


# Whether gradients are computed; in causal forms a query sees the keys up to its own place alone.
ATTENTION_FORMS = {"forward": False, "forward, causal": False, "with backward": True, "with backward, causal": True}
ATTENTION_SHAPES: tuple[Shape, ...] = ((4, 12, 512, 64), (1, 32, 2048, 64), (1, 8, 2, 4096, 128))


def takes(name: str, shape: Shape) -> bool:
    """Whether such a function is defined for a shape that no workload has; of losses, a linear layer's alone are."""
    if name in LOSS_FUNCTIONS:
        return name != LOGITS and len(shape) == 3
    if name != ATTENTION_FUNCTION or len(shape) not in (4, 5):
        return False
    heads, of_keys = shape[1], shape[-3]
    return heads % of_keys == 0 and shape[-1] <= LARGEST_HEAD


def functions() -> dict[str, Operator]:
    """The functions as cells name them: what they declare beside the name is that of the operators they call."""
    losses = {name: replace(operators()["softmax_cross_entropy_loss_and_grad"], name=name) for name in LOSS_FUNCTIONS}
    return {**losses, ATTENTION_FUNCTION: replace(graph_operators()["attention"], name=ATTENTION_FUNCTION)}


DTYPES = ("float32", "bfloat16", "float16")
UNASKED = "float64"  # what is measured only if it is asked for
PLAIN, GRAPH, LOSSES, ATTENTION = GROUPS = ("plain", "graph", "losses", "attention")
STEPS = (LOSSES, ATTENTION)  # groups of functions on PyTorch's tensors

SWEEP = "sweep"  # the group of the cells of bench/sweep.py, which are measured by themselves


@dataclass(frozen=True)
class Workload:
    """A shape with what belongs to it. `headline`: in the short table; `quick`: measured by `--quick`.

    Those of the group "graph" are the large examples of an operator of training graphs; `example`: which of them.
    Those of "losses" and "attention" are steps in PyTorch: `form` is one of `FORMS`; a linear layer's shape
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


@cache
def large_cases(name: str) -> Sequence[Any]:
    """The cases of an operator of training graphs, of which `opgrad.cli.examples` makes the large examples."""

    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    text = Path(__file__).with_name("large.json").read_text(encoding="utf-8")
    found = json.loads(text, object_hook=lambda each: {name: tuples(value) for name, value in each.items()})
    return next(cases for names, cases in found.items() if name in names.split())


# --- steps in PyTorch ------------------------------------------------------------------------------------------------


STEP_DTYPES = ("float32", "bfloat16")


def _forms(group: str, forms: Iterable[str], shapes: Sequence[Shape]) -> list[Workload]:
    """The first of them is quick."""
    found = [(SHAPES.get(form, shape), form) for shape in shapes for form in forms]
    steps = [Workload(shape, group=group, form=form, dtypes=STEP_DTYPES) for shape, form in found]
    return [replace(steps[0], quick=True), *steps[1:]]


LAYERS = _forms(LOSSES, [""], tuple((512, 32000, hidden) for hidden in (64, 256, 512, 1024)))
Workloads = Mapping[str, Sequence[Workload]]  # by kind of operator, or by the name of a step
WORKLOADS: Workloads = {
    "elements": ELEMENTS,
    "rows": ROWS,
    "classes": CLASSES,
    "slices": SLICES,
    LOGITS: _forms(LOSSES, FORMS, ((512, 32000),)),
    LINEAR: LAYERS,
    DIVERGENCE: LAYERS[1:2],
    LOG_PROBABILITY: LAYERS[1:2],
    ATTENTION_FUNCTION: _forms(ATTENTION, ATTENTION_FORMS, ATTENTION_SHAPES),
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
    others = {**graph_operators(), **functions()} if workloads is WORKLOADS else {}
    declared = {**operators(), **others}
    for what, names, known in (("operator", ops, declared), ("group", groups, GROUPS), ("dtype", dtypes, FLOATS)):
        check(what, names, known)
    asked = list(map(_shape, shapes))
    return [
        Cell(op, workload, dtype)
        for op in [declared[name] for name in ops or declared]
        for table in [workloads[op.kind] if op.name in operators() else workloads.get(op.name) or _examples(op)]
        for workload in (_of_shapes(op, table, asked) if asked else table)
        if (not groups or workload.group in groups) and (asked or workload.quick or not quick)
        for dtype in _dtypes(workload, dtypes, quick)
    ]


def _examples(op: Operator) -> list[Workload]:
    """The large examples of an operator of training graphs, the first of them quick, in the dtypes that it takes."""
    floats = {name for tensor in op.inputs.values() for name in tensor.dtypes}
    dtypes = tuple(dtype for dtype in (*DTYPES, UNASKED) if dtype in floats)
    count = len(large_cases(op.name))
    return [Workload((), group=GRAPH, quick=not i, dtypes=dtypes, example=i) for i in range(count)]


def _of_shapes(op: Operator, table: Sequence[Workload], shapes: Sequence[Shape]) -> Iterator[Workload]:
    """The workloads of these shapes; plain ones, layers and attention also of shapes that the table lacks."""
    for shape in shapes:
        known = [workload for workload in table if workload.shape == shape]
        yield from known
        if not known and takes(op.name, shape):
            yield from (replace(form, shape=shape) for form in {each.form: each for each in table}.values())
        elif not known and table and table[0].group == PLAIN and len(shape) in next(iter(op.inputs.values())).ranks:
            yield Workload(shape, indices=shape[0] if op.kind == "slices" else 0)


def _dtypes(workload: Workload, dtypes: Sequence[str], quick: bool) -> Sequence[str]:
    """Those asked for, of a workload's own where it has any."""
    if workload.group == PLAIN:
        return dtypes or DTYPES
    found = [each for each in workload.dtypes if (each in dtypes if dtypes else each != UNASKED)]
    return found[:1] if quick else found


def check(what: str, names: Iterable[str], known: Iterable[str], of: str = "one of") -> None:
    """Raise ValueError for a name that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(f"bench: {what} is {name!r}, expected {of} {', '.join(known)}")


def _shape(text: str) -> Shape:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"bench: shape is {text!r}, expected sizes such as 4096x1000")
    return tuple(map(int, sizes))
