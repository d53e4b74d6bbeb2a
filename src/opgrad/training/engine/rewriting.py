"""Changes to a training or eval graph before onnxruntime loads it."""

from collections import Counter

import onnx
from onnx import helper

from opgrad.graph.messages import MICROSOFT, import_microsoft, keep
from opgrad.training.formats.names import BUFFER_SUFFIX, RESET

DIRECT_SUFFIX = "_grad.direct"  # behind a parameter's name: its gradient as an output of the graph


def fuse_losses(model: onnx.ModelProto) -> None:
    """Replace SoftmaxCrossEntropyLoss by SoftmaxCrossEntropyLossInternal, for which opgrad has a kernel.

    onnxruntime expands the node into ten others. If the node has no `ignore_index`, these take a label of -1 for the
    last class, whereas the original kernels and opgrad's, which compute the gradient, ignore it.
    """
    declared = {value.name: value.type for value in (*model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        is_loss = node.op_type == "SoftmaxCrossEntropyLoss" and node.domain in ("", "ai.onnx")
        if is_loss and node.output and node.output[0] in declared:
            _fuse(model.graph, node, declared)
    import_microsoft(model)


def _fuse(graph: onnx.GraphProto, node: onnx.NodeProto, declared: dict[str, onnx.TypeProto]) -> None:
    loss = node.output[0]
    if len(node.output) < 2 or not node.output[1]:
        del node.output[1:]
        node.output.append(f"{loss}.log_prob")
    log_prob = node.output[1]
    if log_prob not in declared:
        kind = declared[loss].tensor_type.elem_type
        graph.value_info.append(helper.make_tensor_value_info(log_prob, kind, None))
    for item in list(node.attribute):
        if item.name == "ignore_index":
            constant = helper.make_tensor(f"{loss}.ignore_index", onnx.TensorProto.INT64, (), [item.i])
            graph.initializer.append(constant)
            node.input.extend([""] * (3 - len(node.input)))
            node.input.append(constant.name)
            node.attribute.remove(item)
    node.op_type, node.domain = "SoftmaxCrossEntropyLossInternal", MICROSOFT


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
