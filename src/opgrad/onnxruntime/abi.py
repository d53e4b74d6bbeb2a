"""The part of onnxruntime's C interface that is used here: stable since 1.18, only ever appended to."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

VERSION = 17  # the version of the table and of OrtCustomOp: the first one with KernelContext_ParallelFor
NEEDED = "1.18"

# Positions in the table of functions that onnxruntime hands out.
CREATE_STATUS = 0
GET_ERROR_MESSAGE = 2
CREATE_CUSTOM_OP_DOMAIN = 26
CUSTOM_OP_DOMAIN_ADD = 27
ADD_CUSTOM_OP_DOMAIN = 28
GET_TENSOR_MUTABLE_DATA = 51
CAST_TYPE_INFO_TO_TENSOR_INFO = 55
CREATE_TENSOR_TYPE_AND_SHAPE = 57
SET_TENSOR_ELEMENT_TYPE = 58
SET_DIMENSIONS = 59
GET_TENSOR_ELEMENT_TYPE = 60
GET_DIMENSIONS_COUNT = 61
GET_DIMENSIONS = 62
GET_TENSOR_TYPE_AND_SHAPE = 65
KERNEL_INFO_GET_FLOAT = 85
KERNEL_INFO_GET_INT64 = 86
KERNEL_INFO_GET_STRING = 87
KERNEL_CONTEXT_GET_INPUT_COUNT = 88
KERNEL_CONTEXT_GET_INPUT = 90
KERNEL_CONTEXT_GET_OUTPUT = 91
RELEASE_STATUS = 93
RELEASE_TYPE_INFO = 98
RELEASE_TENSOR_TYPE_AND_SHAPE_INFO = 99
RELEASE_ALLOCATOR = 132
KERNEL_INFO_GET_INT64_ARRAY = 163
KERNEL_CONTEXT_GET_GPU_COMPUTE_STREAM = 193
KERNEL_INFO_GET_INPUT_COUNT = 230
KERNEL_INFO_GET_OUTPUT_COUNT = 231
KERNEL_INFO_GET_INPUT_NAME = 232
KERNEL_INFO_GET_OUTPUT_NAME = 233
KERNEL_INFO_GET_INPUT_TYPE_INFO = 234
KERNEL_INFO_GET_OUTPUT_TYPE_INFO = 235
KERNEL_INFO_GET_CONSTANT_INPUT = 249
SHAPE_CONTEXT_GET_INPUT_COUNT = 267
SHAPE_CONTEXT_GET_INPUT = 268
SHAPE_CONTEXT_GET_ATTRIBUTE = 269
SHAPE_CONTEXT_SET_OUTPUT = 270
READ_OP_ATTRIBUTE = 272
KERNEL_CONTEXT_PARALLEL_FOR = 274
# For CUDA alone; of version 18.
KERNEL_CONTEXT_GET_SCRATCH_BUFFER = 277
KERNEL_INFO_GET_ALLOCATOR = 278

ALLOCATOR_FREE, ALLOCATOR_INFO = 2, 3  # positions in an OrtAllocator
FAIL, INVALID_ARGUMENT, NOT_IMPLEMENTED = 1, 2, 9  # error codes
REQUIRED, OPTIONAL, VARIADIC = 0, 1, 2  # characteristics of inputs and outputs
DEFAULT_MEMORY, CPU_MEMORY = 0, -1

ANY = "any"  # a type that the graph declares
ELEMENT_TYPES = {
    ANY: 0,
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
}
DTYPES = {number: dtype for dtype, number in ELEMENT_TYPES.items()}


MEMBER_NAMES = """
    CreateKernel GetName GetExecutionProviderType GetInputType GetInputTypeCount GetOutputType GetOutputTypeCount
    KernelCompute KernelDestroy GetInputCharacteristic GetOutputCharacteristic GetInputMemoryType
    GetVariadicInputMinArity GetVariadicInputHomogeneity GetVariadicOutputMinArity GetVariadicOutputHomogeneity
    CreateKernelV2 KernelComputeV2 InferOutputShapeFn GetStartVersion GetEndVersion GetMayInplace ReleaseMayInplace
    GetAliasMap ReleaseAliasMap
"""
MEMBERS = tuple(MEMBER_NAMES.split())


class CustomOp(ctypes.Structure):
    """OrtCustomOp. Fields that are not used stay 0; onnxruntime only reads the fields that `version` has."""

    _fields_ = [("version", ctypes.c_uint32), *((name, ctypes.c_void_p) for name in MEMBERS)]


@functools.cache
def _prototype(count: int) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_void_p, *[ctypes.c_void_p] * count)


def call(address: int, *arguments: Any) -> int:
    """Call the C function at `address` with addresses or whole numbers; returns its result."""
    return _prototype(len(arguments))(address)(*arguments) or 0


def callback(function: Callable[..., Any], result: Any, count: int) -> Any:
    """A C function of `count` addresses or whole numbers that runs `function`, which gets them as ints."""
    return ctypes.CFUNCTYPE(result, *[ctypes.c_size_t] * count)(function)


def address_of(function: Any) -> int:
    """The address of a C function made by `callback`."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def forever(thing: T) -> T:
    """Keep an object alive even when the interpreter ends, because sessions may be destroyed after it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


class Api:
    """onnxruntime's table of functions."""

    def __init__(self, address: int):
        self.address = address
        self._entries = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))

    def status(self, entry: int, *arguments: Any) -> int:
        """Call an entry; returns its result, which for most entries is a status: 0 or the address of an error."""
        return call(self._entries[entry] or 0, *arguments)

    def check(self, entry: int, *arguments: Any) -> None:
        """Call an entry that returns a status. Raises RuntimeError with onnxruntime's message if it is an error."""
        status = self.status(entry, *arguments)
        if status:
            message = ctypes.string_at(self.status(GET_ERROR_MESSAGE, status)).decode()
            self.status(RELEASE_STATUS, status)
            raise RuntimeError(message)

    def word(self, entry: int, *arguments: Any) -> int:
        """What an entry writes to the address that is its last argument. Raises what `check` raises."""
        found = ctypes.c_size_t()
        self.check(entry, *arguments, ctypes.byref(found))
        return found.value

    def error(self, exception: BaseException) -> int:
        """A new error status with the exception's message; onnxruntime raises it as an exception of its own."""
        code = NOT_IMPLEMENTED if isinstance(exception, NotImplementedError) else FAIL
        code = INVALID_ARGUMENT if isinstance(exception, TypeError | ValueError) else code
        return self.status(CREATE_STATUS, code, str(exception).encode())


def table(base: int) -> Api:
    """The table of the onnxruntime whose OrtApiBase is at `base`. Raises RuntimeError if it is too old."""
    get_api = ctypes.cast(base, ctypes.POINTER(ctypes.c_void_p))[0] or 0
    address = call(get_api, VERSION)
    if not address:
        raise too_old()
    return Api(address)


def too_old() -> RuntimeError:
    import onnxruntime

    return RuntimeError(
        f"opgrad.onnxruntime: onnxruntime is version {onnxruntime.__version__}, expected {NEEDED} or later;"
        " install it with: pip install --upgrade onnxruntime"
    )
