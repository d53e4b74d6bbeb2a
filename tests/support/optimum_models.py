"""Small random models of transformers 4 as optimum-onnx exports them, each in a folder beside its weights.

PYTHONPATH=build/optimum .venv-integrations/bin/python tests/support/optimum_models.py FOLDER Llama Bert
"""

import sys
from pathlib import Path

import small_causal_models

DECODERS = (
    *("Arcee", "Bloom", "CodeGen", "Cohere", "DeepseekV3", "Falcon", "GPT2", "GPTBigCode", "GPTJ", "GPTNeo", "GPTNeoX"),
    *("Gemma", "Gemma2", "Gemma3", "Glm", "GptOss", "Granite", "Helium", "Llama", "Mistral", "Mpt", "Nemotron", "OPT"),
    *("Olmo", "Olmo2", "Phi", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3", "StableLm"),
)
# ConvBert, MobileBert and Nystromformer are left out: their vectors depend on how far texts are padded.
ENCODERS = (
    *("Albert", "Bert", "BigBird", "Camembert", "Data2VecText", "Deberta", "DebertaV2", "DistilBert", "Electra"),
    *("IBert", "MPNet", "MegatronBert", "ModernBert", "RemBert", "RoFormer", "Roberta", "Splinter", "XLMRoberta"),
)


def class_of(name: str) -> str:
    return name + ("Model" if name in ENCODERS else "LMHeadModel" if name == "GPT2" else "ForCausalLM")


def export(name: str, folder: Path) -> None:
    """Write a model's graph, weights and configuration into a folder."""
    import torch
    import transformers
    from optimum.exporters.onnx import onnx_export_from_model

    kind, decoder = getattr(transformers, class_of(name)), name in DECODERS
    change = {"is_decoder": decoder, **({"num_key_value_heads": 4} if name in ("DeepseekV3", "Phi") else {})}
    own = small_causal_models.OWN.get(kind.__name__, {})
    torch.manual_seed(0)
    model = kind(kind.config_class(**small_causal_models.given(kind.config_class, change) | own)).eval()
    for each in model.parameters():  # so that scores differ by more than rounding; the exporter makes equal ones one
        each.data = each.data * (1 + (each.ndim > 1)) + torch.randn_like(each) / 50
    model.save_pretrained(folder)
    task = "text-generation-with-past" if decoder else "feature-extraction"
    onnx_export_from_model(model, folder, task=task, do_validation=False)


if __name__ == "__main__":
    for each in sys.argv[2:]:
        export(each, Path(sys.argv[1]) / each)
