"""Language models as training takes them: without caches, in float16 and bfloat16, with the roles of products."""

import language_models
import numpy as np
import onnx
import onnxruntime
import pytest
from halved_models import KINDS, halved
from language_models import WORDS, Writer, add_behind_table, make_folder, make_model, mean_loss, scores
from onnx import TensorProto, helper, numpy_helper
from small_models import perceptron

from opgrad.onnx.graph.messages import keep
from opgrad.onnxruntime import InferenceSession
from opgrad.training.engine.trainer import Trainer
from opgrad.training.files.tensor_values import array_of
from opgrad.tune import Tuner
from opgrad.tune.language_model import read
from opgrad.tune.lora import Lora, choose, experts_note, module_of

SIZE = 5 + len(WORDS)


@pytest.mark.parametrize("cached", [False, True])
def test_graph_without_caches(tmp_path, cached):
    folder = make_folder(tmp_path, cached=cached, width=64)
    base = read(folder / "model.onnx")
    assert [each.name for each in base.model.graph.input] == ["input_ids"]
    tokens = np.random.default_rng(0).integers(0, SIZE, (2, 7))
    feeds = {"attention_mask": np.ones_like(tokens)} if cached else {}
    nothing = np.zeros((2, 1, 0, 32), np.float32)
    feeds |= {f"past_key_values.{n}.{what}": nothing for n in range(2 * cached) for what in ("key", "value")}
    whole = scores(folder / "model.onnx", tokens, feeds)
    np.testing.assert_allclose(scores(base.model, tokens), whole, rtol=1e-5, atol=1e-5)


def with_past(model, order=(0, 1, 2), size="kv_cache_dim", kind=TensorProto.FLOAT):
    """Let keys and values stand behind caches, whose axes have this order, and add rows of a table by the place."""
    graph, nodes = model.graph, []
    axes = [("batch_size", "past_sequence_length", size)[axis] for axis in order]
    for node in graph.node:
        for place in (1, 2) if node.op_type == "Attention" else ():
            name, new = f"past_key_values.{len(nodes)}", node.input[place]
            graph.input.append(helper.make_tensor_value_info(name, kind, axes))
            turned = helper.make_node("Transpose", [name], [f"{name}.turned"], perm=np.argsort(order).tolist())
            cast = helper.make_node("Cast", [f"{name}.turned"], [f"{name}.cast"], to=TensorProto.FLOAT)
            node.input[place] = f"{name}.all"
            nodes += [turned, cast, helper.make_node("Concat", [f"{name}.cast", new], [f"{name}.all"], axis=1)]
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
        if len(nodes) == 1:
            graph.input.append(helper.make_tensor_value_info("cache_position", TensorProto.INT64, ["sequence_length"]))
            table = np.random.default_rng(1).standard_normal((16, 32)).astype(np.float32)
            graph.initializer.append(numpy_helper.from_array(table, "places"))
            own, first = node.output[0], "/model/places"
            nodes.append(helper.make_node("Gather", ["places", "cache_position"], [first], first))
            nodes.append(helper.make_node("Add", [own, first], ["embedded"], f"{first}/Add"))
    for node in nodes[3:]:
        node.input[:] = ["embedded" if each == own else each for each in node.input]
    keep(graph.node, nodes)
    return model


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2)])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_axis_of_the_past_follows_from_the_graph(tmp_path, order, kind):
    """Other axes may have names, too; places of tokens, which are no cache, count in each row."""
    model = with_past(make_model(SIZE, shared=2), order, kind=kind)
    onnx.save(model, tmp_path / "model.onnx")
    base = read(tmp_path / "model.onnx")
    tokens = np.random.default_rng(0).integers(0, SIZE, (2, 7))
    nothing = np.zeros([(2, 0, 32)[axis] for axis in order], np.float32 if kind == TensorProto.FLOAT else np.float16)
    feeds = {each.name: nothing for each in model.graph.input if each.name.startswith("past")}
    whole = scores(model, tokens, {"cache_position": np.arange(7), **feeds})
    np.testing.assert_allclose(scores(base.model, tokens), whole, rtol=1e-5, atol=1e-5)


