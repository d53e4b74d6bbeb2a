"""Adapters: where they are, beside products of every kind, what they compute and learn, their files."""

import json

import numpy as np
import onnx
import pytest
from language_models import WORDS, make_folder, make_model, mean_loss, scores
from onnx import TensorProto, helper, numpy_helper
from runtime_cases_packed import packed as packed_weights

from opgrad.onnx.graph.messages import copied, keep
from opgrad.onnx.graph.nodes import rename
from opgrad.training.engine.trainer import Trainer
from opgrad.training.files import tensor_values, weights
from opgrad.training.files.artifact_set import AdamWRule
from opgrad.training.make.selection import torn_note, turned_note
from opgrad.tune import Tuner, outputs, peft
from opgrad.tune.language_model import read
from opgrad.tune.lora import Lora, choose, insert
from opgrad.tune.outputs import write_tuned
from opgrad.tune.trained_set import ends_of_layers, prepare, scoring

SIZE = 5 + len(WORDS)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return read(make_folder(tmp_path_factory.mktemp("model")) / "model.onnx")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank=8, alpha=16, target=*q_proj*|*v_proj*", Lora(8, 16.0, "*q_proj*|*v_proj*")),
        ("rank=2,rslora=true,dropout=0.1", Lora(2, rslora=True, dropout=0.1)),
        ("", Lora()),
    ],
)
def test_options(text, expected):
    assert Lora.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=0", "rank is 0, expected a whole number from 1 to 4096"),
        ("rank=two", "rank is 'two', expected a number"),
        ("alpha=-1", "alpha is -1.0, expected a number above 0"),
        ("alpha=nan", "alpha is nan, expected a number above 0"),
        ("dropout=1", "dropout is 1.0, expected a number from 0 to below 1"),
        ("rslora=yes", "rslora is 'yes', expected true or false"),
        ("ranks=8", "lora has 'ranks=8', expected NAME=VALUE with one of rank"),
    ],
)
def test_wrong_options(text, message):
    with pytest.raises(ValueError, match=message):
        Lora.parse(text)


