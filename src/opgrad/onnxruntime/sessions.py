"""Sessions of the stock onnxruntime with opgrad's operators."""

import functools
import os
import warnings
import weakref
from collections.abc import Sequence
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

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_registered: "weakref.WeakSet[onnxruntime.SessionOptions]" = weakref.WeakSet()


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Let sessions made with these options run ONNX Runtime's training operators on the CPU.

    session_options: an onnxruntime.SessionOptions; registering it again changes nothing. With onnxruntime-gpu, sessions
        whose providers have CUDAExecutionProvider run those with a CUDA kernel on the device.

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
    providers, kwargs: as in onnxruntime. With CUDAExecutionProvider, operators that have a CUDA kernel run on the
        device. Where that provider is lacking, the session runs on the CPU with a RuntimeWarning if the providers name
        the CPU's, too.

    Raises what `register` and onnxruntime.InferenceSession raise, and RuntimeError if CUDAExecutionProvider alone is
    asked for and lacking.
    """
    options = sess_options if sess_options is not None else onnxruntime.SessionOptions()
    register(options)
    if isinstance(model, str | os.PathLike) and Path(model).exists():  # onnxruntime itself reports a missing file
        check_regular(Path(model), f"InferenceSession: {os.fspath(model)}")
    if isinstance(model, bytes) and find_spec("onnx"):
        from opgrad.onnxruntime.exact_products import with_exact_products

        model = with_exact_products(model)
    try:
        session = onnxruntime.InferenceSession(model, options, providers=providers, **kwargs)
    except Exception as error:
        for symptom, remedy in private.REMEDIES.items():
            if symptom in str(error):
                error.add_note(f"opgrad.onnxruntime: {remedy}")
        raise
    _check_providers([each if isinstance(each, str) else each[0] for each in providers or ()], session)
    return session


def _check_providers(asked: Sequence[str], session: onnxruntime.InferenceSession) -> None:
    """RuntimeError if CUDA's provider is asked for and lacking, or a warning where the CPU's may stand in."""
    if CUDA not in asked or CUDA in session.get_providers():
        return
    lacking = "has no CUDA provider, expected onnxruntime-gpu: pip uninstall onnxruntime; pip install onnxruntime-gpu"
    if CUDA in onnxruntime.get_available_providers():
        lacking = "finds no CUDA device here, or not the libraries that its log names, expected CUDA's driver and these"
    text = f"InferenceSession: providers has {CUDA}, but onnxruntime {onnxruntime.__version__} {lacking}"
    if CPU not in asked:
        raise RuntimeError(f"{text}; or {CPU} for the CPU")
    warnings.warn(f"{text}; the session runs on the CPU", RuntimeWarning, stacklevel=3)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


@functools.cache
def _domains(api: int) -> list[int]:
    """The operator domains, for each copy of onnxruntime's C library in the process."""
    from opgrad.onnxruntime.custom_ops import new_domains

    return new_domains(Api(api), cuda=CUDA in onnxruntime.get_available_providers())
