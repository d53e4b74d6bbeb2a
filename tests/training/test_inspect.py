"""`opgrad inspect`: what an artifact set contains, and who runs the operators of a model."""

import json
import shutil

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES
from command import cli, fails, succeeds
from small_models import build

from opgrad.cli.inspection import inspect
from opgrad.onnxruntime.loading import LOWERING, NATIVE, NOBODY, OPGRAD, operators


def model_of(text, weights=(), domains=', "com.microsoft": 1'):
    return build(text, weights, domains=domains)


def runners(text):
    return {each.name: (each.runner, each.count) for each in operators(model_of(text))}


def test_the_example_is_told_in_full():
    found = inspect(EXAMPLES / "digits")
    assert found.runs
    assert [(each.name, each.kind, each.bytes) for each in found.parameters][:2] == [
        ("W1", "trainable", 4 * 128 * 64),
        ("b1", "trainable", 4 * 128),
    ]
    assert [(each.name, each.shape) for each in found.inputs] == [("pixels", ("batch", 64)), ("labels", ("batch",))]
    assert len(found.outputs) == 1
    assert found.optimizer[0]["name"] == "AdamWOptimizer"
    assert found.optimizer[0]["attributes"]["adam_mode"] == 1
    of_runner = {
        runner: {each.name: each.count for each in found.operators if each.runner == runner}
        for runner in (NATIVE, OPGRAD, NOBODY)
    }
    assert of_runner[NATIVE]["Gemm"] == 8
    assert of_runner[OPGRAD] == {"InPlaceAccumulatorV2": 6, "ReluGrad": 2, "SoftmaxCrossEntropyLossGrad": 1}
    assert not of_runner[NOBODY]


def test_the_command_prints_tables_or_json():
    text = succeeds("inspect", EXAMPLES / "digits_attention")
    for word in ("tokens int64 (batch, 64)", "AdamWOptimizer", "SoftmaxGrad_13", "opgrad", "FusedMatMul", "in all"):
        assert word in text
    text = succeeds("inspect", EXAMPLES / "digits", "--json")
    found = json.loads(text)
    assert found["runs"] is True
    assert found["parameter_bytes"] == {"trainable": 68904}
    assert found["checkpoint"]["optimizers"] == {}


def test_types_decide_who_runs_an_operator():
    text = "g ({kind}[2, 3] x) => ({kind}[2, 3] y) {{ y = Relu(x) }}"
    assert runners(text.format(kind="float")) == {"Relu": (NATIVE, 1)}
    assert runners(text.format(kind="int64")) == {"Relu": (NOBODY, 1)}
    text = "g ({kind}[2, 3] x) => ({kind}[2, 3] y) {{ y = com.microsoft.ReluGrad(x, x) }}"
    assert runners(text.format(kind="float")) == {"ReluGrad": (OPGRAD, 1)}
    assert runners(text.format(kind="int64")) == {"ReluGrad": (LOWERING, 1)}


def test_operators_that_must_be_lowered_first(tmp_path):
    """opgrad may get a kernel for some of these, but stock onnxruntime runs all of them when they are lowered."""
    folder = EXAMPLES.parent / "tests" / "artifacts" / "digits_cnn"
    found = inspect(folder)
    assert found.runs
    assert {each.runner for each in found.operators} <= {NATIVE, OPGRAD, LOWERING}
    plain = tmp_path / "plain.onnx"
    text = succeeds("lower", folder / "training_model.onnx", "-o", plain, columns=160)
    cells = [line.split()[1::2] for line in text.splitlines() if "Grad" in line]
    assert ["MaxPoolGrad", "1", "1"] in cells, text
    assert "outputs added: " in text
    assert max(map(len, text.splitlines())) <= 160
    assert "not lowered" not in text
    assert {each.runner for each in inspect(plain).operators} == {NATIVE}
    assert inspect(plain).runs
    assert list(tmp_path.iterdir()) == [plain]


