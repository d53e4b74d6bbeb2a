"""Calls operators' CUDA kernels with NumPy arrays: on a GPU if there is one, else in Triton's interpreter, or compiled
and executed from their PTX (OPGRAD_PTX=90, an architecture).

In the interpreter and from PTX every array that a call makes, results and working memory alike, lies between bytes that
must stay as they were. The interpreter takes milliseconds for a program, and compiling a kernel as long, so that a test
has a share of its cases there: every operator in one dtype, another in another test. On a GPU, and with
OPGRAD_GATE=full, it has all of them: 5,600 kernels, an hour of compiling. With OPGRAD_GATE=share a GPU has the share.
"""

import ctypes
import dataclasses
import functools
import inspect
import json
import math
import os
import zlib
from contextlib import contextmanager

import numpy as np
import pytest
from accuracy import assert_close
from cuda_gate import FULL
from guards import LAYOUTS, Placed, c_order, every_second, fortran, gapped, permuted
from ptx import driver
from samples import bits, several

import opgrad
from opgrad.call import arrays, owners
from opgrad.call.libraries.device import Runners
from opgrad.contract import DTYPES, FLOATS, Spec, arrangement
from opgrad.contract.signature import prepare
from opgrad.cuda import ALIGNMENT
from opgrad.ops import operators

PUBLIC = {name: getattr(opgrad, name) for name in operators()}
FROM_PTX = int(os.environ.get("OPGRAD_PTX", "0"))  # the architecture that is compiled for
RECORD = os.environ.get("OPGRAD_PTX_RECORD")  # a file of what was executed
ON_GPU = os.environ.get("TRITON_INTERPRET", "0") == "0" and not FROM_PTX
EVERYTHING = FULL or (ON_GPU and os.environ.get("OPGRAD_GATE") != "share")
# Of operators that run the same kernels with another formula, those whose formulas take most arguments.
OWN_KERNELS = (
    "softmax", "log_softmax_grad", "softmax_cross_entropy_loss_and_grad", "softmax_cross_entropy_loss_grad",
    "leaky_relu", "quick_gelu_grad", "scale", "gather", "gather_grad",
)  # fmt: skip


def has_kernel(op):
    try:
        return op.kernel("opgrad.cuda") is not None
    except NotImplementedError:
        return False


def for_kernels(wanted=lambda op: True, dtypes=FLOATS):
    """Run a test for the operators that have a CUDA kernel and of which `wanted` holds, and in their dtypes."""
    chosen = [op for op in operators().values() if has_kernel(op) and wanted(op)]

    def decorate(test):
        if "dtype" not in inspect.signature(test).parameters:
            return pytest.mark.parametrize("op", chosen, ids=[op.name for op in chosen])(test)
        pairs = [
            (op, dtype) for place, op in enumerate(chosen) for dtype in some(dtypes, test.__name__, len(dtypes), place)
        ]
        ids = [f"{op.name}-{dtype}" for op, dtype in pairs]
        return pytest.mark.parametrize(("op", "dtype"), pairs, ids=ids)(test)

    return decorate


def has_own_kernels(op):
    """Whether an operator is to run in tests of what does not depend on formulas."""
    return EVERYTHING or op.name in OWN_KERNELS


def some(cases, key, one_in, place=0):
    """One in so many cases of a test, others for another key and the next place; or all of them."""
    first = (zlib.crc32(key.encode()) + place) % one_in
    return list(cases) if EVERYTHING else list(cases)[first::one_in]


def call(op, arguments, **more):
    """The results of the CUDA kernels as a tuple of NumPy arrays; arrays in `out` are written and returned."""
    given = {**arguments, **more}
    return several(_on_gpu(op, given) if ON_GPU else _on_host(op, given))


def public(name, *args, **kwargs):
    """What the public function returns, in any form of the call, computed by the CUDA kernels."""
    op = operators()[name]
    given = dict(zip(inspect.signature(op.reference).parameters, args, strict=False)) | kwargs
    return _on_gpu(op, given) if ON_GPU else _on_host(*arrays.expanded(op, given))


