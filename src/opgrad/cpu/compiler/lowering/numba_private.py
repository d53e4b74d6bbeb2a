"""The names of Numba and llvmlite that these do not document and opgrad uses, looked up here once.

Kernels are compiled without those that only save time: a release of Numba that lacks one compiles more slowly, and a
warning says so. Without the others nothing can be compiled, and the first kernel that has to be raises ImportError.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import llvmlite
import numba

from opgrad.base.locks import compilers_locks
from opgrad.base.private_names import look_up

MISSING: list[str] = []


def _found(path: str, *inside: str) -> Any:
    """The object at this path; None if it is missing, and its path is recorded.

    inside: fields that objects of this class must have, set by `__init__` or declared by the class.
    """
    found = look_up(path, MISSING)
    if found is None:
        return None
    lacking = [each for each in inside if not _has(found, each)]
    MISSING.extend(f"{path}.{each}" for each in lacking)
    return None if lacking else found


def _has(kind: type, field: str) -> bool:
    codes = (getattr(vars(base).get("__init__"), "__code__", None) for base in kind.__mro__)
    return hasattr(kind, field) or any(code is not None and field in code.co_names for code in codes)


def _needed(path: str) -> Any:
    found = _found(path)
    if found is None:
        name = path.replace(":", ".")
        raise ImportError(
            f"opgrad: Numba {numba.__version__} lacks {name}, without which no kernel can be compiled: "
            "install the release of Numba that opgrad's requirements name"
        )
    return found


# --- without which nothing is compiled -------------------------------------------------------------------------------

cpu_target = _needed("numba.core.registry:cpu_target")
global_compiler_lock = _needed("numba.core.compiler_lock:global_compiler_lock")
AbstractTemplate = _needed("numba.core.typing.templates:AbstractTemplate")
AttributeTemplate = _needed("numba.core.typing.templates:AttributeTemplate")
builtin_registry = _needed("numba.core.typing.templates:builtin_registry")
signature = _needed("numba.core.typing.templates:signature")
CompilerBase = _needed("numba.core.compiler:CompilerBase")
DefaultPassBuilder = _needed("numba.core.compiler:DefaultPassBuilder")
PassManager = _needed("numba.core.compiler_machinery:PassManager")
Inst, Var = _needed("numba.core.ir:Inst"), _needed("numba.core.ir:Var")

# --- which only save time --------------------------------------------------------------------------------------------

BaseFunction = _found("numba.core.types:BaseFunction", "get_call_type", "_impl_keys")
PostProcessor = _found("numba.core.postproc:PostProcessor", "run")
canonicalize_cfg = _found("numba.core.transforms:canonicalize_cfg")
has_rec_list_vars = _found("numba.core.ir:Inst._rec_list_vars") is not None
BaseContext = _found("numba.core.base:BaseContext", "get_abi_sizeof")
events = _found("numba.core.event:start_event"), _found("numba.core.event:end_event")
run_pass = _found("numba.core.compiler_machinery:PassManager._runPass")
has_analysis = _found("numba.core.compiler_machinery:PassManager", "_analysis") is not None
make_function = _found("numba:_dynfunc.make_function")
JITCodeLibrary = _found(
    "numba.core.codegen:JITCodeLibrary", "_optimize_functions", "finalize", "get_pointer_to_function",
    "_get_module_for_linking", "_ensure_finalized", "_finalized", "_codegen", "_final_module", "_linking_libraries",
    "_shared_module",
)  # fmt: skip
codegen = _found("numba.core.codegen:JITCPUCodegen", "_library_class")
get_executable = _found("numba.core.cpu:CPUContext.get_executable")
FunctionPass = _found("numba.core.compiler_machinery:FunctionPass")
register_pass = _found("numba.core.compiler_machinery:register_pass")
ConstantIndices = _found("numba.core.rewrites.static_getitem:RewriteConstGetitems", "match", "apply")

# Kernels define no functions, use no `with`, raise nothing and unroll no tuples. These passes look for such things.
UNNEEDED = {
    "WithLifting",
    "InlineClosureLikes",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "InlineInlinables",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "LiteralPropagationSubPipelinePass",
    "InlineOverloads",
    "NoPythonSupportedFeatureValidation",
    "AnnotateTypes",
    "DumpParforDiagnostics",
}


def without_unneeded(passes: Sequence[Any]) -> list[Any]:
    """The passes of a pipeline that kernels need."""
    _warn({*UNNEEDED} - {each[0].__name__ for each in passes})
    return [each for each in passes if each[0].__name__ not in UNNEEDED]


def _warn(missing: Sequence[str] | set[str], cost: str = "kernels compile more slowly") -> None:
    """Warn that names are missing."""
    if missing:
        names = ", ".join(sorted(each.replace(":", ".") for each in missing))
        releases = f"Numba {numba.__version__} with llvmlite {llvmlite.__version__}"
        warnings.warn(f"opgrad: {releases} lacks {names}: {cost}", RuntimeWarning, stacklevel=2)


_warn(MISSING)
_warn([name for name, lock in compilers_locks() if lock is None], "a process that forks while it compiles may hang")