def test_what_does_not_run_as_it_is_exits_with_1_and_says_what_to_do(tmp_path):
    model, text = tmp_path / "model.onnx", "g (float[2, 3] x) => (float[2, 3] y) {{ {} }}"
    bodies = {
        "FakeQuant: it rounds in a way": "y = com.microsoft.FakeQuant(x)",
        "NoSuch: it is an operator of my.domain that neither": "y = my.domain.NoSuch(x)",
        "Relu: onnxruntime has it not for these types": "t = Cast<to=7>(x)  u = Relu(t)  y = Cast<to=1>(u)",
        f"first: opgrad lower {model} --operator ReluGrad -o model_lowered.onnx": (
            "t = Cast<to=7>(x)  u = com.microsoft.ReluGrad(t, t)  y = Cast<to=1>(u)"
        ),
    }
    for message, body in bodies.items():
        onnx.save(model_of(text.format(body), domains=', "com.microsoft": 1, "my.domain": 1'), model)
        found = inspect(model)
        assert not found.runs
        assert message in str(found.problem), found.problem
        assert cli("inspect", model)[0] == 1
    succeeds("lower", model, "--operator", "ReluGrad", "-o", tmp_path / "plain.onnx")
    assert inspect(tmp_path / "plain.onnx").runs


def test_an_eval_model_that_does_not_run_is_told_of(tmp_path):
    shutil.copytree(EXAMPLES / "digits", tmp_path / "set")
    assert inspect(tmp_path / "set").runs
    model = onnx.load(tmp_path / "set" / "eval_model.onnx")
    model.graph.node[0].op_type, model.graph.node[0].domain = "NoSuch", "com.microsoft"
    onnx.save(model, tmp_path / "set" / "eval_model.onnx")
    problem = str(inspect(tmp_path / "set").problem)
    assert "nobody runs NoSuch: it is an operator of com.microsoft that neither" in problem


def test_lower_lists_what_it_can_and_refuses_what_it_cannot(tmp_path):
    text = succeeds("lower", "--list")
    assert "\nConvGrad\n" in text
    assert "\nYieldOp: it hands" in text
    assert cli("lower")[0] == 2
    onnx.save(model_of("g (float[2] x) => (float[2] y) { y = com.microsoft.YieldOp(x) }"), tmp_path / "model.onnx")
    assert "YieldOp" in fails("lower", tmp_path / "model.onnx", "-o", tmp_path / "plain.onnx")
    assert not (tmp_path / "plain.onnx").exists()


def test_a_model_with_data_in_other_files_is_lowered_in_their_folder(tmp_path):
    text = "g (float[n, 3] x) => (float[n, 2] y) { t = MatMul(x, w)  y = com.microsoft.ReluGrad(t, t) }"
    model = model_of(text, {"w": np.zeros((3, 2), np.float32)})
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "other").mkdir()
    for target, status in ((tmp_path / "other" / "plain.onnx", 1), (tmp_path / "plain.onnx", 0)):
        assert cli("lower", tmp_path / "model.onnx", "-o", target)[0] == status
        assert target.exists() == (status == 0)
    assert inspect(tmp_path / "plain.onnx").runs


def test_types_go_from_node_to_node():
    """Not even onnx knows the type of t, and an operator that nobody has stands on the way."""
    text = """g (float[2, 3] x) => (double[2, 3] y, bool[2, 3] z) {
        t = com.microsoft.ReluGrad(x, x)  u = Cast<to=11>(t)  v = com.microsoft.ReluGrad(u, u)
        w = com.microsoft.NoSuchOperator(v)  y = com.microsoft.ReluGrad(w, w)  z = Equal(y, y)
    }"""
    found = runners(text)
    assert found.pop("NoSuchOperator") == (NOBODY, 1)
    assert found == {"ReluGrad": (OPGRAD, 3), "Cast": (NATIVE, 1), "Equal": (NATIVE, 1)}


