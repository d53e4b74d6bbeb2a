"""Small forms of the language models of an installed transformers: their configurations with small sizes."""

import contextlib

import torch

CLASSES, LENGTH = 97, 9
SIZES = {
    "vocab_size": CLASSES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "model_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
    "pixel_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": CLASSES, "n_groups": 1, "state_size": 8, "time_step_rank": 4, "is_decoder": True,
}  # fmt: skip
# What is tried one after the other, as models differ in what fits what.
CHANGES = (
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": None},
    {"num_key_value_heads": None, "head_dim": None},
    {"num_key_value_heads": 4, "head_dim": None, "num_hidden_layers": 4},
    {"num_experts_per_tok": 1},
    {"hidden_size_per_layer_input": 0},
    dict.fromkeys(("num_hidden_layers", "num_layers", "n_groups", "state_size", "mamba_n_heads", "mamba_d_head")),
)
# What single models need beside these, as their configurations leave it open or check it.
OWN = {
    "GPTNeoForCausalLM": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "MinistralForCausalLM": {"head_dim": 8},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 8},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 8},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "DeepseekV2ForCausalLM": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "Dots1ForCausalLM": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "head_dim": 8,
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 1},
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention", "conv"]},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8},
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "RecurrentGemmaForCausalLM": {"block_types": ["recurrent", "attention"], "head_dim": 8, "attention_window_size": 8},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "RoCBertForCausalLM": {"pronunciation_vocab_size": 97, "shape_vocab_size": 97},
    "Zamba2ForCausalLM": {"layers_block_type": ["mamba", "hybrid"]},
    "AXK1ForCausalLM": {"n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
    "CohereCompassForCausalLM": {
        "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            name: {"rope_theta": 1e4, "rope_type": "default"} for name in ("full_attention", "sliding_attention")
        },
    },
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 5, "num_kv_shared_layers": 0, "intermediate_size": 48, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 5, "layer_types": [*["sliding_attention"] * 4, "full_attention"],
    },
    "Qwen4ExpForCausalLM": {
        "layer_types": ["linear_attention", "full_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 1, "ngram_vocab_size_base": 50,
        "split_ngram_parts": 1, "hc_lowrank": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "ple_embed_dim": 16,
    },
    "ReformerModelWithLMHead": {
        "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (3, 3), "attn_layers": ["local", "lsh"],
        "attention_head_size": 8, "lsh_attn_chunk_length": 3, "local_attn_chunk_length": 3, "num_buckets": 2,
        "feed_forward_size": 48, "hash_seed": 0,
    },
}  # fmt: skip
LARGEST = 1e7  # numbers of a model


def given(kind, change):
    """Which sizes a configuration has, and probabilities of dropout, which become 0."""
    plain, found = kind(), {}
    for name, size in (SIZES | change).items():
        with contextlib.suppress(Exception):
            settable = not isinstance(getattr(kind, name, None), property)
            if settable and size is not None and isinstance(getattr(plain, name), int | float):
                found[name] = size
    for name, value in vars(plain).items():
        if ("drop" in name or "pdrop" in name) and isinstance(value, float):
            found[name] = 0.0
    layers = getattr(plain, "layer_types", None)
    if layers and not isinstance(getattr(kind, plain.attribute_map.get("layer_types", "layer_types"), None), property):
        count = found.get("num_hidden_layers", len(layers))
        every = list(dict.fromkeys(layers))
        found["layer_types"] = [*every, *layers][:count] if count >= len(every) else every[-count:]
    parts = {name: getattr(plain, name, None) for name in getattr(kind, "sub_configs", None) or {}}
    found |= {name: type(of)(**given(type(of), change)) for name, of in parts.items() if hasattr(of, "sub_configs")}
    return found | {"pad_token_id": 0}


def small_models(kind):
    """The small forms of a class of models that can be made."""
    for change in CHANGES:
        with contextlib.suppress(Exception):
            configuration = kind.config_class(**given(kind.config_class, change) | OWN.get(kind.__name__, {}))
            with torch.device("meta"):
                size = sum(each.numel() for each in kind(configuration).parameters())
            if size > LARGEST:
                return
            torch.manual_seed(0)
            yield kind(configuration).train()
