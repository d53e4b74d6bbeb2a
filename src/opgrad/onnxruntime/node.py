"""A node of a session: its attributes, its inputs and outputs, and its plans in the form that `compute` reads."""

import contextlib
import ctypes
import itertools
import math
import threading
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from opgrad.base.locks import settling
from opgrad.contract import DTYPES, FLOATS, NEEDS, Shape, Spec, only, spread
from opgrad.cpu.compiler.words import at, several, words
from opgrad.cpu.plans import KeyedPlan, Plan, plan
from opgrad.cpu.runtime import pool
from opgrad.cpu.runtime.plan import REPORT
from opgrad.cuda import driver
from opgrad.cuda.without_triton import importing
from opgrad.onnxruntime import abi, compute
from opgrad.onnxruntime.abi import Api, forever
from opgrad.onnxruntime.overloads import OUTPUT_TYPES, VALUE, Overload, Port, model_of
from opgrad.onnxruntime.private import is_missing

LONGEST_STRING = 256
LONGEST_LIST = 256
SPATIAL = 2  # the axes behind image and channel begin here
UNKNOWN = -1  # a size that the graph does not fix
IGNORED_BY_DEFAULT = -1  # the label that the original kernels ignore when a node does not say


def read_attributes(api: Api, info: int, overload: Overload) -> tuple[dict[str, Any], int, int]:
    """The operator's attributes, and the numbers of inputs and outputs. Raises ValueError for an invalid attribute.

    `info` is the OrtKernelInfo of the node.
    """
    for name in overload.onnx.unread:  # lists of text, which onnxruntime gives out to nobody
        text, size = ctypes.create_string_buffer(LONGEST_STRING), ctypes.c_size_t(LONGEST_STRING)
        try:
            given = _read(api, abi.KERNEL_INFO_GET_STRING, info, name, text, ctypes.byref(size))
        except RuntimeError:  # it has the attribute, of another type
            given = True
        if given:
            raise NotImplementedError(f"{overload.onnx.name}: the node has the attribute {name}, expected none")
    found = {name: _attribute(api, info, overload, name) for name in overload.onnx.attributes}
    if "ignore_index" in overload.operator.attributes:
        found.setdefault("ignore_index", IGNORED_BY_DEFAULT)
    inputs = api.word(abi.KERNEL_INFO_GET_INPUT_COUNT, info)
    outputs = api.word(abi.KERNEL_INFO_GET_OUTPUT_COUNT, info)
    needed = sum(not port.optional for port in overload.outputs)
    if outputs < needed:
        raise ValueError(f"{overload.onnx.name}: the node has {outputs} outputs, expected {needed}")
    for name in set(OUTPUT_TYPES).intersection(found):
        found["out_dtype"] = _out_dtype(overload, name, found.pop(name))
        for i in range(outputs):
            with declaration(api, info, i) as tensor:
                number = api.word(abi.GET_TENSOR_ELEMENT_TYPE, tensor)
            declared = abi.DTYPES.get(number, f"ONNX type {number}")
            if declared != found["out_dtype"]:
                what = f"{overload.onnx.name}: {overload.outputs[min(i, len(overload.outputs) - 1)].parameter}"
                raise ValueError(
                    f"{what} is declared as {declared}, expected {found['out_dtype']}, as output_type or the input says"
                )
    general = overload.operator.general
    if general is not None and NEEDS in general.keywords:
        names = zip(overload.outputs, range(outputs), strict=False)
        found[NEEDS] = tuple(
            port.parameter for port, i in names if is_given(api, info, i, abi.KERNEL_INFO_GET_OUTPUT_NAME)
        )
    if overload.onnx.shape_of:
        index = next(i for i, port in enumerate(overload.inputs) if port.parameter == "shape")
        if index >= inputs or not is_given(api, info, index):
            found["shape"] = _declared_shape(api, info, overload)
    return found, inputs, outputs


def _read(api: Api, entry: int, info: int, name: str, *arguments: Any) -> bool:
    """Read an attribute into the arguments; False if the node has none of this name. Raises RuntimeError."""
    try:
        api.check(entry, info, name.encode(), *arguments)
    except RuntimeError as error:
        if is_missing(error, name, lambda other: api.check(entry, info, other.encode(), *arguments)):
            return False
        raise
    return True


