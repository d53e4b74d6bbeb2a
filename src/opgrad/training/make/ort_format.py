"""Models in ORT format, which small builds of onnxruntime read."""

import contextlib
import io
from pathlib import Path

CONVERTER = "onnxruntime.tools.convert_onnx_models_to_ort"


def convert(path: Path, library: str | None, who: str) -> None:
    """Write a model in ORT format, and the operators that it needs, beside it, as the installed onnxruntime does it.

    library: with operators of the user's. Raises NotImplementedError for a model with operators that the installed
    onnxruntime does not have, and where none is installed.
    """
    try:
        from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort
    except ImportError as error:
        raise NotImplementedError(f"{who}: ORT format needs the converter of onnxruntime: {error}") from None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            convert_onnx_models_to_ort(
                path,
                output_dir=path.parent,
                optimization_styles=[OptimizationStyle.Fixed],
                custom_op_library_path=Path(library) if library else None,
            )
    except Exception as error:  # onnxruntime's exceptions have no common base class
        from opgrad.onnxruntime.private import BEFORE_FATAL, reason

        raise NotImplementedError(
            f"{who}: the installed onnxruntime cannot convert {path.name} to ORT format "
            f"({reason(error).rpartition(BEFORE_FATAL)[2]}); leave ORT format out, and run python -m {CONVERTER} "
            "where the onnxruntime is installed that shall read it"
        ) from None
