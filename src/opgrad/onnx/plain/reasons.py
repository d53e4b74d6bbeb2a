"""Operators of training graphs that have no form of plain ONNX operators, and why."""

from collections.abc import Mapping

_PROCESSES = "it sends data to other processes"
_PACKED = "it unpacks memory in a layout of its own"
_TORCH = "it calls back into PyTorch"
NOT_LOWERED: Mapping[str, str] = {
    "AdamOptimizer": "its inputs and outputs are written in place; AdamWOptimizer has a form",
    "LambOptimizer": "its inputs and outputs are written in place",
    "SGDOptimizer": "its inputs and outputs are written in place; SGDOptimizerV2 has a form",
    "BitmaskBiasDropout": _PACKED,
    "BitmaskDropout": _PACKED,
    "BitmaskDropoutGrad": _PACKED,
    "DropoutTraining": "its seed is an input, and that of Dropout an attribute",
    "FakeQuant": "it rounds in a way that no plain operator has",
    "FakeQuantGrad": "it rounds in a way that no plain operator has",
    "ATen": _TORCH,
    "PythonOp": _TORCH,
    "PythonOpGrad": _TORCH,
    "YieldOp": "it hands tensors to ORTModule in the middle of the graph",
    "TritonOp": "it is a kernel of its own",
    "NcclAllReduce": _PROCESSES,
    "NcclAllGather": _PROCESSES,
    "NcclReduceScatter": _PROCESSES,
    "AdasumAllReduce": _PROCESSES,
    "Send": _PROCESSES,
    "Recv": _PROCESSES,
    "RecordEvent": "it is a signal between streams",
    "WaitEvent": "it is a signal between streams",
    "SummaryHistogram": "its output is a message of TensorBoard",
    "SummaryMerge": "its output is a message of TensorBoard",
    "SummaryScalar": "its output is a message of TensorBoard",
    "SummaryText": "its output is a message of TensorBoard",
    **{
        f"Gist{kind}coder": _PACKED for kind in ("BinarizeEn", "BinarizeDe", "Pack1En", "Pack1De", "Pack8En", "Pack8De")
    },
    **{f"GistPack{kind}coder": _PACKED for kind in ("16En", "16De", "Msfp15En", "Msfp15De")},
}