def test_states_of_convolutions_are_zeros(tmp_path):
    """A cache of keys is empty; a convolution reads as many tokens before the first as its kernel does."""
    found = []
    for nodes in ("c = Concat<axis = 2>(past_conv, t)  v = Conv<group = 32>(c, w)",
                  "v = Conv<group = 32, pads = [2, 0]>(t, w)"):  # fmt: skip
        model = make_model(SIZE)
        state = helper.make_tensor_value_info("past_conv", TensorProto.FLOAT, ["batch_size", 32, 2])
        model.graph.input.extend([state] if "past" in nodes else [])
        turned = "Transpose<perm = [0, 2, 1]>"
        add_behind_table(model, f"t = {turned}(x)  {nodes}  e = {turned}(v)  y = Add(x, e)")
        onnx.save(model, tmp_path / "model.onnx")
        found.append(scores(read(tmp_path / "model.onnx").model, np.arange(14).reshape(2, 7)))
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_caches_that_are_not_understood(tmp_path):
    model = with_past(make_model(SIZE, shared=2))
    for node in model.graph.node:
        if node.op_type == "Concat":
            node.op_type = "Max"
            del node.attribute[:]
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(NotImplementedError, match=r"the cache 'past_key_values.7', whose axes \[1, 2\] have unknown"):
        read(tmp_path / "model.onnx")


def test_roles_and_layers(tmp_path):
    base = read(make_folder(tmp_path) / "model.onnx")
    assert [(each.layer, each.role) for each in base.products] == [
        (-1, "embedding"),
        *((layer, role) for layer in (0, 1) for role in ("q", "k", "v", "o", "gate", "up", "down")),
        (-1, "head"),
    ]
    assert (base.vocabulary, base.width, base.tokens, base.logits) == (SIZE, 32, "input_ids", "logits")


class Parallel(Writer):
    """Layers whose attention and perceptron read the same, as Phi's; the first one convolves, as LFM2's."""

    def layer(self, x, number):
        name = f"model.layers.{number}"
        normal = self.norm(x, f"{name}.input_layernorm")
        mixed = self.product(normal, f"{name}.in_proj", self.width, self.width)
        if number:
            mixed = self.attention(mixed, mixed, mixed, number)
        else:
            mixed = self.node("CausalConvWithState", [mixed, self.weight("conv", self.width, 1, 3)], "/conv")
        mixed = self.product(mixed, f"{name}.out_proj", self.width, self.width)
        inner = self.node("Gelu", [self.product(normal, f"{name}.mlp.fc1", self.width, 64)], f"/{name}/gelu")
        inner = self.product(inner, f"{name}.mlp.fc2", 64, self.width)
        return self.node("Add", [self.node("Add", [x, mixed], f"/{name}/add"), inner], f"/{name}/add_1")


class Guarded(Writer):
    """Attention as torch.onnx.export writes it of a model with a mask, and with dropout: no number becomes 0."""

    def attention(self, q, k, v, number):
        name = f"/attention.{number}"
        nothing, least = (self.constant(np.full([1], value, np.float32), f"{name}.{value}") for value in (0, -np.inf))
        scores = self.node("MatMul", [q, self.node("Transpose", [k], f"{name}/k", perm=[0, 2, 1])], f"{name}/scores")
        here = self.node("LessOrEqual", [scores, scores], f"{name}/mask")
        given = [here, scores, least] if number else [self.node("Not", [here], f"{name}/not"), least, scores]
        softmax = self.node("Softmax", [self.node("Where", given, f"{name}/masked")], f"{name}/softmax")
        guard = self.node("IsNaN", [softmax], f"{name}/guard")
        kept = self.node("Dropout", [self.node("Where", [guard, nothing, softmax], f"{name}/where")], f"{name}/dropout")
        return self.node("MatMul", [kept, v], name)


ROLES = ["q", "k", "v", "o", "gate", "up", "down"]
OF_PARALLEL = [["other", "other", "up", "down"], ["qkv", "o", "up", "down"]]


@pytest.mark.parametrize(("writer", "roles"), [(Guarded, [ROLES, ROLES]), (Parallel, OF_PARALLEL)])
def test_roles_behind_a_guard_and_in_parallel_layers(tmp_path, monkeypatch, writer, roles):
    monkeypatch.setattr(language_models, "Writer", writer)
    onnx.save(make_model(SIZE, shared=2), tmp_path / "model.onnx")
    found = [(each.layer, each.role) for each in read(tmp_path / "model.onnx").products]
    assert found[1:-1] == [(layer, role) for layer, each in enumerate(roles) for role in each]