def _attribute(api: Api, info: int, overload: Overload, name: str) -> Any:
    """The value of an attribute, by the type of its default (None: by that of the operator's), or the default."""
    default = overload.onnx.attributes[name]
    if isinstance(default, tuple):
        return _integers(api, info, overload, name)
    is_float = isinstance(default, float) or (default is None and overload.operator.types.get(name) == float | None)
    value: Any = ctypes.c_float() if is_float else ctypes.c_int64()
    entry = abi.KERNEL_INFO_GET_FLOAT if is_float else abi.KERNEL_INFO_GET_INT64
    arguments = [ctypes.byref(value)]
    if isinstance(default, str):
        value, entry = ctypes.create_string_buffer(LONGEST_STRING), abi.KERNEL_INFO_GET_STRING
        arguments = [value, ctypes.byref(ctypes.c_size_t(LONGEST_STRING))]
    try:
        if not _read(api, entry, info, name, *arguments):
            return default
    except RuntimeError as error:
        raise ValueError(f"{overload.onnx.name}: attribute {name}: {error}") from None
    return value.value.decode() if isinstance(default, str) else value.value


def _integers(api: Api, info: int, overload: Overload, name: str) -> tuple[int, ...]:
    """The value of an attribute that is a list of integers, or the default."""
    count, value = ctypes.c_size_t(0), (ctypes.c_int64 * LONGEST_LIST)()
    try:
        # Called without memory for the result, onnxruntime returns the number of elements.
        if not _read(api, abi.KERNEL_INFO_GET_INT64_ARRAY, info, name, 0, ctypes.byref(count)):
            return tuple(overload.onnx.attributes[name])
        if count.value > LONGEST_LIST:
            raise ValueError(
                f"{overload.onnx.name}: attribute {name} has {count.value} entries, expected at most {LONGEST_LIST}"
            )
        api.check(abi.KERNEL_INFO_GET_INT64_ARRAY, info, name.encode(), value, ctypes.byref(count))
    except RuntimeError as error:
        raise ValueError(f"{overload.onnx.name}: attribute {name}: {error}") from None
    return tuple(value[: count.value])


def _out_dtype(overload: Overload, name: str, number: int | None) -> str:
    """The dtype that an attribute names; without the attribute that of the input which determines the result's."""
    if number is None:
        model = model_of(overload.operator, next(iter(overload.operator.results)))
        return next(port.dtype for port in overload.inputs if port.parameter == model)
    dtype = abi.DTYPES.get(number)
    if dtype not in FLOATS:
        numbers = ", ".join(f"{abi.ELEMENT_TYPES[name]} ({name})" for name in FLOATS)
        raise ValueError(f"{overload.onnx.name}: {name} is {number}, expected one of {numbers}")
    return dtype


def is_given(api: Api, info: int, i: int, entry: int = abi.KERNEL_INFO_GET_INPUT_NAME) -> bool:
    """Whether the node has input i, or output i with its `entry`; what it leaves out has an empty name."""
    # Asked with no memory, onnxruntime says how long the name is, its end included.
    return api.word(entry, info, i, 0) > 1


def shape_of(api: Api, tensor: int) -> tuple[int, ...]:
    """The shape in an OrtTensorTypeAndShapeInfo."""
    sizes = (ctypes.c_int64 * api.word(abi.GET_DIMENSIONS_COUNT, tensor))()
    api.check(abi.GET_DIMENSIONS, tensor, sizes, len(sizes))
    return tuple(sizes)


def _declared_shape(api: Api, info: int, overload: Overload) -> tuple[int, ...]:
    """The shape that the graph declares for the output whose shape is an attribute; UNKNOWN for images and channels.

    Those are dy's. ValueError unless the graph gives all other sizes as numbers.
    """
    name = overload.onnx.shape_of
    index = next(i for i, port in enumerate(overload.outputs) if port.parameter == name)
    with declaration(api, info, index) as tensor:
        sizes = shape_of(api, tensor)
    what = f"{overload.onnx.name}: {name}"
    if not sizes:
        raise ValueError(
            f"{what} has no declared shape, expected one: add a value_info entry for it, or the input shape"
        )
    if any(size < 0 for size in sizes[SPATIAL:]):
        shape = ", ".join("?" if size < 0 else str(size) for size in sizes)
        raise ValueError(
            f"{what} is declared with shape ({shape}), expected numbers from axis {SPATIAL} on, or the input shape"
        )
    return (UNKNOWN,) * min(SPATIAL, len(sizes)) + sizes[SPATIAL:]


