"""Architectures that the installed onnxruntime-genai's builder writes, in each precision.

Small random models are inspected, trained, run by the stock runtime, onnxruntime-genai and PEFT, and merged.
"""

import contextlib
import inspect
import io
import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime_genai")
import onnxruntime  # noqa: E402
import small_causal_models  # noqa: E402
from language_models import TEMPLATE, make_tokenizer, write_lines  # noqa: E402
from onnxruntime_genai.models import builder  # noqa: E402
from peft import PeftModel  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from opgrad.cli.app import app  # noqa: E402
from opgrad.tune import Tuner, adapted_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other libraries
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
    "Ernie4_5ForCausalLM": {},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "Gemma3ForConditionalGeneration": {},
    "GptOssForCausalLM": {},
    "GraniteForCausalLM": {},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "HunYuanDenseV1ForCausalLM": {},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "Lfm2VlForConditionalGeneration": {},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Mistral3ForConditionalGeneration": {},
    # The builder takes 1e-6 where it does not know the name of the norms' epsilon.
    "NemotronForCausalLM": {"norm_eps": 1e-6},
    "OlmoForCausalLM": {},
    "PhiForCausalLM": {"layer_norm_eps": 1e-6},
    "Phi3ForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen2_5_VLForConditionalGeneration": {"rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]}},
    "Qwen3ForCausalLM": {},
    "Qwen3VLForConditionalGeneration": {"rope_parameters": {**ROPE, "mrope_section": [6, 5, 5]}},
    "Qwen3_5ForConditionalGeneration": {"rope_parameters": PARTIAL},
    "Qwen3_5MoeForConditionalGeneration": {"rope_parameters": PARTIAL},
    "SmolLM3ForCausalLM": {},
}
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
    kind = getattr(transformers, architecture)
    for change in small_causal_models.CHANGES:
        with contextlib.suppress(Exception):
            own = {
                **small_causal_models.OWN.get(architecture, {}),
                "head_dim": SIZES["head_dim"],
                **ARCHITECTURES.get(architecture, {}),
            }
            own = {name: value for name, value in own.items() if hasattr(kind.config_class(), name)}
            configuration = kind.config_class(**small_causal_models.given(kind.config_class, SIZES | change) | own)
            for name, value in ARCHITECTURES.get(architecture, {}).items():
                setattr(configuration.get_text_config(), name, value)
            torch.manual_seed(0)
            model = kind(configuration)
            for each in model.parameters():
                each.data *= 2 if each.ndim > 1 else 1  # so that scores differ by more than rounding
            return model
    raise ValueError(architecture)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Folders of transformers, by the architecture."""
    made = {}

    def original(architecture):
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            small_model(architecture).save_pretrained(folder)
            (folder / "tokenizer.json").write_text(make_tokenizer())
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
            (folder / "tokenizer_config.json").write_text(json.dumps({**config, "unk_token": "<unk>"}))
            made[architecture] = folder
        return made[architecture]

    return original


def build(original: Path, precision: str, output: Path) -> Path:
    """What the builder writes: halves for GPUs, all else for the CPU."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            what = (
                "",
                str(original),
                str(output),
                precision,
                "cuda" if precision in HALVES else "cpu",
                str(output / "cache"),
            )
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
    options, run = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    options.log_severity_level = 4
    if adapter is not None:
        held = onnxruntime.LoraAdapter()
        held.Load(str(adapter))
        run.add_active_adapter(held)
    session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    feeds = {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)}
    sizes = {
        "batch_size": 1,
        "past_sequence_length": 0,
        "past_sliding_length": 0,
        "kv_cache_dim": SIZES["head_dim"],
        "sequence_length": 7,
    }
    for each in session.get_inputs():
        shape = [sizes.get(size, size) for size in each.shape]
        if "position" in each.name:
            feeds[each.name] = np.broadcast_to(np.arange(7), shape).copy()
        elif each.name.startswith("past"):
            feeds[each.name] = np.zeros(shape, np.float16 if "float16" in each.type else np.float32)
    given = {each.name for each in session.get_inputs()}
    feeds = {name: array for name, array in feeds.items() if name in given}
    return session.run(["logits"], feeds, run)[0].astype(np.float32)


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
    run = tuner.fit(data, tmp_path / "tuned", epochs=4, batch_size=4, learning_rate=2e-2)
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
    if "past_sliding_length" in (folder / "model.onnx").read_text(
        "latin1"
    ):  # onnxruntime-genai alone keeps such caches
        return
    found, near = scores(tmp_path / "tuned" / "model.onnx", adapter), 1e-4 if precision == "fp32" else 0.5
    np.testing.assert_allclose(scores(tmp_path / "merged" / "model.onnx"), found, atol=near)
    assert np.abs(found - scores(folder / "model.onnx")).max() > near
    if precision == "fp32":
        kind = getattr(transformers, architecture)
        with torch.no_grad():
            model = PeftModel.from_pretrained(kind.from_pretrained(originals(architecture)), tmp_path / "tuned").eval()
            np.testing.assert_allclose(
                model(torch.tensor(TOKENS)).logits.numpy(), found, atol=NEAR.get(architecture, 1e-3)
            )


def test_every_architecture_of_the_builder_has_a_state():
    """docs/start/tune.md names all of them, and says of those here that they train."""
    named = set(re.findall(r'architectures\[0\] == "(\w+)"', inspect.getsource(builder)))
    rows = re.findall(r"^\| (`(?:\w+For|ChatGLM).*?) \| (.*) \|$", DOCUMENT.read_text(encoding="utf-8"), re.M)
    states = {name: state for names, state in rows for name in re.findall(r"`(\w+)`", names)}
    assert named == states.keys()
    assert {name for name, state in states.items() if "trains" in state} == ARCHITECTURES.keys()


class Exported(torch.nn.Module):
    """Scores alone, without caches."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


@pytest.mark.one_case  # half a minute each
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "PhiForCausalLM", "GPT2LMHeadModel"])
def test_exported_by_torch(tmp_path, architecture):
    pytest.importorskip("onnxscript")
    any_size = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    names, tokens = ("input_ids", "attention_mask"), torch.tensor(TOKENS).repeat(2, 1)
    model, folder = small_model(architecture).eval(), tmp_path / "model"
    folder.mkdir()
    given = {"dynamic_shapes": dict.fromkeys(names, any_size), "input_names": names, "output_names": ["logits"]}
    args = (tokens, torch.ones_like(tokens))
    torch.onnx.export(Exported(model), args, folder / "model.onnx", dynamo=True, verbose=False, **given)
    (folder / "tokenizer.json").write_text(make_tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    tuner = Tuner(folder, lora="rank=4")
    assert sorted(each.product.layer for each in tuner.adapters) == [0] * 4 + [1] * 4  # q, k, v, o
    data = write_lines(tmp_path / "data.jsonl", LINES)
    losses = tuner.fit(data, tmp_path / "tuned", epochs=4, batch_size=4, learning_rate=2e-2).state.history
    assert losses[-1].train_loss < losses[0].train_loss
    with_mask = {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)}
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(session.run(["logits"], with_mask)[0], expected, atol=1e-3)
    found = scores(tmp_path / "tuned" / "model.onnx", tmp_path / "tuned" / "adapter.onnx_adapter")
    with torch.no_grad():  # GPT-2's q, k and v are one module
        tuned = PeftModel.from_pretrained(model, tmp_path / "tuned").eval()(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(tuned, found, atol=1e-3)
    assert np.abs(found - expected).max() > 1e-3
    again = Tuner(folder, adapter=tmp_path / "tuned")
    assert again.values.keys() == tuner.values.keys()