class Experts(Writer):
    def product(self, x, name, rows, columns):
        y = super().product(x, name, rows, columns)
        if not name.endswith("o_proj"):
            return y
        wide, router = self.constant(np.array([-1, columns]), f"{name}.wide"), self.weight(f"{name}.router", columns, 4)
        flat = self.node("Reshape", [y, wide], f"/{name}.flat")
        given = [flat, self.node("MatMul", [flat, router], f"/{name}.routed")]
        given += [self.weight("experts.fc1", 4, 64, columns), "", self.weight("experts.fc2", 4, columns, 64)]
        z = self.node("MoE", given, "/experts/moe", "com.microsoft", k=2, activation_type="relu")
        return self.node("Reshape", [z, self.node("Shape", [y], f"/{name}.shape")], f"/{name}.back")


@pytest.mark.parametrize("target", ["experts.fc1", "*moe|q_proj"])
def test_experts_have_no_adapters(tmp_path, monkeypatch, target):
    monkeypatch.setattr(language_models, "Writer", Experts)
    onnx.save(make_model(SIZE, shared=2, layers=1), tmp_path / "model.onnx")
    base = read(tmp_path / "model.onnx")
    with pytest.raises(NotImplementedError, match=r"MoE \(node '/experts/moe'\) can have no adapter"):
        choose(base, [Lora(target=target)])
    found = choose(base, [Lora(target="all-linear")])
    assert {each.product.op for each in found} == {"MatMul"}
    assert "experts none ('/experts/moe')" in experts_note(base, found)[0]


def changed(tmp_path, write, **given):
    """A folder whose model `write` has changed: the nodes before the last one, which copies the scores."""
    model = make_model(SIZE, **given)
    write(model.graph)
    onnx.save(model, tmp_path / "model.onnx")
    return read(tmp_path / "model.onnx")


def test_paths_of_nodes_lack_a_module_whose_parts_are_called(tmp_path):
    def call_parts(graph):
        for node in graph.node:
            node.name = node.name.replace("/model/", "/", 1)
            node.input[:] = ["onnx::MatMul_7" if "1.self_attn.q_proj" in name else name for name in node.input]
        next(each for each in graph.initializer if "1.self_attn.q_proj" in each.name).name = "onnx::MatMul_7"

    names = {module_of(each) for each in changed(tmp_path, call_parts).products}
    assert {f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)} | {"lm_head"} <= names


def test_softcap_of_scores(tmp_path):
    def cap(graph):
        graph.initializer.append(numpy_helper.from_array(np.float32(2), "cap"))
        scores = graph.node.pop().input[0]
        for op, inputs, y in (("Div", [scores, "cap"], "a"), ("Tanh", ["a"], "b"), ("Mul", ["b", "cap"], "logits")):
            graph.node.append(helper.make_node(op, inputs, [y]))

    base = changed(tmp_path, cap)
    tokens = np.random.default_rng(0).integers(0, SIZE, (2, 6))
    plain = scores(read(make_folder(tmp_path / "plain") / "model.onnx").model, tokens)
    np.testing.assert_allclose(scores(base.model, tokens), 2 * np.tanh(plain / 2), rtol=1e-5, atol=1e-5)
    assert "LinearCrossEntropyLoss" not in {node.op_type for node in base.with_loss().model.graph.node}


@pytest.mark.parametrize("how", ["gathered", "squeezed", "as many as an input says"])
def test_scores_of_the_last_token_alone(tmp_path, how):
    """A model for generation may compute no others; training needs all."""

    def prune(graph):
        index = np.array(-1 if how == "squeezed" else [-1])
        tensors = {"last": index, "one": np.array([1]), "end": np.array([2**62])}
        graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in tensors.items())
        product, copy = graph.node[-2:]
        nodes = [helper.make_node("Gather", [product.input[0], "last"], ["last_row"], axis=1)]
        if how == "squeezed":
            nodes.append(helper.make_node("Unsqueeze", ["last_row", "one"], ["last_rows"]))
        elif how != "gathered":  # optimum's
            graph.input.append(helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, []))
            nodes = [helper.make_node("Neg", ["num_logits_to_keep"], ["start"])]
            nodes.append(helper.make_node("Reshape", ["start", "one"], ["starts"]))
            given = [product.input[0], "starts", "end", "one"]
            nodes.append(helper.make_node("Slice", given, ["last_rows"]))
        product.input[0] = nodes[-1].output[0]
        keep(graph.node, [*graph.node[:-2], *nodes, product, copy])
        graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1

    base = changed(tmp_path, prune)
    tokens = np.random.default_rng(0).integers(0, SIZE, (2, 6))
    plain = scores(read(make_folder(tmp_path / "plain") / "model.onnx").model, tokens)
    np.testing.assert_allclose(scores(base.model, tokens), plain, rtol=1e-6, atol=1e-6)