def test_functions_of_the_model_and_graphs_within_nodes_count_as_a_whole():
    model = model_of(
        """g (float[2] x, bool c) => (float[2] y) { t = com.microsoft.Twice(x)
            y = If (c) <then_branch = a () => (float[2] p) { p = com.microsoft.ReluGrad(t, x) },
                        else_branch = b () => (float[2] q) { q = Identity(t) }> }
        <opset_import: ["": 17], domain: "com.microsoft"> Twice (v) => (w) { w = Add(v, v) }"""
    )
    model.functions[0].domain = "com.microsoft"
    assert {each.name: each.runner for each in operators(model)} == {"Twice": NATIVE, "If": OPGRAD}


def test_a_folder_without_some_of_the_files(tmp_path):
    shutil.copy(EXAMPLES / "digits" / "training_model.onnx", tmp_path)
    text = succeeds("inspect", tmp_path)
    assert "missing  eval_model.onnx, optimizer_model.onnx, checkpoint" in text
    assert [each.name for each in inspect(tmp_path).inputs] == ["pixels", "labels"]


def test_one_model_with_initializers(tmp_path):
    text = "g (float16[n, 3] x) => (float16[n, 2] y) { y = MatMul(x, w) }"
    onnx.save(model_of(text, {"w": np.zeros((3, 2), np.float16)}), tmp_path / "model.onnx")
    found = inspect(tmp_path / "model.onnx")
    assert [(each.name, each.kind, each.dtype, each.bytes) for each in found.parameters] == [
        ("w", "trainable", "float16", 12)
    ]
    assert found.runs
    succeeds("inspect", tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.onnx", b"\xff" * 100, "is no ONNX model, or damaged"),
        ("x.onnx", b"", "is no ONNX model, or empty"),
        ("", b"", "has none"),
    ],
)
def test_what_is_no_model_is_told_in_one_line(tmp_path, name, content, message):
    if name:
        (tmp_path / name).write_bytes(content)
    text = fails("inspect", tmp_path / name)
    assert message in text


def test_what_cannot_be_loaded_is_told_and_nothing_else(tmp_path):
    """The status of the command is no message. Names keep their brackets."""
    folder = tmp_path / "models [of mine]"
    folder.mkdir()
    model = model_of("g (float[2, 3] x) => (float y) { y = com.microsoft.Unknown_1(x) }")
    model.graph.node[0].op_type = "Unknown[bold]"
    onnx.save(model, folder / "model.onnx")
    status, text = cli("inspect", folder / "model.onnx")
    assert status == 1
    assert "opgrad:" not in text
    assert "nobody runs Unknown[bold]" in text
    # A long path is broken where the table ends.
    assert "models[ofmine]" in "".join(text.split())
    model = model_of("g (float[2, 3] x) => (float[5] y) { y = Relu(x) }")
    model.graph.node.add(op_type="Add", input=["y", "missing"], output=["z"])
    onnx.save(model, folder / "model.onnx")
    status, text = cli("inspect", folder / "model.onnx")
    assert (status, "opgrad:" in text, text.count("cannot run:")) == (1, False, 1)


def test_attention_that_training_finds_and_why_not(tmp_path):
    text = """g (float[n, 2, 5, 4] q) => (float[n, 2, 5, 4] y) {
        k = MatMul (q, w)  t = Transpose <perm = [0, 1, 3, 2]> (k)  s = MatMul (q, t)  p = Softmax <axis = -1> (s)
        a = MatMul (p, k)  b = MatMul (a, t)  c = Sigmoid (b)  r = Softmax <axis = -1> (c)  y = MatMul (r, k)
    }"""
    onnx.save(model_of(text, {"w": np.eye(4, dtype=np.float32) / 2}), tmp_path / "two.onnx")
    found = inspect(tmp_path / "two.onnx").training
    assert found is not None
    assert [bool(each.reason) for each in found.attention] == [False, True]
    text = succeeds("inspect", tmp_path / "two.onnx")
    assert "found 1 time: no matrix of scores is kept" in text
    assert "(node 'n7'): its input is no product of queries and keys" in " ".join(text.split())