@pytest.mark.parametrize(
    ("target", "modules"),
    [
        (None, ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("*q_proj*|*v_proj*", ["q_proj", "v_proj"]),
        ("q_proj|down_proj", ["q_proj", "down_proj"]),
        ("gate|up", ["gate_proj", "up_proj"]),
        ("all-linear", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_targets(base, target, modules):
    chosen = choose(base, [Lora(target=target)])
    assert [each.name.rpartition(".")[2] for each in chosen] == modules * 2


def test_first_fitting_options_count(base):
    chosen = choose(base, [Lora(4, target="q_proj"), Lora(8, target="q_proj|v_proj")])
    assert [each.lora.rank for each in chosen] == [4, 8, 4, 8]


def test_target_that_is_nothing(base):
    with pytest.raises(ValueError, match=r"lora has the target 'qq_proj', expected patterns of names such as .*q_proj"):
        choose(base, [Lora(target="qq_proj")])


def values_of(adapters, seed=0):
    generator = np.random.default_rng(seed)
    shapes = {name: shape for each in adapters for name, shape in each.shapes.items()}
    return {name: generator.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}


TOKENS = np.random.default_rng(0).integers(0, SIZE, (2, 5))


def test_all_forms_compute_the_same(base):
    """As inputs, as nodes with values, and merged into the weights; without values the base is as it was."""
    adapters = choose(base, [Lora(3, 5.0, "all-linear"), Lora(2, 8.0, "embed_tokens", rslora=True)])
    values = values_of(adapters)
    with_inputs = outputs.with_inputs(base, adapters)
    np.testing.assert_array_equal(scores(with_inputs, TOKENS), scores(base.source, TOKENS))
    given = scores(with_inputs, TOKENS, outputs.scaled(base, adapters, values))
    model, held = outputs.merged(base, adapters, values)
    np.testing.assert_allclose(scores(with_values(model, held), TOKENS), given, rtol=1e-4, atol=1e-4)
    assert np.abs(given - scores(base.source, TOKENS)).max() > 0.1


def with_values(model, held):
    """A model with the values of its placeholders."""
    for each in model.graph.initializer:
        if each.name in held:
            each.CopyFrom(numpy_helper.from_array(held[each.name], each.name))
    return model


def renamed(model, old, new):
    """A model in which a value has another name."""
    for node in model.graph.node:
        rename(node, {old: new})
    return model


def all_forms(file, loras):
    """Of a model with adapters of random values: its own scores, those as inputs, and those merged; the merged model.

    The graph with inputs gives the model's own scores without values, and the one for training the same as merged.
    """
    base = read(file)
    adapters = choose(base, loras)
    values, plain = values_of(adapters), scores(onnx.load(file), TOKENS)
    with_inputs = outputs.with_inputs(base, adapters)
    np.testing.assert_array_equal(scores(with_inputs, TOKENS), plain)
    trained = copied(base.model)
    trained.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    insert(trained, adapters)
    given = scores(with_inputs, TOKENS, outputs.scaled(base, adapters, values))
    merged = with_values(*outputs.merged(base, adapters, values))
    np.testing.assert_allclose(scores(merged, TOKENS), given, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(scores(trained, TOKENS), given, rtol=1e-4, atol=1e-4)
    assert np.abs(given - plain).max() > 0.1
    return merged


@pytest.mark.parametrize("target", ["lm_head", "lm_head|all", "o_proj"])
def test_products_whose_results_are_outputs(tmp_path, target):
    """The sum takes the output's name, also where other nodes read it; the last product makes the scores itself."""
    model = make_model(SIZE)
    copy = model.graph.node.pop()
    assert (copy.op_type, list(copy.output)) == ("Identity", ["logits"])
    renamed(model, copy.input[0], "logits")
    name = next(node.output[0] for node in model.graph.node if "layers.1/self_attn/o_proj" in node.name)
    renamed(model, name, "attended").graph.output.append(
        helper.make_tensor_value_info("attended", TensorProto.FLOAT, ["batch_size", "sequence_length", 32])
    )
    onnx.save(model, tmp_path / "model.onnx")
    loras = [Lora(3, 6.0, target.replace("all", "q_proj|o_proj"))]
    assert [each.name for each in all_forms(tmp_path / "model.onnx", loras).graph.output] == ["logits", "attended"]


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_weights_that_two_products_share_are_not_merged(tmp_path, target):
    """An adapter changes its own product alone."""
    model = make_model(SIZE)
    head = next(node for node in model.graph.node if node.name == "/lm_head/MatMul")
    turned = helper.make_node("Transpose", ["model.embed_tokens.weight"], ["turned"], "/lm_head/Transpose", perm=[1, 0])
    head.input[1] = "turned"
    model.graph.node.insert(0, turned)
    keep(model.graph.initializer, [each for each in model.graph.initializer if each.name != "lm_head.weight"])
    onnx.save(model, tmp_path / "model.onnx")
    merged = all_forms(tmp_path / "model.onnx", [Lora(3, 6.0, target)])
    stored, before = (
        next(numpy_helper.to_array(each) for each in model.graph.initializer if "embed_tokens.weight" in each.name)
        for model in (merged, onnx.load(tmp_path / "model.onnx"))
    )
    np.testing.assert_array_equal(stored, before)


def packed():
    """A model whose queries, keys and values are one product, which a Split node parts."""
    model = make_model(SIZE)
    weights = {each.name: each for each in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if "q_proj" in node.name:
            module = node.input[1].removesuffix("q_proj.weight")
            own = [numpy_helper.to_array(weights[f"{module}{role}_proj.weight"]) for role in "qkv"]
            name, x, made = f"{module}qkv_proj.weight", node.input[0], node.output[0]
            made = [made.replace("q_proj", f"{role}_proj") for role in "qkv"]
            model.graph.initializer.extend([
                numpy_helper.from_array(np.concatenate(own, 1), name),
                numpy_helper.from_array(np.array([each.shape[1] for each in own]), f"{module}sizes"),
            ])  # fmt: skip
            nodes.append(helper.make_node("MatMul", [x, name], [f"{module}qkv"], f"{node.name}_qkv"))
            nodes.append(helper.make_node("Split", [f"{module}qkv", f"{module}sizes"], made, axis=-1))
        elif "k_proj" not in node.name and "v_proj" not in node.name:
            nodes.append(node)
    keep(model.graph.node, nodes)
    return model


def test_slices_of_a_packed_product(tmp_path, base):
    """Adapters beside slices of one product compute what those beside three products do, under the same names."""
    onnx.save(packed(), tmp_path / "model.onnx")
    other = read(tmp_path / "model.onnx")
    assert [each.role for each in other.products if each.parts] == ["qkv", "qkv"]
    for target in ("q|v", "v", "q|k|v"):
        plain, sliced = (choose(each, [Lora(3, target=target)]) for each in (base, other))
        assert [each.name for each in plain] == [each.name for each in sliced]
        values = values_of(plain)
        results = [
            scores(outputs.with_inputs(each, adapters), TOKENS, outputs.scaled(each, adapters, values))
            for each, adapters in ((base, plain), (other, sliced))
        ]
        np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)


def test_files_of_onnxruntime_and_of_peft(tmp_path, base):
    folder = make_folder(tmp_path / "model")
    adapters = choose(base, [Lora(3, 6.0, "q_proj|down_proj"), Lora(2, 6.0, "embed_tokens")])
    values = values_of(adapters)
    (tmp_path / "tuned").mkdir()
    names = write_tuned(tmp_path / "tuned", base, folder / "model.onnx", adapters, values, {})
    assert {"adapter.onnx_adapter", "model.onnx", peft.CONFIG, peft.WEIGHTS, "tokenizer.json"} <= set(names)
    found = scores(tmp_path / "tuned/model.onnx", TOKENS, adapter=tmp_path / "tuned/adapter.onnx_adapter")
    expected = scores(outputs.with_inputs(base, adapters), TOKENS, outputs.scaled(base, adapters, values))
    np.testing.assert_array_equal(found, expected)
    again, read_values = peft.read(tmp_path / "tuned", base)
    assert [each.name for each in again] == [each.name for each in adapters]
    assert [(each.lora.rank, each.lora.alpha) for each in again] == [(each.lora.rank, 6.0) for each in adapters]
    for name, array in values.items():
        np.testing.assert_array_equal(read_values[name], array)


@pytest.mark.parametrize(
    ("kind", "target", "names"),
    [
        ("phi", "q_proj|o_proj", {"self_attn.q_proj", "self_attn.dense"}),
        ("lfm2", "o_proj|gate_proj|up_proj|down_proj", {"self_attn.out_proj", *(f"feed_forward.w{n}" for n in "123")}),
        ("phi3", "q_proj|v_proj|up_proj", {"self_attn.qkv_proj", "mlp.gate_up_proj"}),
        ("llama", "q_proj", {"self_attn.q_proj"}),
    ],
)
@pytest.mark.parametrize("rslora", [False, True])
def test_names_of_transformers(tmp_path, kind, target, names, rslora):
    """Several products here may be one module there, which gets the ranks of all; they are apart again when read."""
    folder = make_folder(tmp_path / "model")
    (folder / "genai_config.json").write_text(json.dumps({"model": {"type": kind}}))
    base = read(folder / "model.onnx")
    adapters = choose(base, [Lora(3, 6.0, "v_proj", rslora=rslora), Lora(2, 5.0, target, rslora=rslora)])
    values = values_of(adapters)
    (tmp_path / "peft").mkdir()
    peft.write(tmp_path / "peft", base, adapters, values)
    tensors, _, _ = weights.decode_tensors((tmp_path / "peft" / peft.WEIGHTS).read_bytes())
    found = {name.split(".lora_")[0].removeprefix("base_model.model.model.layers.") for name in tensors}
    assert found == {f"{layer}.{name}" for layer in (0, 1) for name in {*names, "self_attn.v_proj"} - (
        {"self_attn.v_proj"} if kind == "phi3" else set())}  # fmt: skip
    again, others = peft.read(tmp_path / "peft", base)
    assert {each.name for each in again} >= {each.name for each in adapters}
    for each in again:
        whole = others[each.a] @ others[each.b] * each.lora.scale
        given = next((own for own in adapters if own.name == each.name), None)
        expected = 0 if given is None else values[given.a] @ values[given.b] * given.lora.scale
        np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6)
        assert given is None or given.lora.rank == each.lora.rank


def test_module_of_peft_that_is_several(tmp_path):
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    base, module = read(folder / "model.onnx"), "base_model.model.model.layers.1.self_attn.qkv_proj"
    a, b = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((4, 32), (64, 4)))
    tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    given, _ = peft_folder(tmp_path / "peft", r=4, lora_alpha=2, target_modules=["qkv_proj"])
    (given / peft.WEIGHTS).write_bytes(weights.encode_tensors(tensors, {"format": "pt"}))
    adapters, values = peft.read(given, base)
    assert [each.name.rpartition(".")[2] for each in adapters] == ["q_proj", "k_proj", "v_proj"]
    whole = np.concatenate([values[each.a] @ values[each.b] * each.lora.scale for each in adapters], 1)
    np.testing.assert_allclose(whole, (a.T @ b.T) * 0.5, rtol=1e-5, atol=1e-6)


def peft_folder(folder, **changes):
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]} | changes
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.{what}.weight": np.ones(shape, np.float32)
        for layer in (0, 1)
        for what, shape in (("lora_A", (2, 32)), ("lora_B", (32, 2)))
    }
    (folder / peft.CONFIG).write_text(json.dumps(config))
    (folder / peft.WEIGHTS).write_bytes(weights.encode_tensors(tensors, {"format": "pt"}))
    return folder, tensors


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"peft_type": "LOHA"}, NotImplementedError, "peft_type is 'LOHA', expected 'LORA'"),
        ({"bias": "all"}, NotImplementedError, "bias is 'all', expected 'none'"),
        ({"modules_to_save": ["lm_head"]}, NotImplementedError, "modules_to_save is"),
        ({"r": 3}, ValueError, r"of another base: .* has shape \(2, 32\), expected \(3, 32\)"),
        ({"r": "x"}, ValueError, "rank is 'x', expected a whole number"),
    ],
)
def test_configurations_that_are_refused(tmp_path, base, changes, error, message):
    folder, _ = peft_folder(tmp_path, **changes)
    with pytest.raises(error, match=message):
        peft.read(folder, base)