def check(op, arguments, note="", **more):
    """Call the kernels, hold the results against the reference, and make sure that no argument was changed."""
    before = {name: bits(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    given = {**arguments, **more}
    results = call(op, arguments, **more)
    for name, content in before.items():
        assert bits(arguments[name]) == content, f"{name} changed {note}"
    used = assert_close(op, arguments, results, note)
    if RECORD and FROM_PTX:
        _record(op, program(op, given).regime, used)
    return results


def _record(op, regime, used):
    """Add a line to the file of what was executed: launches, checked accesses, the share of the tolerance."""
    launches = list(_device.launches)
    _device.launches.clear()
    line = [op.name, regime, FROM_PTX, len(launches), sum(each.checked for each in launches), used]
    with open(RECORD, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def program(op, arguments, **more):
    """The program that a call runs."""
    given = {**arguments, **more}
    specs = [None if given.get(name) is None else _memory.spec(given[name]) for name in op.inputs]
    attributes = {name: value for name, value in given.items() if name in op.attributes}
    return op.kernel("opgrad.cuda")(prepare(op, specs, attributes, any_stride=True))


def address(array):
    """Where an array lies that a stand-in for a library lends to kernels."""
    if FROM_PTX:
        _device.lend(array, "array")
    return array.ctypes.data


def forget():
    """Make new plans for all calls from here on, after a change of what decides about regimes."""
    _runners.kept.values.clear()
    if ON_GPU:
        from opgrad.call.libraries import torch_tensors

        torch_tensors._cuda.kept.values.clear()


# --- in the interpreter, and from PTX --------------------------------------------------------------------------------


def _patch_once():
    """Let the interpreter prepare Triton's language once, not for every call of a function: half of all its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    prepare, prepared, modules = interpreter._patch_lang, set(), set()

    def patch(function):
        module = function.__globals__["__name__"]
        if module not in modules:
            languages = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
            if not languages <= prepared:
                prepare(function)
                prepared.update(languages)
            modules.add(module)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = patch


def _fuse():
    """Let the interpreter's fma round once, as the hardware's does: float32 products are exact in float64."""
    from triton.runtime import interpreter

    def fma(self, x, y, z):
        wide = np.longdouble if z.data.dtype == np.float64 else np.float64
        exact = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype)

    interpreter.InterpreterBuilder.create_fma = fma


def _convert():
    """Let the interpreter convert bfloat16 as the hardware does: to the nearest, where it rounds towards 0, and
    denormals too, of which it makes something else."""
    import triton.language as tl
    from triton.runtime import interpreter

    cast, bfloat16 = interpreter.InterpreterBuilder.cast_impl, DTYPES["bfloat16"]

    def convert(self, source, dtype):
        kinds = source.dtype.scalar, dtype.scalar
        if kinds == (tl.float32, tl.bfloat16):
            data = source.data.astype(bfloat16).view(np.uint16)
        elif kinds == (tl.bfloat16, tl.float32):
            data = source.data.view(bfloat16).astype(np.float32)
        else:
            return cast(self, source, dtype)
        return interpreter.TensorHandle(data, dtype.scalar)

    interpreter.InterpreterBuilder.cast_impl = convert


if not ON_GPU and not FROM_PTX:
    _patch_once()
    _fuse()
    _convert()


class _Memory:
    """NumPy arrays as `opgrad.call.owners.Memory` has them on a device."""

    def __init__(self):
        self.made = []

    def key(self, array):
        return array.shape, array.strides, array.dtype, array.ctypes.data % ALIGNMENT

    def spec(self, array):
        return Spec(array.shape, array.dtype, array.strides)

    def address(self, array):
        return array.ctypes.data

    def strides(self, spec, order, model):
        return arrangement.contiguous(spec.shape, order, spec.dtype.itemsize)

    def maker(self, spec, like):
        def make():
            guard = Placed((spec.dtype.itemsize * math.prod(spec.shape),), "bool")
            self.made.append(guard)
            array = np.ndarray(spec.shape, spec.dtype, guard.array, 0, spec.strides)
            if FROM_PTX:
                _device.lend(guard.array, f"result {len(self.made)}", written=False)
            return array

        return make

    def packed(self, array, order):
        spec = self.spec(array)
        copy = self.maker(Spec(spec.shape, spec.dtype, self.strides(spec, order, array)), array)()
        copy[...] = array
        if FROM_PTX:
            _device.lend(copy, "copy")
        return copy

    def assign(self, destination, source):
        destination[...] = source

    def words(self, array):
        position, value = array[:16].view(np.int64).tolist()
        return position, value

    def stream(self, like):
        return None


_device = driver.start(FROM_PTX) if FROM_PTX else None
_memory = _Memory()
_runners = Runners(_memory, lambda op, given: given)  # whose arrays these may be is another test's matter


def _on_host(op, given):
    _memory.made.clear()
    if FROM_PTX:
        _device.take_back()
        for name, array in owners.arrays_of(op, given).items():
            _device.lend(array, name)
    with np.errstate(all="ignore"):
        results = _runners.run(op, given)
    assert all(made.untouched() for made in _memory.made), f"{op.name} wrote outside of its memory"
    return results


# --- on a GPU ------------------------------------------------------------------------------------------------------


def _on_gpu(op, given, device="cuda"):
    out = given.get("out")
    outputs = () if out is None else out if isinstance(out, tuple) else (out,)
    uploads = _Uploads(device)
    inputs = {name: value for name, value in given.items() if name != "out"}
    arguments = owners.over_arrays(op, inputs, lambda _, array: uploads.tensor(np.asarray(array)))
    tensors = tuple(uploads.tensor(each, written=True) for each in outputs)
    if outputs:
        arguments["out"] = tensors if isinstance(out, tuple) else tensors[0]
    results = PUBLIC[op.name](**arguments) if op.name in PUBLIC else owners.run(op, arguments)
    if not outputs:
        return tuple(map(_array, results)) if isinstance(results, tuple) else _array(results)
    uploads.fetch()
    for array, tensor in zip(outputs, tensors, strict=True):
        array[...] = _array(tensor)
    return out


class _Uploads:
    """The arrays of a call as tensors; views of one array become views of one tensor, with all that lies around."""

    def __init__(self, device):
        self.device, self.memories, self.written = device, {}, set()

    def tensor(self, array, written=False):
        import torch

        if min(array.strides, default=0) < 0:  # tensors have none
            array = np.ascontiguousarray(array)
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        content = self._upload(owner)
        self.written |= {owner.ctypes.data} if written else set()
        offset, rest = divmod(array.ctypes.data - owner.ctypes.data, array.itemsize)
        assert not rest, "tensors cannot be misaligned"
        strides = [stride // array.itemsize for stride in array.strides]
        tensor = torch.empty(0, dtype=getattr(torch, array.dtype.name), device=self.device)
        return tensor.set_(content.untyped_storage(), offset, array.shape, strides)

    def _upload(self, owner):
        import torch

        place = owner.ctypes.data
        if place not in self.memories:
            content = torch.frombuffer(bytearray(_content(owner) or b"0"), dtype=torch.uint8)
            self.memories[place] = owner, content.to(self.device)
        return self.memories[place][1]

    def fetch(self):
        """Bring back the memory that was to be written, and make sure that no other has changed."""
        for place, (owner, tensor) in self.memories.items():
            content = bytes(tensor.cpu().numpy())[: owner.nbytes]
            if place in self.written:
                ctypes.memmove(place, content, len(content))
            else:
                assert content == _content(owner), "an argument was changed"


def _content(owner):
    return ctypes.string_at(owner.ctypes.data, owner.nbytes)


def _array(tensor):
    import torch

    host = tensor.cpu()
    dtype = DTYPES[str(host.dtype).removeprefix("torch.")]
    bits = {torch.bfloat16: torch.int16, torch.float8_e5m2: torch.uint8, torch.float8_e4m3fn: torch.uint8}
    return host.view(bits.get(host.dtype, host.dtype)).numpy().view(dtype)


NAMES = ("softmax", "log_softmax")
GRADIENTS = ("softmax_grad", "log_softmax_grad")
# Tensors have no negative strides, nor any that are no multiple of an element.
WAYS = [c_order, fortran, permuted, gapped, every_second] if ON_GPU else list(LAYOUTS)
names = pytest.mark.parametrize("name", NAMES)
gradients = pytest.mark.parametrize("name", GRADIENTS)


def call_kernels(monkeypatch):
    """Let the public functions call the CUDA kernels."""
    for name in (*NAMES, *GRADIENTS):
        monkeypatch.setattr(opgrad, name, functools.partial(public, name))


@contextmanager
def limits(clusters=None, **lowered):
    """Meanwhile the limits between regimes are others, and devices have clusters or not."""
    from opgrad.cuda import regimes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regimes, "LIMITS", dataclasses.replace(regimes.RegisterLimits(), **lowered))
        if clusters is not None:
            patch.setattr(regimes, "clusters", lambda: clusters)
        forget()
        yield
    forget()