@contextlib.contextmanager
def declaration(api: Api, info: int, i: int, entry: int = abi.KERNEL_INFO_GET_OUTPUT_TYPE_INFO) -> Iterator[int]:
    """The declaration of output i, or of input i with its `entry`, as the address of an OrtTensorTypeAndShapeInfo."""
    kind = api.word(entry, info, i)
    try:
        yield api.word(abi.CAST_TYPE_INFO_TO_TENSOR_INFO, kind)
    finally:
        api.status(abi.RELEASE_TYPE_INFO, kind)


MOST_PLANS = 256  # the most plans that a node keeps; of further ones each thread keeps its last

_nodes: dict[int, "RuntimeNode"] = forever({})  # by address


class RuntimeNode:
    """The Python side of one node of a session; it lives until its session is destroyed."""

    def __init__(
        self,
        api: Api,
        overload: Overload,
        attributes: Mapping[str, Any],
        inputs: int,
        outputs: int,
        natives: Iterable[int],
        device: tuple[int, int] = (0, 0),
    ):
        """`inputs`, `outputs`: how many the node has; `natives`: the functions of a `Node`; device: its last words."""
        self.api = api
        self.overload = overload
        self.attributes = dict(attributes)
        self.needs = self.attributes.pop(NEEDS, None)  # the results to compute, if the operator can leave out others
        self.inputs = _repeated(overload.inputs, inputs)
        if len(self.inputs) > compute.MOST_INPUTS:
            raise ValueError(
                f"{overload.onnx.name}: the node has {inputs} inputs, expected at most {compute.MOST_INPUTS}"
            )
        self.operator = overload.operator
        self.lists: tuple[int, int] | None = None  # the lengths of the lists of arrays among inputs and outputs
        if self.needs:
            self.operator = only(self.operator, tuple(self.needs))
        elif self.operator.general is not None and any(port.several for port in overload.inputs + overload.outputs):
            self.lists = (
                sum(port.several for port in self.inputs),
                sum(port.several for port in _repeated(overload.outputs, outputs)),
            )
            self.operator = spread(self.operator, *self.lists)
        more = len(self.operator.arrays) - len(overload.operator.arrays)  # arrays before the results
        moved = (p if p.operand in compute.SPECIAL else replace(p, operand=p.operand + more) for p in overload.outputs)
        self.outputs = _repeated(tuple(moved), outputs)
        if self.needs:  # an output that the node lacks is never asked for its place
            places = {name: i for i, name in enumerate(self.operator.results, len(self.operator.arrays))}
            first = len(self.operator.arrays)
            self.outputs = tuple(replace(p, operand=places.get(p.parameter, first)) for p in self.outputs)
        self.most_dimensions = compute.dimensions_of(len(self.inputs))
        # An operand's place, or the negative size of the values of an input that is read as an attribute.
        kinds = [-int(DTYPES[p.dtype].itemsize) if p.operand == VALUE else p.operand for p in self.inputs]
        operands = len(self.operator.arrays) + len(self.operator.results)
        self._overwritten = several(compute.Overwritten, _overwritten(overload))
        overwrites = [len(overload.onnx.overwrites), ctypes.addressof(self._overwritten)]
        facts = compute.Node(
            api.address, 0, 0, len(kinds), *overwrites, *natives, operands, self.most_dimensions, *device
        )
        self._words = words([*facts.words, *kinds])
        self._plans: dict[tuple[int, ...], KeyedPlan] = {}
        self._last: dict[int, KeyedPlan] = {}  # by thread
        self.address = ctypes.addressof(self._words)
        self._node = at(compute.Node, self.address)
        for gone in [node for node in list(_nodes.values()) if node._node.closed]:
            _nodes.pop(gone.address, None)
        _nodes[self.address] = self

    def prepare(self, key: tuple[int, ...]) -> KeyedPlan:
        """The plan for a key; TypeError or ValueError if the operator refuses such inputs."""
        last = self._last.get(threading.get_ident())
        if last is not None and last.key == key:
            return last
        return self._plans.get(key) or self._keep(key, self._plan(key))

    def _keep(self, key: tuple[int, ...], plan: Plan) -> KeyedPlan:
        """Put a plan before the others; if there are too many, keep it until this thread needs another one.

        Other threads may be walking through the plans in native code, so no plan is ever removed.
        """
        with settling:
            if key in self._plans:
                return self._plans[key]
            own, *kept = self._outputs(plan)
            keyed = KeyedPlan(plan, key, own, self._node.plans, *kept)
            if len(self._plans) == MOST_PLANS:
                self._last[threading.get_ident()] = keyed
            else:
                self._plans[key] = keyed
                self._node.plans = keyed.address
            return keyed

    def _outputs(self, plan: Plan) -> tuple[compute.Outputs, Any, Any, Any]:
        """What `compute` knows of a plan's outputs, and the blocks to which it points."""
        first, results = len(self.operator.arrays), plan.problem.results
        wanted, spare = [], _aligned(plan.scratch_bytes) if self.overload.on_device else 0
        for port in self.outputs:
            if port.operand == compute.FLAG:
                shape: Shape = (1,)
            elif port.operand in compute.COPIES:
                shape = results[port.parameter].shape
            else:
                shape = [*results.values()][port.operand - first].shape
            wanted += [*compute.Output(port.operand, len(shape)).words, *shape]
        lacking = []
        for operand, (name, result) in enumerate(results.items(), first):
            if name not in self.overload.onnx.overwrites:
                lacking.append(compute.Lacking(operand, spare))
                optional = all(port.optional for port in self.outputs if port.operand == operand)
                spare += _aligned(_bytes(result)) if optional and not self.needs else 0
        overwritten = words(_bytes(results[name]) for name in self.overload.onnx.overwrites)
        kept = overwritten, words(wanted), several(compute.Lacking, lacking)
        sizes, outputs, places = map(ctypes.addressof, kept)
        source = pool.source(spare)
        return compute.Outputs(spare, source, sizes, len(self.outputs), outputs, len(lacking), places), *kept

    def _plan(self, key: tuple[int, ...]) -> Plan:
        if self.overload.on_device:
            with importing():
                from opgrad.onnxruntime.device_plans import plan_on_device
            return plan_on_device(self.operator, *self.signature(key))
        return plan(self.operator, *self.signature(key))

    def check_devices(self, key: tuple[int, ...], operands: int) -> None:
        """Raise ValueError if an input lies elsewhere than on the current device. The key tells which are empty."""
        for i, (name, spec) in enumerate(zip(self.operator.arrays, self.signature(key)[0], strict=True)):
            if spec is not None and all(spec.shape):
                device = driver.device_of(ctypes.c_int64.from_address(operands + 8 * i).value)
                if device != driver.device():
                    where = "no CUDA device" if device is None else f"CUDA device {device}"
                    raise ValueError(
                        f"{self.operator.name}: {name} lies on {where}, expected CUDA device {driver.device()}, which"
                        " runs the session"
                    )

    def signature(self, key: tuple[int, ...]) -> tuple[tuple[Spec | None, ...], dict[str, Any]]:
        """The arrays and the attributes of the operator's call that a key stands for."""
        operator = self.operator
        specs: dict[str, Spec] = {}
        attributes = dict(self.attributes)
        rest = iter(key[1:])
        for port in self.inputs:
            rank = next(rest)
            if rank == compute.ABSENT:
                continue
            if rank > self.most_dimensions:
                what = f"{operator.name}: {port.parameter}"
                raise ValueError(f"{what} has {rank} dimensions, expected at most {self.most_dimensions}")
            shape = tuple(itertools.islice(rest, rank))
            if port.operand == VALUE:
                attributes[port.parameter] = self._value(port, shape, rest)
            else:
                specs[operator.arrays[port.operand]] = Spec(shape, DTYPES[port.dtype])
        if self.overload.onnx.until_13:
            axis, rank = attributes["axis"], len(next(iter(specs.values())).shape)
            if -rank <= axis < rank:  # the operator itself refuses others
                attributes["axis"] = tuple(range(axis % rank, rank))
        if self.overload.onnx.shape_of:
            # The graph may leave the number of images open; it is that of the first array.
            first = next(iter(specs.values())).shape
            attributes["shape"] = (*first[:SPATIAL], *attributes["shape"][SPATIAL:])
        for name, kind in operator.types.items():
            if kind is bool and name in attributes:
                attributes[name] = bool(attributes[name])  # ONNX and the words of a key only have integers
        return tuple(specs.get(name) for name in operator.arrays), attributes

    def _value(self, port: Port, shape: Shape, rest: Iterator[int]) -> Any:
        """An input that is read as an attribute: a tuple where the operator takes one, or one number."""
        elements = math.prod(shape)
        what = f"{self.operator.name}: {port.parameter}"
        if elements > compute.LIMIT:
            raise ValueError(f"{what} has {elements} elements, expected at most {compute.LIMIT}")
        dtype = DTYPES[port.dtype]
        unsigned = np.array(list(itertools.islice(rest, elements)), np.int64).view(np.uint64)
        values = tuple(unsigned.astype(f"u{dtype.itemsize}").view(dtype).tolist())
        hint = self.operator.types[port.parameter] if port.parameter != "shape" else tuple[int, ...]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if any(typing.get_origin(option) is tuple for option in options):
            if len(shape) != 1:
                raise ValueError(f"{what} is an array of shape {shape}, expected one dimension")
            return values
        if elements != 1:
            raise ValueError(f"{what} is an array of shape {shape}, expected one element")
        return values[0]


