"""What a loss compares, found in eval graphs of many forms."""

import onnx
import pytest
from small_models import build, normal

from opgrad.training.files.artifact_set import Objective, find_objective, note_outputs


def objective(text, inputs, noted=(), weights=(), **more):
    model = build(text, {**normal(w=(4, 3)), **dict(weights)}, **more)
    if noted:
        note_outputs(model, noted)
    return find_objective(model, model.graph.output[0].name, inputs)


INSIDE = """g (int64[n, 6] ids, int64[n, 6] labels, float[4, 3] table) => (float loss{outputs}) {{
    e = Gather(table, ids)  logits = Relu(e)  {before}
    loss = SoftmaxCrossEntropyLoss<ignore_index = -100>(flat, target)
}}"""
SHIFTED = """one = Constant<value_ints = [1]>()  end = Constant<value_ints = [6]>()  axis = Constant<value_ints = [1]>()
    start = Constant<value_ints = [0]>()  last = Constant<value_ints = [5]>()  rows = Constant<value_ints = [-1, 3]>()
    all = Constant<value_ints = [-1]>()
    s = Slice(logits, start, last, axis)  flat = Reshape(s, rows)
    t = Slice(labels, one, end, axis)  target = Reshape(t, all)"""
FLAT = """rows = Constant<value_ints = [-1, 3]>()  all = Constant<value_ints = [-1]>()
    flat = Reshape(logits, rows)  target = Reshape(labels, all)"""


@pytest.mark.parametrize(("before", "every"), [(SHIFTED, False), (FLAT, True)])
@pytest.mark.parametrize("outputs", ["", ", float[n, 6, 3] logits"])
def test_a_loss_inside_the_model(before, every, outputs):
    """GPT-2's, of labels that it shifts; the scores are exported as they were before the loss took them."""
    found = objective(INSIDE.format(before=before, outputs=outputs), ["ids", "labels"])
    assert found == Objective("flat", "labels", "target", -100, every, ("logits",))


def test_labels_that_are_the_data():
    """A language model whose only input is text."""
    text = INSIDE.format(before=SHIFTED, outputs="").replace("int64[n, 6] labels, ", "").replace("labels", "ids")
    found = objective(text, ["ids"])
    assert (found.label, found.classes, found.every, found.outputs) == (None, "target", False, ("logits",))


def test_a_label_that_is_not_the_last_input():
    text = """g (float[n, 4] x, int64[n] y, float[n, 3] mask, float[4, 3] v) => (float loss) {
        m = MatMul(x, v)  s = Mul(m, mask)  p = LogSoftmax(s)  loss = NegativeLogLikelihoodLoss(p, y)
    }"""
    found = objective(text, ["x", "y", "mask"])
    assert found == Objective("p", "y", "y", None, True, ("p",))
    assert objective(text, ["x", "y", "mask"], noted=["s"]).outputs == ("s",)


def test_what_a_loss_writes_itself_is_not_exported():
    """BCEWithLogitsLoss of 1.19.2 begins with a sigmoid, and calls its values onnx::…::n."""
    model = build(
        """g (float[n, 4] x, float[n, 3] t, float[4, 3] v) => (float loss) {
            score = MatMul(x, v)  p = Sigmoid(score)  d = Sub(p, t)  q = Mul(d, d)  loss = ReduceMean<keepdims = 0>(q)
        }"""
    )
    assert find_objective(model, "loss", ["x", "t"]).outputs == ("p",)
    model.graph.node[1].output[0] = model.graph.node[2].input[0] = "onnx::sigmoid_output::5"
    found = find_objective(model, "loss", ["x", "t"])
    assert (found.scores, found.classes, found.outputs) == ("onnx::sigmoid_output::5", None, ("score",))


def test_whole_numbers_are_no_scores():
    """The last that all ways pass before the label may be a shape."""
    text = """g (float[n, 4] x, float[n, 4] t, float[4, 4] v) => (float loss) {
        m = MatMul(x, v)  shape = Shape(x)  r = Reshape(t, shape)  d = Sub(m, r)  loss = ReduceMean<keepdims = 0>(d)
    }"""
    assert objective(text, ["x", "t"]).scores == "m"


def test_no_scores():
    """Two things are compared whose likeness is the label; what the model had as outputs is exported, or the loss."""
    text = """g (float[n, 4] a, float[n, 4] b, float[n, 1] t, float[4, 3] v) => (float loss) {
        e = MatMul(a, v)  f = MatMul(b, v)  et = Mul(e, t)  ft = Mul(f, t)
        d = Sub(et, ft)  loss = ReduceMean<keepdims = 0>(d)
    }"""
    found = objective(text, ["a", "b", "t"])
    assert found == Objective(None, "t", None, None, False, ("loss",))
    assert objective(text, ["a", "b", "t"], noted=["e", "f", "et", "loss"]).outputs == ("e", "f")
    assert objective(text, ["a"]).scores is None


def test_the_ignored_class_may_be_an_input():
    text = """g (float[n, 3] x, int64[n] y) => (float loss) {
        s = MatMul(x, v)  loss, p = com.microsoft.SoftmaxCrossEntropyLossInternal(s, y, , ignored)
    }"""
    model = build(text, normal(v=(3, 3)))
    model.graph.initializer.append(onnx.helper.make_tensor("ignored", onnx.TensorProto.INT64, (), [7]))
    assert find_objective(model, "loss", ["x", "y"]).ignored == 7


def test_damaged_graphs():
    """A circle, a loss without labels, notes that are none."""
    model = build(
        """g (float[n, 3] x, int64[n] y) => (float loss) {
            s = Reshape(s, shape)  loss = SoftmaxCrossEntropyLoss(s, y)
        }"""
    )
    model.metadata_props.add(key="opgrad.outputs", value="{")
    assert find_objective(model, "loss", ["x", "y"]).outputs == ("s",)
    model.metadata_props[0].value = "3"
    del model.graph.node[1].input[1:]
    assert find_objective(model, "loss", ["x", "y"]).scores is None


@pytest.mark.parametrize(
    ("noted", "outputs"), [(["p"], ("s",)), (["h"], ("s",)), (["h", "p"], ("s",)), (["s", "p"], ("s",))]
)
def test_scores_that_no_output_determines_are_exported(noted, outputs):
    """Such as what a softmax at the end takes, or what a weight makes of an output."""
    text = """g (float[n, 4] x, int64[n] labels, float[4, 3] v) => (float loss) {
        h = Relu(x)  s = MatMul(h, v)  p = Softmax(s)  loss = SoftmaxCrossEntropyLoss(s, labels)
    }"""
    assert objective(text, ["x", "labels"], noted).outputs == outputs
