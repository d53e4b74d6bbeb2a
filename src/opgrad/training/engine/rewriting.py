"""Changes to a training or eval graph before onnxruntime loads it."""

from collections import Counter

import onnx
from onnx import helper

from opgrad.onnx.graph.messages import keep
from opgrad.training.files.names import BUFFER_SUFFIX, RESET

DIRECT_SUFFIX = "_grad.direct"  # behind a parameter's name: its gradient as an output of the graph


def simplify_concatenations(graph: onnx.GraphProto) -> None:
    """Replace ConcatTraining by Concat if nothing reads the parts' lengths: onnxruntime can then infer shapes early."""
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in graph.node:
        if node.op_type == "ConcatTraining" and not used.intersection(node.output[1:]):
            node.op_type, node.domain = "Concat", ""
            del node.output[1:]


def overwriting(model: onnx.ModelProto) -> dict[str, str] | None:
    """Turn a graph that accumulates gradients into one whose outputs are the gradients of the batch alone.

    The kernels then write into the gradients' memory themselves, and nothing is added.

    model: changed in place.
    Returns the output's name by that of the parameter; None, with the model as it was, if the accumulators' results
    are used in another way than the artifact generator's.
    """
    graph = model.graph
    accumulators = [node for node in graph.node if node.op_type == "InPlaceAccumulatorV2"]
    used = Counter(name for node in graph.node for name in node.input)
    outputs = {value.name for value in graph.output}
    produced = {name for node in graph.node for name in node.output}
    for node in accumulators:
        plain = len(node.input) == 3 and node.input[0].endswith(BUFFER_SUFFIX) and node.input[2] == RESET
        if not plain or len(node.output) != 1 or used[node.output[0]] or used[node.input[0]] > 1:
            return None
    names, taken = {}, set(outputs)
    for node in accumulators:
        parameter, gradient = node.input[0].removesuffix(BUFFER_SUFFIX), node.input[1]
        if gradient in taken or gradient not in produced:
            copy = helper.make_node("Identity", [gradient], [parameter + DIRECT_SUFFIX])
            graph.node.append(copy)
            gradient = copy.output[0]
        taken.add(gradient)
        names[parameter] = gradient
    dropped = {node.output[0] for node in accumulators}
    for node in accumulators:
        graph.node.remove(node)
    keep(graph.output, [value for value in graph.output if value.name not in dropped])
    gone = {name + BUFFER_SUFFIX for name in names} | {RESET}
    keep(graph.input, [value for value in graph.input if value.name not in gone])
    for name in names.values():
        graph.output.add().name = name
    return names
