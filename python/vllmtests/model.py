"""A small model with random weights, made on the spot: two layers, float32, so that equal computations give equal
tokens."""

import json
import os
from typing import Any, Dict

import torch
from safetensors.torch import save_file

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 256, 128, 256, 2, 4, 2, 32

CONFIG: Dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2}


# Its first layer attends to a window of 96 tokens, its second to all: two groups of layers in vLLM.
HYBRID: Dict[str, Any] = {
    **{k: v for k, v in CONFIG.items() if k != "rope_theta"}, "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": HEAD,
    "sliding_window": 96, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
    "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                        "full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}


# Latent attention, of whose KV all tensor-parallel ranks have the same. vLLM's kernel for CPUs wants these ranks.
MLA: Dict[str, Any] = {
    **CONFIG, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": HEADS,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": HEAD, "qk_rope_head_dim": 64, "v_head_dim": HEAD,
    "first_k_dense_replace": LAYERS}
del MLA["head_dim"]


def attention(config: Dict[str, Any], w: Any, norm: Any) -> Dict[str, torch.Tensor]:
    """The weights of a layer's attention, but for its output."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        rank, rope, plain = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        return {"q_proj": w(heads * (plain + rope), hidden), "kv_a_proj_with_mqa": w(rank + rope, hidden),
                "kv_a_layernorm": norm(rank), "kv_b_proj": w(heads * (plain + config["v_head_dim"]), rank)}
    head = config["head_dim"]
    return {"q_proj": w(heads * head, hidden), "k_proj": w(config["num_key_value_heads"] * head, hidden),
            "v_proj": w(config["num_key_value_heads"] * head, hidden)}


def make(directory: str, seed: int = 1, base: Dict[str, Any] = CONFIG, **changes: Any) -> str:
    """Writes the model to a directory and returns it. changes: of its configuration."""
    os.makedirs(directory, exist_ok=True)
    config, hybrid = {**base, **changes}, base is HYBRID
    with open(os.path.join(directory, "config.json"), "w") as f:
        json.dump(config, f)
    vocabulary, hidden, inner = (config[k] for k in ("vocab_size", "hidden_size", "intermediate_size"))
    head = config.get("head_dim") or config["v_head_dim"]
    g = torch.Generator().manual_seed(seed)

    def w(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * (1.5 / shape[-1] ** 0.5)

    # Gemma's norms multiply by one more than their weight.
    norm = torch.zeros if hybrid else torch.ones
    tensors = {"model.embed_tokens.weight": torch.randn(vocabulary, hidden, generator=g),
               "model.norm.weight": norm(hidden)}
    if not hybrid:
        tensors["lm_head.weight"] = w(vocabulary, hidden)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        tensors.update({p + f"self_attn.{name}.weight": t for name, t in attention(config, w, norm).items()})
        tensors.update({
            p + "self_attn.o_proj.weight": w(hidden, config["num_attention_heads"] * head),
            p + "mlp.gate_proj.weight": w(inner, hidden), p + "mlp.up_proj.weight": w(inner, hidden),
            p + "mlp.down_proj.weight": w(hidden, inner), p + "input_layernorm.weight": norm(hidden),
            p + "post_attention_layernorm.weight": norm(hidden)})
        if hybrid:
            tensors.update({p + "self_attn.q_norm.weight": norm(head), p + "self_attn.k_norm.weight": norm(head),
                            p + "pre_feedforward_layernorm.weight": norm(hidden),
                            p + "post_feedforward_layernorm.weight": norm(hidden)})
    save_file(tensors, os.path.join(directory, "model.safetensors"))
    return directory