def test_norms_and_sliding_caches_of_attention(tmp_path):
    """GroupQueryAttention has both in itself for GPUs; without a past the window is left."""

    def widen(graph):
        graph.initializer.append(numpy_helper.from_array(np.linspace(1, 2, 32, dtype=np.float32), "normal"))
        for node in graph.node:
            if node.op_type == "GroupQueryAttention":
                node.input.extend([*[""] * 5, "normal", "normal"])
                given = {"sliding_window_cache": 1, "local_window_size": 3, "qk_norm_epsilon": 1e-5}
                node.attribute.extend(helper.make_attribute(*each) for each in given.items())

    base = changed(tmp_path, widen, cached=True, width=64)
    tokens = np.random.default_rng(0).integers(0, SIZE, (1, 7))
    own = scores(base.model, tokens)
    far = scores(base.model, np.concatenate([tokens[:, 1:2], tokens[:, 1:]], 1))
    np.testing.assert_array_equal(own[:, 5:], far[:, 5:])  # two layers of windows of three reach no farther
    assert np.abs(own[:, 4] - far[:, 4]).max() > 1e-4
    q = next(each for each in base.products if each.role == "q")
    shown = onnx.ModelProto.FromString(base.model.SerializeToString())
    names = ["logits", q.output, next(each.input[0] for each in shown.graph.node if each.op_type.startswith("Group"))]
    shown.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names[1:])
    session = onnxruntime.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
    _, x, y = session.run(names, {"input_ids": tokens})
    x = x.reshape(1, 7, 2, 32)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * np.linspace(1, 2, 32)
    np.testing.assert_allclose(y, x.reshape(1, 7, 64), rtol=1e-5, atol=1e-5)


def test_products_that_do_not_reach_the_scores(tmp_path):
    def cut(graph):
        last = next(each for each in graph.node if each.name == "/model/layers.1/input_layernorm/LayerNorm")
        own = last.input[0]
        final = next(each for each in graph.node if each.name == "/model/norm/LayerNorm")
        final.input[0] = own

    assert changed(tmp_path, cut).unreached == 7
    assert read(make_folder(tmp_path / "whole") / "model.onnx").unreached == 0


def test_roles_without_names(tmp_path):
    """Roles come from the graph: names say nothing here."""
    model = make_model(SIZE)
    names = {name: f"v{place}" for place, name in enumerate(
        dict.fromkeys(each for node in model.graph.node for each in (*node.input, *node.output)))}  # fmt: skip
    names |= {"input_ids": "input_ids", "logits": "logits"}
    for place, node in enumerate(model.graph.node):
        node.name = f"n{place}"
        node.input[:] = [names[each] for each in node.input]
        node.output[:] = [names[each] for each in node.output]
    for each in model.graph.initializer:
        each.name = names[each.name]
    onnx.save(model, tmp_path / "model.onnx")
    base = read(tmp_path / "model.onnx")
    assert [each.role for each in base.products if each.layer == 1] == ["q", "k", "v", "o", "gate", "up", "down"]
    assert len(choose(base, [Lora()])) == 8


@pytest.mark.parametrize("weights", [None, [[0, 0, 1, 0.5, 2, 0], [3, 0, 0, 0, 0.25, 1]]])
@pytest.mark.parametrize("is_trained", [False, True])
def test_loss_is_the_mean_over_labels(tmp_path, is_trained, weights):
    """By one node with the last product, or beside it if its weight is trained."""
    base = read(make_folder(tmp_path) / "model.onnx")
    tokens = np.random.default_rng(0).integers(0, SIZE, (2, 6))
    counted = np.array(weights or [[0, 0, 0, 1, 1, 1]] * 2, np.float32)
    feeds = {"input_ids": tokens, "labels": np.where(counted > 0, tokens, -100)}
    feeds |= {"weights": counted} if weights else {}
    model = base.with_loss([base.head.weight] if is_trained else [], weighted=bool(weights)).model
    expected = "SoftmaxCrossEntropyLoss" if is_trained else "LinearCrossEntropyLoss"
    assert weights or expected in {node.op_type for node in model.graph.node}
    found = InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    assert found == pytest.approx(mean_loss(scores(base.model, tokens), tokens, counted), rel=1e-5)


