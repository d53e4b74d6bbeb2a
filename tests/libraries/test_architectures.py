"""Architectures that the installed onnxruntime-genai's builder writes, in each precision, or other exporters.

Small random models are inspected, trained, run by the stock runtime, onnxruntime-genai and PEFT, and merged.
"""

import contextlib
import inspect
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime_genai")
import encoders  # noqa: E402
import language_models  # noqa: E402
import optimum_models  # noqa: E402
import small_causal_models  # noqa: E402
from language_models import TEMPLATE, make_tokenizer, write_lines  # noqa: E402
from onnxruntime_genai.models import builder  # noqa: E402
from peft import PeftModel  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from opgrad.cli.app import app  # noqa: E402
from opgrad.tune import Tuner, adapted_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other libraries
# A folder with optimum-onnx and transformers 4, of which this process has a later release.
OPTIMUM = os.path.abspath(os.environ["OPTIMUM"]) if os.environ.get("OPTIMUM") else ""
DOCUMENT = Path(__file__).parents[2] / "docs" / "start" / "tune.md"
# Kernels of attention take heads of multiples of 16 numbers, half of which may be turned by their places.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd"), 128), "head_dim": 32, "sliding_window": 16,
    "original_max_position_embeddings": 64, **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "bos_token_id": 2, "eos_token_id": 1,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PARTIAL = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
