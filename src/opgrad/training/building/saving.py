"""Write the files of an artifact set: all of them, or none."""

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import TensorProto

from opgrad.onnxruntime.messages import copied
from opgrad.training.building.values import array_of, is_placeholder
from opgrad.training.odtc import raw
from opgrad.writing import flush

LARGEST_MODEL = 2**31 - 1  # bytes of a message of protobuf
ALIGNMENT = 4096  # of tensors in another file, so that it can be mapped into memory


def write_model(model: onnx.ModelProto, values: Mapping[str, TensorProto], path: Path) -> None:
    """Write a model with the values of its placeholders, which are in `<name>.data` if one file cannot hold them."""
    own = [each for each in model.graph.initializer if is_placeholder(each)]
    size = model.ByteSize() + sum(values[each.name].ByteSize() for each in own)
    copy = copied(model)
    if size > LARGEST_MODEL:
        _write_beside(copy, values, path.with_name(path.name + ".data"))
    else:
        for tensor in copy.graph.initializer:
            if is_placeholder(tensor):
                tensor.CopyFrom(values[tensor.name])
    with open(path, "xb") as file:
        file.write(copy.SerializeToString(deterministic=True))
        flush(file)


def _write_beside(model: onnx.ModelProto, values: Mapping[str, TensorProto], path: Path) -> None:
    """Write the values of placeholders into another file, and where they are into the model."""
    with open(path, "xb") as file:
        for tensor in model.graph.initializer:
            if is_placeholder(tensor):
                file.seek(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
                start, content = file.tell(), raw(array_of(values[tensor.name])).data
                file.write(content)
                del tensor.external_data[:]
                place = {"location": path.name, "offset": start, "length": content.nbytes}
                for key, value in place.items():
                    tensor.external_data.add(key=key, value=str(value))
        flush(file)
