"""What opgrad relies on in onnxruntime although nobody promises it: texts of errors, the layout of a Python object.

If a release words an error differently, this costs the advice or the detail that is taken from the text, and nothing
else. The functions and positions in `abi` are onnxruntime's public interface, which is only ever appended to.
"""

import ctypes
import re
from collections.abc import Callable
from typing import Any

# Before the part of an error's text that tells the reason: the place in onnxruntime's source, and the kind of error.
BEFORE_REASON = ("Status Message: ", "[ONNXRuntimeError] : ")
BEFORE_FATAL = "Fatal error: "  # the same in errors of the converter to ORT format
# Operators that nobody has, in the errors of models that cannot be loaded.
UNKNOWN_OPERATOR = re.compile(r"(\S+)\(-?\d+\) is not a registered function/op|find an implementation for (\S+)\(")
# In errors of runs: a node failed; memory could not be allocated.
RUNNING, ALLOCATING = "while running", "alloc"
NO_ATTRIBUTE = "No attribute"  # in errors of reading an attribute that the node does not have
NOBODYS = "opgrad.no_such_attribute"  # the name of an attribute that no node has
# From a part of the error of a model that cannot be loaded to advice for the user.
REMEDIES = {
    "type inference failed": "the outputs of SoftmaxCrossEntropyLossInternal and its gradient have the type that the"
    " graph declares; add a value_info entry for each that is not an output of the graph",
    "(-1) is not a registered function/op": "the model does not import the domain com.microsoft, which onnxruntime"
    " needs for what it fuses; add the opset import com.microsoft 1, or open the model with plain onnxruntime",
}
# The fields of a pybind11 object behind its header: the C++ pointer, its holder, weak references, flags.
PYBIND_TYPE, PYBIND_WORDS = "pybind11_type", 5


def reason(error: Exception) -> str:
    """The text of an exception of onnxruntime in one line, without the place in its source."""
    text = str(error)
    for mark in BEFORE_REASON:
        text = text.rpartition(mark)[2]
    return " ".join(text.split()) or type(error).__name__


def unknown_operator(error: Exception) -> str | None:
    """The operator, with its domain, that nobody has; None if this is not what the error says."""
    found = UNKNOWN_OPERATOR.search(str(error))
    return None if found is None else str(found[1] or found[2])


def node_refused(error: Exception) -> bool:
    """Whether a run failed because a node refused values or shapes."""
    return RUNNING in str(error) and ALLOCATING not in str(error)


def is_missing(error: Exception, name: str, read: Callable[[str], None]) -> bool:
    """Whether an error of reading an attribute says that the node has none of this name.

    read: reads an attribute of another name in the same way. If the error has not the known text, it is compared with
    the one for a name that no node has.
    """
    if NO_ATTRIBUTE in str(error):
        return True
    try:
        read(NOBODYS)
    except RuntimeError as other:
        return str(other) == str(error).replace(name, NOBODYS)
    return False


def options_pointer(options: Any) -> int | None:
    """The C++ pointer in a SessionOptions object; None if its layout is not the known one."""
    expected = object.__basicsize__ + PYBIND_WORDS * ctypes.sizeof(ctypes.c_void_p)
    kind = type(options)
    if type(kind).__name__ != PYBIND_TYPE or kind.__basicsize__ != expected:
        return None
    return ctypes.c_size_t.from_address(id(options) + object.__basicsize__).value