# By the class of transformers, what the configuration of the text's part has beside the sizes.
ARCHITECTURES = {
    **dict.fromkeys(
        f"{name}ForCausalLM"
        for name in (
            *("Ernie4_5", "Gemma", "Gemma2", "Gemma3", "GptOss", "Granite", "HunYuanDenseV1", "Llama", "Mistral"),
            *("Olmo", "Phi3", "Qwen2", "Qwen3", "SmolLM3"),
        )
    ),
    **dict.fromkeys(f"{name}ForConditionalGeneration" for name in ("Gemma3", "Lfm2Vl", "Mistral3")),
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["full_attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 32, "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    # The builder takes 1e-6 where it does not know the name of the norms' epsilon.
    "NemotronForCausalLM": {"norm_eps": 1e-6},
    "PhiForCausalLM": {"layer_norm_eps": 1e-6},
    "Qwen2_5_VLForConditionalGeneration": {"rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]}},
    "Qwen3VLForConditionalGeneration": {"rope_parameters": {**ROPE, "mrope_section": [6, 5, 5]}},
    **{f"Qwen3_5{kind}ForConditionalGeneration": {"rope_parameters": PARTIAL} for kind in ("", "Moe")},
}  # fmt: skip
# How far the builder's graphs are from transformers: Gemma's root of the width is rounded, OLMo's epsilon is not known.
NEAR = {"GemmaForCausalLM": 0.01, "OlmoForCausalLM": 0.5, "Qwen3_5MoeForConditionalGeneration": 0.01}
# Attention alone has adapters: PEFT has none for routers.
EXPERTS = ("GptOssForCausalLM", "Lfm2MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
HALVES = ("fp16", "bf16")
# The builder takes the experts of gpt-oss alone as OpenAI's files have them, in 4 bits.
LACKING = [("GptOssForCausalLM", "int8"), ("GptOssForCausalLM", "int4")]
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4")
QUESTIONS = (("what is red ?", "the tree is red ."), ("who are you", "i am a small bird ."), ("hello", "hello dog ."))
LINES = [
    {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
    for asked, answer in QUESTIONS * 4
]
TOKENS = np.random.default_rng(0).integers(5, 25, (1, 7))


def small_model(architecture: str) -> "torch.nn.Module":
    kind, text = getattr(transformers, architecture), ARCHITECTURES.get(architecture) or {}
    for change in small_causal_models.CHANGES:
        with contextlib.suppress(Exception):
            own = small_causal_models.OWN.get(architecture, {}) | {"head_dim": SIZES["head_dim"]} | text
            own = {name: value for name, value in own.items() if hasattr(kind.config_class(), name)}
            configuration = kind.config_class(**small_causal_models.given(kind.config_class, SIZES | change) | own)
            for name, value in text.items():
                setattr(configuration.get_text_config(), name, value)
            torch.manual_seed(0)
            model = kind(configuration)
            for each in model.parameters():
                each.data *= 2 if each.ndim > 1 else 1  # so that scores differ by more than rounding
            return model
    raise ValueError(architecture)


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(make_tokenizer())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "unk_token": "<unk>"}))


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Folders of transformers, by the architecture."""
    made = {}

    def original(architecture):
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            small_model(architecture).save_pretrained(folder)
            write_tokenizer(folder)
            made[architecture] = folder
        return made[architecture]

    return original


def build(original: Path, precision: str, output: Path) -> Path:
    """What the builder writes: halves for GPUs, all else for the CPU."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            device = "cuda" if precision in HALVES else "cpu"
            what = "", str(original), str(output), precision, device, str(output / "cache")
            options = builder.parse_extra_options(*what, [])
            _before_transformers_5(options["hf_details"]["hf_config"])
            builder.create_model(*what, **options)
    finally:
        logging.disable(logging.NOTSET)
    return output


def _before_transformers_5(config) -> None:
    """The fields of Gemma 3 that the builder reads; transformers keeps these for each kind of layer by now."""
    kinds = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if "sliding_attention" in kinds:
        config.rope_local_base_freq = kinds["sliding_attention"]["rope_theta"]
        config.rope_parameters = kinds["full_attention"]


def scores(model: Path, adapter: Path | None = None) -> np.ndarray:
    """The stock runtime's scores of some tokens."""
    given, sizes = {}, {"batch_size": 1, "sequence_length": 7, "kv_cache_dim": SIZES["head_dim"]}
    sizes |= dict.fromkeys(("past_sequence_length", "past_sliding_length"), 0)
    for each in onnx.load(model, load_external_data=False).graph.input:
        kind = each.type.tensor_type
        shape = [sizes.get(axis.dim_param, axis.dim_value) for axis in kind.shape.dim]
        if "position" in each.name:
            given[each.name] = np.broadcast_to(np.arange(7), shape)
        elif each.name == "attention_mask":
            given[each.name] = np.ones_like(TOKENS)
        elif each.name.startswith("past"):
            given[each.name] = np.zeros(shape, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return language_models.scores(model, TOKENS, given, adapter).astype(np.float32)


def scores_in_torch(model: "torch.nn.Module") -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture(tmp_path, originals, architecture, precision):
    if (architecture, precision) in LACKING:
        pytest.skip("the builder does not write it")
    folder = build(originals(architecture), precision, tmp_path / "model")
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert "adapters" in result.output, result.output
    target = "" if architecture in EXPERTS else ", target=all-linear"
    tuner, data = Tuner(folder, lora=f"rank=4{target}"), write_lines(tmp_path / "data.jsonl", LINES)
    assert not tuner.adapted.base.unreached
    given = {"epochs": 4, "batch_size": 4, "learning_rate": 2e-2, "clip_norm": None}
    run = tuner.fit(data, tmp_path / "tuned", **given)
    losses = [each.train_loss for each in run.state.history]
    assert losses[-1] < losses[0]
    assert run.state.steps == 12
    again = Tuner(folder, adapter=tmp_path / "tuned")  # as PEFT's files have it
    assert again.values.keys() == tuner.values.keys()
    written = again.write("what is red ?", max_new_tokens=6)
    assert written == tuner.write("what is red ?", max_new_tokens=6)
    if precision in HALVES:
        return
    adapter, tokens = tmp_path / "tuned" / "adapter.onnx_adapter", tuner.adapted.prompt_tokens("what is red ?")
    with_genai, first = (
        list(adapted_model.write_by_genai(tmp_path / "tuned", adapter, tokens, count, 0.0, 0)) for count in (6, 1)
    )
    assert first == with_genai[:1]
    if architecture != "Qwen2_5_VLForConditionalGeneration":  # to which genai gives other places than transformers
        assert tuner.adapted.tokenizer.decode(with_genai) == written
    tuner.merge(tmp_path / "merged")
    if b"past_sliding_length" in (folder / "model.onnx").read_bytes():  # onnxruntime-genai alone keeps such caches
        return
    found, near = scores(tmp_path / "tuned" / "model.onnx", adapter), 1e-4 if precision == "fp32" else 0.5
    np.testing.assert_allclose(scores(tmp_path / "merged" / "model.onnx"), found, atol=near)
    assert np.abs(found - scores(folder / "model.onnx")).max() > near
    if precision == "fp32":
        original = getattr(transformers, architecture).from_pretrained(originals(architecture))
        theirs = scores_in_torch(PeftModel.from_pretrained(original, tmp_path / "tuned").eval())
        np.testing.assert_allclose(theirs, found, atol=NEAR.get(architecture, 1e-3))


def test_every_architecture_of_the_builder_has_a_state():
    """docs/start/tune.md names all of them, and says of those here that they train."""
    named = set(re.findall(r'architectures\[0\] == "(\w+)"', inspect.getsource(builder)))
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`(?:\w+For|ChatGLM).*?) \| (.*) \|$", text, re.M)
    states = {name: state for names, state in rows for name in re.findall(r"`(\w+)`", names)}
    assert named == states.keys()
    assert {name for name, state in states.items() if "trains" in state} == ARCHITECTURES.keys()
    decoders = re.search(r"^\| optimum-onnx .* \| (.*) \|$", text, re.M)[1]
    assert re.sub("[- ]", "", decoders).lower().split(",") == [each.lower() for each in optimum_models.DECODERS]


class Exported(torch.nn.Module):
    """Scores alone, without caches."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def check_exported(tmp_path: Path, folder: Path, model: "torch.nn.Module") -> None:
    """What an exporter wrote of a model is inspected, trained as by PEFT, read back, run and merged."""
    write_tokenizer(folder)
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert "adapters" in result.output, result.output
    tuner, data = Tuner(folder, lora="rank=4"), write_lines(tmp_path / "data.jsonl", LINES)
    assert not tuner.adapted.base.unreached
    assert {each.product.layer for each in tuner.adapters} == {0, 1}
    tuner.save(tmp_path / "begun")
    given = {"epochs": 10, "batch_size": len(LINES), "learning_rate": 1e-2, "schedule": "constant", "clip_norm": None}
    run = tuner.fit(data, tmp_path / "tuned", **given)
    rows = tuner.adapted.task.rows(tuner.adapted, tuner.adapted.examples(data), len(LINES))
    tokens, labels, *_ = (torch.tensor(each) for each in rows.take(np.arange(len(LINES))).arrays.values())
    np.testing.assert_allclose(scores(folder / "model.onnx"), scores_in_torch(model), atol=1e-4)
    found = scores(tmp_path / "tuned" / "model.onnx", tmp_path / "tuned" / "adapter.onnx_adapter")
    tuned = PeftModel.from_pretrained(model, tmp_path / "tuned").eval()
    np.testing.assert_allclose(scores_in_torch(tuned), found, atol=1e-4)
    # Adapters of modules that are one there stand in blocks of its B, beside which PEFT would train zeros, too.
    blocks = {name: each.data != 0 for name, each in tuned.named_parameters() if "lora_B" in name}
    peft = PeftModel.from_pretrained(tuned.unload(), tmp_path / "begun", is_trainable=True)
    for name, block in blocks.items():
        peft.get_parameter(name).register_hook(block.mul)
    optimizer, losses = torch.optim.AdamW(peft.parameters(), given["learning_rate"], weight_decay=0), []
    for _ in range(given["epochs"]):
        loss = torch.nn.functional.cross_entropy(peft(tokens).logits.flatten(0, 1), labels.flatten())
        losses.append(encoders.step_in_torch(optimizer, loss))
    assert losses[-1] < losses[0] - 0.01
    np.testing.assert_allclose(np.concatenate(run.batch_losses), losses, atol=1e-5)
    again = Tuner(folder, adapter=tmp_path / "tuned")
    assert again.values.keys() == tuner.values.keys()
    assert again.write("what is red ?", max_new_tokens=6) == tuner.write("what is red ?", max_new_tokens=6)
    again.merge(tmp_path / "merged")
    np.testing.assert_allclose(scores(tmp_path / "merged" / "model.onnx"), found, atol=1e-4)


@pytest.mark.one_case  # half a minute each
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Gemma3", "Phi", "Qwen3", "GPT2"])
def test_exported_by_torch(tmp_path, name):
    pytest.importorskip("onnxscript")
    any_size = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    names, tokens = ("input_ids", "attention_mask"), torch.tensor(TOKENS).repeat(2, 1)
    model, folder = small_model(optimum_models.class_of(name)).eval(), tmp_path / "model"
    folder.mkdir()
    given = {"dynamic_shapes": dict.fromkeys(names, any_size), "input_names": names, "output_names": ["logits"]}
    args = (tokens, torch.ones_like(tokens))
    torch.onnx.export(Exported(model), args, folder / "model.onnx", dynamo=True, verbose=False, **given)
    check_exported(tmp_path, folder, model)


@pytest.fixture(scope="module")
def by_optimum(request, tmp_path_factory):
    """A folder with the models that the tests of this run ask for, exported in a process of its own."""
    if not OPTIMUM:
        pytest.skip("optimum-onnx is not installed: OPTIMUM names no folder that has it")
    names = {each.callspec.params["name"] for each in request.session.items if "by_optimum" in each.fixturenames}
    words = [sys.executable, optimum_models.__file__, tmp_path_factory.mktemp("optimum"), *sorted(names)]
    subprocess.run(words, env=os.environ | {"PYTHONPATH": OPTIMUM}, check=True)
    return words[2]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", optimum_models.DECODERS)
def test_exported_by_optimum(tmp_path, by_optimum, name):
    check_exported(
        tmp_path, by_optimum / name, transformers.AutoModelForCausalLM.from_pretrained(by_optimum / name).eval()
    )


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", optimum_models.ENCODERS)
def test_encoder_exported_by_optimum(tmp_path, by_optimum, name):
    folder, task = by_optimum / name, "embed, pooling=mean"
    model = transformers.AutoModel.from_pretrained(folder).eval()
    (folder / "tokenizer.json").write_text(encoders.tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    assert CliRunner().invoke(app, ["inspect", str(folder)]).exit_code == 0
    data, whole = write_lines(tmp_path / "data.jsonl", encoders.pairs()), Tuner(folder, train="*", task=task)

    def hidden(tokens, mask, types):
        return model(input_ids=tokens, attention_mask=mask).last_hidden_state

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0)
    np.testing.assert_allclose(*encoders.losses_beside_torch(whole, data, hidden, optimizer, 10), atol=1e-5)
    tuner = Tuner(folder, task=task, lora="rank=4")
    history = tuner.fit(data, tmp_path / "tuned", epochs=2, learning_rate=1e-2).state.history
    assert history[1].train_loss < history[0].train_loss
    rows = tuner.adapted.task.rows(tuner.adapted, tuner.adapted.examples(data), 16)
    given, vectors = encoders.stock_vectors(tmp_path / "tuned" / "model.onnx", rows)
    np.testing.assert_allclose(vectors, tuner.adapted.computing()(given), atol=1e-5)