def _bytes(result: Spec) -> int:
    return math.prod(result.shape) * result.dtype.itemsize


def _aligned(count: int) -> int:
    return -(-count // compute.ALIGNMENT) * compute.ALIGNMENT


def _repeated(ports: tuple[Port, ...], count: int) -> tuple[Port, ...]:
    """So many ports, the last of them repeated if it stands for several."""
    if not ports[-1].several:
        return ports[:count]
    last = len(ports) - 1
    more = [replace(ports[-1], operand=ports[-1].operand + i) for i in range(count - last)]
    return (*ports[:last], *more)


def _overwritten(overload: Overload) -> Iterator[compute.Overwritten]:
    """For each result that is written over an input the operands: its own, the input's, and that of a copy."""
    operator = overload.operator
    for (result, buffer), copy in zip(overload.onnx.overwrites.items(), compute.COPIES, strict=False):
        place = len(operator.arrays) + list(operator.results).index(result)
        yield compute.Overwritten(place, operator.arrays.index(buffer), copy)


def prepare(node: int, key: int, found: int, operands: int) -> int:
    """`compute` calls this for new shapes: write the plan's address to `found`; returns a status.

    operands: the addresses of the inputs.
    """
    this = _nodes[node]
    try:
        count = ctypes.c_int64.from_address(key).value
        words = tuple((ctypes.c_int64 * count).from_address(key))
        if this.overload.on_device:
            this.check_devices(words, operands)
        keyed = this.prepare(words)
        ctypes.c_int64.from_address(found).value = keyed.address
        return 0
    except BaseException as exception:
        return this.api.error(exception)


def refuse(node: int, keyed: int, report: int) -> int:
    """`compute` calls this when a plan has refused its arguments, for lack of memory (0), or for one of the constants
    that stand in place of a report; returns a status."""
    this = _nodes[node]
    try:
        if report == compute.OVERLAPS:
            raise ValueError("an output lies where an input or another output lies, expected memory of its own")
        if report == compute.MISALIGNED:
            raise ValueError(
                f"{this.overload.onnx.name}: an array begins at an address that is no multiple of 16 bytes, expected"
                " whole arrays as onnxruntime allocates them"
            )
        with settling:
            known = itertools.chain(this._plans.values(), this._last.values())
            found = next(each for each in known if each.address == keyed)
        told = list((ctypes.c_int64 * REPORT).from_address(report)) if report else None
        raise found.plan.error(told, more=found.own.spare_bytes)
    except BaseException as exception:
        return this.api.error(exception)