def test_patterns_of_ranks(tmp_path, base):
    folder, _ = peft_folder(tmp_path, r=5, rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.self_attn.q_proj": 8})
    adapters, _ = peft.read(folder, base)
    assert [(each.lora.rank, each.lora.alpha) for each in adapters] == [(2, 4), (2, 8)]


def test_adapter_of_other_modules(tmp_path, base):
    folder, tensors = peft_folder(tmp_path)
    tensors = {name.replace("layers.1", "layers.9"): array for name, array in tensors.items()}
    (folder / peft.WEIGHTS).write_bytes(weights.encode_tensors(tensors, {}))
    with pytest.raises(ValueError, match=r"is an adapter of another base: it has 'model.layers.9.self_attn.q_proj'"):
        peft.read(folder, base)


def test_damaged_adapter(tmp_path, base):
    folder, _ = peft_folder(tmp_path)
    (folder / peft.WEIGHTS).write_bytes((folder / peft.WEIGHTS).read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is damaged or cut short"):
        peft.read(folder, base)


def renamed_product():
    """A model of which a layer's weight has a name of an exporter's, while its bias has the module's."""
    model, q = make_model(SIZE), "model.layers.0.self_attn.q_proj"
    (node,) = (each for each in model.graph.node if f"{q}.weight" in each.input)
    weight = next(each for each in model.graph.initializer if each.name == f"{q}.weight")
    weight.name = node.input[1] = "val_7"
    model.graph.initializer.append(numpy_helper.from_array(np.ones(weight.dims[1], np.float32), f"{q}.bias"))
    result, node.name, node.output[0] = node.output[0], "", "product"
    place = list(model.graph.node).index(node) + 1
    model.graph.node.insert(place, helper.make_node("Add", ["product", f"{q}.bias"], [result]))
    return model, (f"{q}.bias", "val_7")


def test_weights_that_layers_share_are_told(tmp_path):
    model, name = make_model(SIZE), "model.layers.0.input_layernorm.weight"
    for node in model.graph.node:
        node.input[:] = [name if each == "model.layers.1.input_layernorm.weight" else each for each in node.input]
    onnx.save(model, tmp_path / "model.onnx")
    (note,) = Tuner(tmp_path / "model.onnx", train="*").adapted.setting().notes
    assert note.startswith(f"1 tensor read by several layers, trained as one: {name!r} by ")
    assert Tuner(tmp_path / "model.onnx", train="*down_proj*").adapted.setting().notes == ()
    held = {each.name: each for each in model.graph.initializer}
    table, head = (held[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    head.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table).T.copy(), head.name))
    onnx.save(model, tmp_path / "model.onnx")
    found = Tuner(tmp_path / "model.onnx", train=["*embed*", "lm_head.*"]).adapted.setting().notes
    assert found == (turned_note(head.name, table.name),)


def test_layers_that_a_pattern_takes_by_their_biases_alone_are_told(tmp_path):
    model, torn = renamed_product()
    onnx.save(model, tmp_path / "model.onnx")
    found = Tuner(tmp_path / "model.onnx", lora="rank=2, target=*self_attn*").adapted.setting().notes
    assert found == (torn_note(*torn),)
    found = Tuner(tmp_path / "model.onnx", train="model.layers.0.self_attn.*").adapted.setting().notes
    assert found == (torn_note(*torn),)
    for whole in ({"train": ["model.layers.0.self_attn.*", "val_7"]}, {"lora": "target=*self_attn*|val_7"}, {}):
        assert Tuner(tmp_path / "model.onnx", **whole).adapted.setting().notes == ()
    q = torn[0].removesuffix(".bias")
    next(each for each in model.graph.node if "val_7" in each.input).name = f"/{q.replace('.', '/')}/MatMul"
    onnx.save(model, tmp_path / "model.onnx")
    tuner = Tuner(tmp_path / "model.onnx", lora="target=*layers.0.self_attn.q_proj.weight")
    assert [each.product.weight for each in tuner.adapters] == ["val_7"]
    assert tuner.adapted.setting().notes == ()


PROMPT = np.random.default_rng(0).integers(0, 25, (2, 6))
BATCH = {"input_ids": PROMPT, "draw": np.ones(1, np.int64), "labels": np.roll(PROMPT, -1, 1)}


class Rewriter:
    """Writes products of a model's file as other operators; the new nodes have the names of the old ones."""

    def __init__(self, path):
        self.path, self.model, self.nodes = path, onnx.load(path), []
        self.weights = {each.name: numpy_helper.to_array(each) for each in self.model.graph.initializer}

    def constant(self, name, value):
        self.weights[name] = np.asarray(value)
        return name

    def node(self, op, inputs, output, name=None, **given):
        self.nodes.append(helper.make_node(op, inputs, [output], name or f"{output}/{op}", **given))
        return output

    def write(self, op, write, *arguments):
        """Let `write` write each node of an operator that has a weight, and save the model."""
        for node in self.model.graph.node:
            if node.op_type == op and self.weights.keys() & set(node.input):
                write(self, node, *arguments)
            else:
                self.nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
        keep(self.model.graph.node, self.nodes)
        keep(self.model.graph.initializer, [numpy_helper.from_array(*each[::-1]) for each in self.weights.items()])
        onnx.save(self.model, self.path)


def as_gemm(to, node, transposed, alpha):
    """Gemm with a bias; the tokens of all rows are its rows."""
    (x, weight), y = node.input, node.output[0]
    inputs, columns = to.weights[weight].shape
    if transposed:
        to.weights[weight] = np.ascontiguousarray(to.weights[weight].T)
    bias = to.constant(f"{weight}.bias", np.linspace(-1, 1, columns, dtype=np.float32))
    flat = to.node("Reshape", [x, to.constant(f"{y}.flat_sizes", [-1, inputs])], f"{y}.flat_x")
    given = {"transB": int(transposed), "alpha": alpha}
    flat = to.node("Gemm", [flat, weight, bias], f"{y}.flat", node.name, **given)
    batch = to.node("Shape", [x], f"{y}.batch", end=2)
    sizes = to.node("Concat", [batch, to.constant(f"{y}.columns", [columns])], f"{y}.sizes", axis=0)
    to.node("Reshape", [flat, sizes], y)


def as_conv(to, node):
    """Conv of a single point, with a bias; the tokens of a row are its places."""
    (x, weight), y = node.input, node.output[0]
    to.weights[weight] = np.ascontiguousarray(to.weights[weight].T)[:, :, None, None]
    columns = len(to.weights[weight])
    bias = to.constant(f"{weight}.bias", np.linspace(-1, 1, columns, dtype=np.float32))
    places = to.node("Transpose", [x], f"{y}.places", perm=[0, 2, 1])
    axis = to.constant("axis", [3])
    image = to.node("Unsqueeze", [places, axis], f"{y}.image_x")
    image = to.node("Conv", [image, weight, bias], f"{y}.image", node.name, kernel_shape=[1, 1])
    to.node("Transpose", [to.node("Squeeze", [image, axis], f"{y}.turned")], y, perm=[0, 2, 1])


def as_quantized_table(to, node):
    """GatherBlockQuantized of 4 bits in blocks of 16."""
    table, tokens = node.input
    rows, width = to.weights.pop(table).shape
    random = np.random.default_rng(0)
    stored = packed_weights(random.integers(0, 16, (rows, width // 16, 16)), 4).reshape(rows, -1)
    scales = random.uniform(0.05, 0.2, (rows, width // 16)).astype(np.float32)
    inputs = [to.constant(f"{table}_Q4", stored), tokens, to.constant(f"{table}_scales", scales)]
    given = {"bits": 4, "block_size": 16, "quantize_axis": 1, "gather_axis": 0, "domain": "com.microsoft"}
    to.node("GatherBlockQuantized", inputs, node.output[0], node.name, **given)


def as_packed(to, node):
    """MatMulNBits of 4 bits in blocks of 16, with packed zero points and a bias."""
    (x, weight), random = node.input, np.random.default_rng(len(to.nodes))
    rows, columns = to.weights.pop(weight).shape
    stored = packed_weights(random.integers(0, 16, (columns, rows // 16, 16)), 4)
    scales = random.uniform(-0.05, 0.05, (columns, rows // 16)).astype(np.float32)
    zeros = packed_weights(random.integers(6, 10, scales.shape), 4)
    bias = random.normal(size=columns).astype(np.float32)
    parts = {"Q4": stored, "scales": scales, "zeros": zeros, "bias": bias}
    names = [to.constant(f"{weight}_{what}", each) for what, each in parts.items()]
    given = {"K": rows, "N": columns, "bits": 4, "block_size": 16, "domain": "com.microsoft"}
    to.node("MatMulNBits", [x, *names[:3], "", names[3]], node.output[0], node.name, **given)


CASES = {
    "MatMulNBits": ("MatMul", as_packed),
    "Gemm": ("MatMul", as_gemm, False, 1.0),
    "Gemm, transposed": ("MatMul", as_gemm, True, 1.0),
    "Gemm, alpha": ("MatMul", as_gemm, True, 0.5),
    "Conv": ("MatMul", as_conv),
    "GatherBlockQuantized": ("Gather", as_quantized_table),
}
TARGETS = {"GatherBlockQuantized": "embed_tokens|q"}


def loss_of(logits):
    return mean_loss(logits, BATCH["labels"])


WITH_DORA = [name for name in CASES if name.startswith(("MatMul", "Gemm"))]


@pytest.fixture(params=[*CASES, *(f"{name}, DoRA" for name in WITH_DORA)])
def case(request, tmp_path):
    """A folder with such a model, the targets of adapters, and the operator beside which they are."""
    folder, (name, dora, _) = make_folder(tmp_path / "model", layers=1), request.param.partition(", DoRA")
    op, write, *arguments = CASES[name]
    Rewriter(folder / "model.onnx").write(op, write, *arguments)
    targets = TARGETS.get(name, "all-linear and lm_head").split(" and ")
    more = ", dora=true" if dora else ""
    return folder, [f"rank=4, target={each}{more}" for each in targets], name.partition(",")[0]


@pytest.mark.one_in(2)
def test_all_kinds_of_products(tmp_path, case):
    """They begin as the base, learn, and compute the same deployed and merged as in training."""
    folder, loras, operator = case
    tuner = Tuner(folder, lora=loras, seed=1)
    assert operator in {each.product.op for each in tuner.adapters}
    plain = scores(folder / "model.onnx", PROMPT, exact=True)
    trainer = Trainer(tuner.adapted.setting(*PROMPT.shape).artifacts, learning_rate=0.01)
    losses = [trainer.step(BATCH) for _ in range(4)]
    assert losses[0] == pytest.approx(loss_of(plain), rel=1e-5)
    assert losses[3] < losses[0]
    learned = {name: np.array(each) for name, each in trainer.parameters.items()}
    tuner.adapted.use(learned)
    tuner.save(tmp_path / "tuned")
    tuner.merge(tmp_path / "merged")
    tuned, adapter = tmp_path / "tuned/model.onnx", tmp_path / "tuned/adapter.onnx_adapter"
    np.testing.assert_allclose(scores(tuned, PROMPT, exact=True), plain, rtol=1e-5, atol=1e-5)
    merged = scores(tmp_path / "merged/model.onnx", PROMPT, exact=True)
    assert loss_of(merged) == pytest.approx(trainer.step(BATCH), rel=1e-4)
    np.testing.assert_allclose(scores(tuned, PROMPT, adapter=adapter), merged, rtol=1e-4, atol=1e-4)
    again = Tuner(folder, adapter=tmp_path / "tuned")
    assert [each.name for each in again.adapters] == [each.name for each in tuner.adapters]
    for name, array in learned.items():
        np.testing.assert_array_equal(again.values[name], array)


def test_packed_weights_in_a_file(tmp_path, monkeypatch):
    """They stay there: opgrad's operator multiplies with them, and the losses are those with onnxruntime's own."""
    losses, operators, folder = [], [], make_folder(tmp_path, layers=1)
    Rewriter(folder / "model.onnx").write("MatMul", as_packed)
    onnx.save(onnx.load(folder / "model.onnx"), folder / "model.onnx", save_as_external_data=True, size_threshold=0)
    for huge in (tensor_values.HUGE, 0):
        monkeypatch.setattr(tensor_values, "HUGE", huge)
        setting = Tuner(folder, lora="rank=4", seed=1).adapted.setting(*PROMPT.shape)
        operators.append({node.op_type for node in setting.artifacts.eval_model.graph.node})
        trainer = Trainer(setting.artifacts, learning_rate=0.01)
        losses.append([trainer.step(BATCH) for _ in range(3)])
    assert "MatMulNBits" in operators[0]
    assert "MatMulNBits" not in operators[1]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_kernels_of_several_points_are_no_products(tmp_path):
    """Neither are operands that are transposed on the way: x times A would be another product."""
    folder = make_folder(tmp_path)
    Rewriter(folder / "model.onnx").write("MatMul", as_conv)
    model = onnx.load(folder / "model.onnx")
    first = next(node for node in model.graph.node if node.op_type == "Conv")
    weight = next(each for each in model.graph.initializer if each.name == first.input[1])
    weight.CopyFrom(numpy_helper.from_array(np.ones((32, 32, 3, 1), np.float32), weight.name))
    first.attribute[0].ints[:] = [3, 1]
    first.attribute.append(helper.make_attribute("pads", [1, 0, 1, 0]))
    onnx.save(model, folder / "model.onnx")
    assert first.name not in {each.node for each in read(folder / "model.onnx").products}


def steps(folder, options, seed=3, count=3):
    """The losses of some steps, and the parameters behind them."""
    setting = Tuner(folder, lora=options, seed=seed).adapted.setting(*PROMPT.shape)
    trainer = Trainer(setting.artifacts, learning_rate=0.02)
    return [trainer.step(BATCH) for _ in range(count)], trainer.parameters


def test_dropout(tmp_path):
    """The same seed gives the same bits; the first loss is the base's, whatever is dropped, as B is 0."""
    folder = make_folder(tmp_path, layers=1)
    options = "rank=4, target=all-linear, dropout=0.4"
    (first, values), (second, again) = steps(folder, options), steps(folder, options)
    assert first == second
    for name, array in values.items():
        assert array.tobytes() == again[name].tobytes()
    without, _ = steps(folder, options.replace("0.4", "0"))
    expected = loss_of(scores(folder / "model.onnx", PROMPT, exact=True))
    assert first[0] == without[0] == pytest.approx(expected, rel=1e-5)
    assert first[2] != without[2]
    other, _ = steps(folder, options, seed=4)
    assert other[0] == first[0]
    assert other[2] != first[2]


def test_no_token_is_dropped(tmp_path):
    """Dropout beside a table changes nothing: its operand are numbers of rows."""
    folder = make_folder(tmp_path, layers=1)
    found = [steps(folder, f"target=embed_tokens, dropout={ratio}")[0] for ratio in (0.5, 0)]
    assert found[0] == found[1]


def test_dropout_with_layers_that_are_computed_again(tmp_path):
    """The backward part sees what was dropped in the forward part."""
    folder = make_folder(tmp_path)
    tuner = Tuner(folder, lora="dropout=0.5, target=all-linear", seed=3)
    given = (tuner.adapted.base, tuner.adapters, tuner.values, (), folder, AdamWRule())
    segments = ends_of_layers(tuner.adapted.base.products)[:1]
    settings = [prepare(*given, each, seed=3) for each in (None, segments)]
    sizes = [len(each.artifacts.training_model.graph.node) for each in settings]
    assert sizes[1] > sizes[0]
    trainers = [Trainer(each.artifacts, learning_rate=0.02) for each in settings]
    losses = [[each.step(BATCH) for _ in range(4)] for each in trainers]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


def test_what_is_dropped_differs(tmp_path):
    """Between adapters and seeds by numbers of their own, between batches by that of the batch."""
    folder, own = make_folder(tmp_path, layers=1), set()
    for seed in (0, 1):
        setting = Tuner(folder, lora="dropout=0.5, rank=4", seed=seed).adapted.setting(*PROMPT.shape)
        graph = setting.artifacts.training_model.graph
        held = {each.name: each for each in graph.initializer}
        own |= {int(numpy_helper.to_array(held[node.input[1]])[0]) for node in graph.node if "draw" in node.input}
    assert len(own) == 8
    trainer = Trainer(setting.artifacts, learning_rate=0.02)
    trainer.step(BATCH)
    first, again, other = (trainer.compute_gradients({**BATCH, "draw": np.array([each])}) for each in (5, 5, 6))
    assert first == again != other


def test_validation_drops_nothing(tmp_path):
    tuner = Tuner(make_folder(tmp_path), lora="dropout=0.5")
    adapted = tuner.adapted
    for model in (adapted.setting().artifacts.eval_model, scoring(adapted.base, tuner.adapters, tuner.values)[0]):
        assert "DropoutTraining" not in {node.op_type for node in model.graph.node}
