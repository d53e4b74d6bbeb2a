"""onnxblock as scripts for onnxruntime-training call it, with another import."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from small_models import LABELS, build, gradients_of, perceptron, run, two_outputs

from opgrad.training import ArtifactSet, Trainer, artifacts, onnxblock, read_checkpoint
from opgrad.training.onnxblock import blocks

PARAMETERS = ["w0", "b0", "w1", "b1"]


def batch(rows=6):
    return {"x": np.random.default_rng(1).standard_normal((rows, 4)).astype(np.float32), "labels": LABELS[:rows]}


# --- the scripts of onnxruntime-training-examples ---


def test_a_block_for_one_of_two_outputs(tmp_path):
    class FirstOutput(onnxblock.Block):
        def __init__(self):  # without super().__init__, as many do
            self.loss = onnxblock.loss.CrossEntropyLoss()

        def build(self, scores, *hidden):
            return self.loss(scores), *hidden

    made = artifacts.generate_artifacts(two_outputs(), PARAMETERS, loss=FirstOutput(), artifact_directory=tmp_path)
    assert made.outputs == ("onnx::loss::2", "hidden")
    assert made.inputs == ("x", "labels")


def test_a_training_block_by_hand(tmp_path):
    class Training(onnxblock.TrainingBlock):
        def __init__(self):
            super().__init__()
            self.loss = onnxblock.loss.CrossEntropyLoss()

        def build(self, output):
            return self.loss(output), output

    model, block = perceptron(), Training()
    before = model.SerializeToString()
    for each in model.graph.initializer:
        block.requires_grad(each.name, True)
    block.requires_grad("b0", False)
    with onnxblock.base(model) as accessor:
        assert block(*[each.name for each in model.graph.output]) == ("onnx::loss::2", "scores")
        training, evaluation = block.to_model_proto()
        assert accessor.model == training
    parameters, optimizer = block.parameters(), onnxblock.optim.AdamW(clip_grad=onnxblock.optim.ClipGradNorm(1.0))
    assert [[each.name for each in group] for group in parameters] == [["w0", "w1", "b1"], ["b0"]]
    with onnxblock.empty_base() as accessor:
        optimizer(parameters)
        changing = optimizer.to_model_proto()
        assert accessor.model == changing
    assert changing.ir_version <= 10  # the last that onnxruntime-training reads
    onnxblock.save_checkpoint(parameters, tmp_path / "checkpoint")
    for name, each in (("training", training), ("eval", evaluation), ("optimizer", changing)):
        onnx.save(each, tmp_path / f"{name}_model.onnx")
    assert model.SerializeToString() == before
    trainer = Trainer(ArtifactSet.load(tmp_path), 0.05)
    found = [trainer.step(batch()) for _ in range(5)]
    assert found[-1] < found[0]

    inference = perceptron()
    changed = read_checkpoint(tmp_path / "checkpoint").trainable["w0"] + 1
    inference.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(changed, "w0"))
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", inference)
    assert inference == perceptron()


# --- blocks ---


def test_all_blocks_build_models_that_run(tmp_path):
    class Everything(onnxblock.ForwardBlock):
        def build(self, name):
            squared = blocks.Pow(2.0)(blocks.Abs()(blocks.Sub()(name, blocks.Constant(0.5)())))
            ratio = blocks.Div()(squared, blocks.Add()(blocks.Constant(1.0)(), squared))
            share = blocks.Sigmoid()(ratio)
            mean = blocks.ReduceMean(keepdims=False)(blocks.Log()(share))
            other = blocks.InputLike("scores")("more")
            wide = blocks.Cast(TensorProto.DOUBLE)(blocks.Mul()(other, share))
            return mean, blocks.ReduceSum(keepdims=False)(blocks.Neg()(other)), wide

    block = Everything()
    with onnxblock.base(perceptron()) as accessor:
        block("scores")
        assert accessor.model == block.to_model_proto()
    built = block.to_model_proto()
    onnx.checker.check_model(built, full_check=True)
    assert len(built.graph.output) == 3
    feeds = {"x": batch()["x"], "more": np.ones((6, 3), np.float32)}
    mean, negative, rows = onnxruntime.InferenceSession(built.SerializeToString()).run(None, feeds)
    assert (mean.shape, negative, rows.dtype) == ((), -18, np.float64)


def test_names_are_drawn_anew_for_each_model():
    def names():
        with onnxblock.base(perceptron()) as accessor:
            onnxblock.loss.MSELoss()("scores")
        return [(node.name, node.output[0]) for node in accessor.model.graph.node[-3:]]

    expected = [("Sub::2", "sub_output::1"), ("Pow::5", "pow_output::4"), ("ReduceMean::7", "reducemean_output::6")]
    assert names() == [(f"onnx::{node}", f"onnx::{output}") for node, output in expected] == names()


def test_names_that_the_model_has_are_not_given_again():
    with onnxblock.base(perceptron()) as accessor:
        accessor.model.graph.node[0].name = "onnx::Sub::2"
        assert accessor.fresh("loss") == "onnx::loss::1"
        onnxblock.blocks.Sub()("scores", "scores")
    assert accessor.model.graph.node[-1].name == "onnx::Sub::3"


def test_gradients_of_inputs(tmp_path):
    artifacts.generate_artifacts(perceptron(), ["x"], loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
    training = onnx.load(tmp_path / "training_model.onnx").graph
    assert [each.name for each in training.input] == ["x", "target", "x_grad.accumulation.buffer", "lazy_reset_grad"]
    feeds = {"x": batch()["x"], "target": np.zeros((6, 3), np.float32)}
    value, dx = run(gradients_of(tmp_path / "training_model.onnx"), feeds)
    step = 1e-2 * dx / np.abs(dx).max()
    (moved,) = run(tmp_path / "eval_model.onnx", {**feeds, "x": feeds["x"] + step})
    np.testing.assert_allclose(moved - value, (dx * step).sum(), rtol=0.05)


# --- what is refused ---


class Nothing(onnxblock.Block):
    def build(self, name):
        return None


class Dangling(onnxblock.Block):
    def build(self, name):
        self.base.graph.node.append(helper.make_node("Add", [name, "nowhere"], ["sum"]))
        return "sum"


def base_inside():
    with onnxblock.base(perceptron()), onnxblock.empty_base():
        pass


def mixed():
    with onnxblock.base(perceptron()):
        blocks.Mul()("scores", blocks.Constant(1.0, TensorProto.DOUBLE)())


def built(block, *names):
    with onnxblock.base(perceptron()):
        return block(*names)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: onnxblock.loss.MSELoss()("y"), RuntimeError, "there is no model to build on"),
        (base_inside, RuntimeError, "blocks build another model already"),
        (mixed, ValueError, "'scores' has elements of type FLOAT"),
        (lambda: onnxblock.base(3).__enter__(), TypeError, "base: model is of type int"),
        (lambda: built(Nothing(), "scores"), TypeError, None),
        (lambda: built(Dangling(), "scores"), ValueError, "Dangling: the model is wrong: .*'nowhere'"),
        (lambda: built(onnxblock.loss.L1Loss(), "score"), LookupError, "L1Loss: the graph has no value 'score'; did"),
        (lambda: built(blocks.InputLike("score")), LookupError, "InputLike: no value 'score'"),
        (lambda: onnxblock.custom_op_library("none.so").__enter__(), FileNotFoundError, "there is no file none.so"),
        (lambda: onnxblock.optim.SGD(3), TypeError, "SGD: clip_grad is 3, expected a block"),
        (lambda: onnxblock.save_checkpoint(None, "x"), TypeError, "save_checkpoint: parameters is no pair"),
        (lambda: blocks.Linear(3, 2), AttributeError, "no block 'Linear'; expected a Block of your own"),
    ],
)
def test_wrong_calls(call, kind, message):
    if message is None:
        assert call() is None  # a block by itself may return anything
        return
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(
    ("model", "arguments", "kind", "message"),
    [
        (two_outputs, {"loss": "CE"}, ValueError, "the labels 'hidden' have elements of type FLOAT, expected INT64"),
        (two_outputs, {"loss": Nothing()}, ValueError, "loss_input_names says .*: Nothing cannot take 'scores', "),
        (perceptron, {"loss": Nothing()}, TypeError, "Nothing: build returned None, expected the name of a value"),
        (perceptron, {}, ValueError, r"the loss 'scores' has shape \(batch, 3\), expected one number"),
        (perceptron, {"loss": "mse"}, TypeError, "loss is 'mse', expected LossType, a block of onnxblock, or None"),
        (perceptron, {"loss": "CE", "optimizer": 1}, TypeError, "optimizer is 1, expected OptimType"),
        (perceptron, {"loss": "CE", "loss_input_names": ["score"]}, LookupError, "no value 'score'; did you mean 'sco"),
        (perceptron, {"loss": "CE", "additional_output_names": ["bb"]}, LookupError, "no value 'bb' to be an output"),
        (perceptron, {"loss": "CE", "additional_output_names": "h"}, TypeError, "additional_output_names is 'h'"),
        (perceptron, {"loss": "CE", "prefix": "a/b"}, ValueError, "prefix is 'a/b'"),
        (perceptron, {"loss": "CE", "artifact_directory": "none"}, FileNotFoundError, "there is no folder none"),
        (perceptron, {"loss": "CE", "requires_grad": ["x"], "optimizer": "AdamW"}, ValueError, "parameters are initi"),
        (lambda: 3, {}, TypeError, "model is of type int, expected onnx.ModelProto or a path"),
        (lambda: "none.onnx", {}, FileNotFoundError, "there is no file none.onnx"),
    ],
)
def test_wrong_arguments_leave_the_folder_as_it_was(model, arguments, kind, message, tmp_path):
    given = {"artifact_directory": tmp_path, **arguments}
    kinds = {"CE": artifacts.LossType.CrossEntropyLoss, "AdamW": artifacts.OptimType.AdamW}
    given = {name: kinds.get(value, value) if isinstance(value, str) else value for name, value in given.items()}
    with pytest.raises(kind, match=message):
        artifacts.generate_artifacts(model(), **given)
    assert not list(tmp_path.iterdir())


def test_all_nodes_without_gradient_are_told_at_once(tmp_path):
    text = "g (float[n, 3] x) => (float[n, 3] y) { a = MatMul(x, w) b = my.One(a) c = my.Two(b) y = Add(c, w) }"
    model = build(text, {"w": np.ones((3, 3), np.float32)}, domains=', "my": 1')
    expected = "generate_artifacts: 2 nodes have no gradient: my.One .* my.Two .*register_gradient adds one$"
    with pytest.raises(NotImplementedError, match=expected):
        artifacts.generate_artifacts(model, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
