"""Sessions of the stock onnxruntime with opgrad's operators."""

import functools
import os
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opgrad.base.locks import settling
from opgrad.base.reading import check_regular
from opgrad.onnxruntime import abi, library, private
from opgrad.onnxruntime.abi import Api

try:
    import onnxruntime
except ImportError as error:
    missing = "opgrad.onnxruntime: onnxruntime cannot be imported; install it with: pip install 'opgrad[onnx]'"
    raise ImportError(missing) from error

CUDA = "CUDAExecutionProvider"
_registered: "weakref.WeakSet[onnxruntime.SessionOptions]" = weakref.WeakSet()


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Let sessions made with these options run ONNX Runtime's training operators on the CPU.

    session_options: an onnxruntime.SessionOptions; registering it again changes nothing.

    Raises TypeError for any other object, RuntimeError if onnxruntime is older than 1.18 or this system gives
    no way to register operators. `opgrad ops` lists the operators.
    """
    if not isinstance(session_options, onnxruntime.SessionOptions):
        kind = type(session_options).__name__
        raise TypeError(f"register: session_options is of type {kind}, expected onnxruntime.SessionOptions")
    if _release(onnxruntime.__version__) < _release(abi.NEEDED):
        raise abi.too_old()
    with settling:
        if session_options not in _registered:
            options, base = library.options_and_base(session_options)
            api = abi.table(base)
            for domain in _domains(api.address):
                api.check(abi.ADD_CUSTOM_OP_DOMAIN, options, domain)
            _registered.add(session_options)


def InferenceSession(
    model: str | bytes | os.PathLike[str],
    sess_options: onnxruntime.SessionOptions | None = None,
    providers: Any = ("CPUExecutionProvider",),
    **kwargs: Any,
) -> onnxruntime.InferenceSession:
    """An onnxruntime.InferenceSession that knows opgrad's operators.

    model: path or bytes of an ONNX model. In bytes, products of unsigned and signed bytes, which saturate in
        onnxruntime on processors without VNNI, become those of unsigned ones where onnx is installed.
    sess_options: registered with `register`; None: new ones.
    providers, kwargs: as in onnxruntime.

    Raises what `register` and onnxruntime.InferenceSession raise.
    """
    options = sess_options if sess_options is not None else onnxruntime.SessionOptions()
    register(options)
    if isinstance(model, str | os.PathLike) and Path(model).exists():  # onnxruntime itself reports a missing file
        check_regular(Path(model), f"InferenceSession: {os.fspath(model)}")
    if isinstance(model, bytes) and find_spec("onnx"):
        from opgrad.onnxruntime.exact_products import with_exact_products

        model = with_exact_products(model)
    try:
        return onnxruntime.InferenceSession(model, options, providers=providers, **kwargs)
    except Exception as error:
        for symptom, remedy in private.REMEDIES.items():
            if symptom in str(error):
                error.add_note(f"opgrad.onnxruntime: {remedy}")
        raise


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


@functools.cache
def _domains(api: int) -> list[int]:
    """The operator domains, for each copy of onnxruntime's C library in the process."""
    from opgrad.onnxruntime.custom_ops import new_domains

    return new_domains(Api(api), on_device=CUDA in onnxruntime.get_available_providers())
