"""Training in onnxruntime-training 1.19.2, for the scripts of this folder."""

import os

import onnxruntime.training.api as api


def trained(folder, steps, evaluations, learning_rate=None, eval_model=None):
    """The losses of steps and of evaluations behind them, each a batch's inputs in order; the frozen parameters."""
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(eval_model or folder / "eval_model.onnx"))
    optimizer, losses = api.Optimizer(str(folder / "optimizer_model.onnx"), module), []
    if learning_rate is not None:
        optimizer.set_learning_rate(learning_rate)
    for batch in steps:
        module.train()
        losses.append(_first(module(*batch)))
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    evaluated = [_first(module(*batch)) for batch in evaluations]
    return losses, evaluated, {name: each.data.tolist() for name, each in state.parameters if not each.requires_grad}


def _first(results):
    return float(results[0] if isinstance(results, list | tuple) else results)


def one_output_of_normalizations(graph):
    """Repair an evaluation graph: 1.19.2 sets training_mode to 0 but leaves three outputs, and cannot load that."""
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            del node.output[1:]


def reference(losses, evaluated, frozen, producer="onnxruntime-training-cpu 1.19.2", **more):
    """What reference.json holds."""
    return {
        "producer": producer,
        **more,
        "loss_per_step": losses,
        "eval_loss_per_batch": evaluated,
        "frozen_after": frozen,
    }


def each_apart(function, cases):
    """Call a function with each of the cases in a process of its own, as 1.19.2 ends some; the names that failed."""
    failed = []
    for name, *given in cases:
        child = os.fork()
        if not child:
            function(name, *given)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            failed.append(name)
    return failed