def test_what_is_no_language_model(tmp_path):
    onnx.save(perceptron(), tmp_path / "other.onnx")
    with pytest.raises(ValueError, match="has the inputs x, expected input_ids, integers of shape"):
        read(tmp_path / "other.onnx")


def test_inputs_that_are_unknown(tmp_path):
    model = make_model(SIZE)
    model.graph.input.append(helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3]))
    first = model.graph.node[0]
    model.graph.node.append(helper.make_node("Add", ["logits", "pixels"], ["mixed"]))
    model.graph.output[0].name = "mixed"
    assert first.op_type == "Gather"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(NotImplementedError, match="has the input 'pixels', expected tokens, masks, positions"):
        read(tmp_path / "model.onnx")


def halved_folder(folder, kind, back=False):
    """A folder whose model has its floats in halves; back: as float32 again, rounded."""
    make_folder(folder)
    onnx.save(halved(onnx.load(folder / "model.onnx"), kind, back), folder / "model.onnx")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_computes_in_float32_with_the_stored_weights(tmp_path, kind):
    rounded = halved_folder(tmp_path / "back", kind, back=True) / "model.onnx"
    base = read(halved_folder(tmp_path / "halves", kind) / "model.onnx")
    tokens = np.random.default_rng(0).integers(0, SIZE, (2, 6))
    np.testing.assert_allclose(scores(base.model, tokens), scores(rounded, tokens), rtol=1e-4, atol=1e-5)
    stored = {each.name: each.data_type for each in base.model.graph.initializer}
    assert stored[base.head.weight] == kind
    assert len([each for each in base.products if each.layer == 1]) == 7


@pytest.mark.parametrize("train", [(), ("*",)], ids=["adapters", "weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_in_float32(tmp_path, kind, train):
    """Losses and scores are those of float32 with the same rounded weights; what is saved is rounded again."""
    losses, scores_of_one, tokens = [], [], np.arange(12).reshape(2, 6)
    for back in (True, False):
        tuner = Tuner(halved_folder(tmp_path / str(back), kind, back), train=train, seed=3)
        artifacts = tuner.adapted.setting(2, 6).artifacts
        assert {each.dtype for each in artifacts.trainable.values()} == {np.dtype("float32")}
        assert train or "LinearCrossEntropyLoss" in {node.op_type for node in artifacts.eval_model.graph.node}
        trainer = Trainer(artifacts, learning_rate=0.01)
        losses.append([trainer.step(dict.fromkeys(("input_ids", "labels"), tokens)) for _ in range(3)])
        tuner.adapted.use(trainer.parameters)
        scores_of_one.append(tuner.adapted.computing()({tuner.adapted.base.tokens: tokens[:1]})[0, -1])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[0][2] < losses[0][0]
    np.testing.assert_allclose(scores_of_one[1], scores_of_one[0], rtol=1e-3, atol=1e-4)
    tuner.save(tmp_path / "tuned")
    saved = {each.name: each for each in onnx.load(tmp_path / "tuned/model.onnx").graph.initializer}
    for name, array in trainer.parameters.items() if train else ():
        assert saved[name].data_type == kind
        np.testing.assert_array_equal(array_of(saved[name]), array.astype(KINDS[kind]))


def test_what_was_trained_of_a_float16_model_loads_in_onnxruntime(tmp_path):
    tuner = Tuner(halved_folder(tmp_path / "base", TensorProto.FLOAT16))
    tuner.adapted.values = {name: np.full_like(each, 0.01) for name, each in tuner.values.items()}
    tuner.save(tmp_path / "tuned")
    found = scores(tmp_path / "tuned/model.onnx", np.random.default_rng(0).integers(0, SIZE, (1, 6)))
    assert found.dtype == np.float16
    assert np.isfinite(found.astype(np.float32)).all()
