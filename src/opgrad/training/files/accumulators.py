"""Gradients in files of onnxruntime-training, whose graphs add them to buffers; elsewhere they are outputs."""

from collections import Counter
from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from opgrad.onnx.graph.messages import MICROSOFT, copied, keep

ACCUMULATOR = "InPlaceAccumulatorV2"
BUFFER_SUFFIX = "_grad.accumulation.buffer"  # behind a parameter's name: the input that its gradient is added to
RESULT_SUFFIX = "_grad.accumulation.out"  # behind a parameter's name: the accumulator's output, always true
RESET = "lazy_reset_grad"  # the input that says whether gradients overwrite their buffers
DIRECT_SUFFIX = "_grad.direct"  # behind a parameter's name: a copy of its gradient


def accumulating(model: onnx.ModelProto, gradients: Mapping[str, str]) -> onnx.ModelProto:
    """A copy of a training model that adds its gradients to buffers, which are inputs, as files have it.

    gradients: by parameter the name of its gradient, an output behind those of the forward part.
    """
    copy = copied(model)
    graph, first = copy.graph, len(model.graph.output) - len(gradients)
    declared = {each.name: copied(each) for each in graph.output}
    keep(graph.output, [each for each in graph.output if each.name not in gradients.values()])
    for index, (name, gradient) in enumerate(gradients.items(), first):
        buffer, result = name + BUFFER_SUFFIX, name + RESULT_SUFFIX
        graph.input.add(name=buffer, type=declared[gradient].type)
        graph.value_info.append(declared[gradient])
        graph.output.append(helper.make_tensor_value_info(result, TensorProto.BOOL, [1]))
        inputs, node = [buffer, gradient, RESET], f"GradientAccumulator{index}"
        graph.node.append(helper.make_node(ACCUMULATOR, inputs, [result], node, domain=MICROSOFT))
    graph.input.append(helper.make_tensor_value_info(RESET, TensorProto.BOOL, [1]))
    return copy


def without_accumulators(model: onnx.ModelProto, what: str) -> dict[str, str]:
    """Let a training model of a file have its gradients as outputs, in place; returns their names by parameter.

    what: the file, for messages. Raises ValueError where accumulators are used in another way than by generators of
    artifacts.
    """
    graph = model.graph
    used = Counter([*(name for node in graph.node for name in node.input), *(each.name for each in graph.output)])
    accumulators = [node for node in graph.node if node.op_type == ACCUMULATOR]
    for node in accumulators:
        results = [used[name] for name in node.output]
        plain = len(node.input) == 3 and node.input[0].endswith(BUFFER_SUFFIX) and node.input[2] == RESET
        if not plain or not results or results[0] > 1 or any(results[1:]) or used[node.input[0]] > 1:
            raise ValueError(
                f"{what} does not accumulate gradients as graphs of the artifact generator do: make the set anew with "
                "`opgrad artifacts`"
            )
    flags = {node.output[0] for node in accumulators}
    gone = {*(node.input[0] for node in accumulators), RESET}
    gradients = {node.input[0].removesuffix(BUFFER_SUFFIX): node.input[1] for node in accumulators}
    keep(graph.node, [node for node in graph.node if node.op_type != ACCUMULATOR])
    keep(graph.input, [each for each in graph.input if each.name not in gone])
    keep(graph.output, [each for each in graph.output if each.name not in flags])
    return with_gradients(graph, gradients, {each.name: copied(each) for each in graph.value_info})


def with_gradients(
    graph: onnx.GraphProto, gradients: Mapping[str, str], declared: Mapping[str, onnx.ValueInfoProto]
) -> dict[str, str]:
    """Append gradients to the outputs of a graph; returns their names by parameter.

    A gradient that is an output already, or that no node computes, is copied. declared: types of values.
    """
    taken, names = {each.name for each in graph.output}, {}
    produced = {name for node in graph.node for name in node.output}
    for parameter, gradient in gradients.items():
        name = gradient
        if gradient in taken or gradient not in produced:
            name = parameter + DIRECT_SUFFIX
            graph.node.append(helper.make_node("Identity", [gradient], [name]))
        taken.add(name)
        names[parameter] = name
        graph.output.append(declared.get(name) or onnx.ValueInfoProto(name=name))
    keep(graph.value_info, [each for each in graph.value_info if each.name not in taken])
    return names
