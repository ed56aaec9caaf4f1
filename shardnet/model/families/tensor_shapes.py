"""The tensors of each family: Hugging Face's parameter names and their shapes.

Knows one table per family. Must not know files, stages or torch; families/stage_tensors.py puts
stages together.

Names are those of the causal-LM class, GPT-2's without the `transformer.` prefix.
"""

from __future__ import annotations

from shardnet.model.config.model_config import ModelConfig

Shape = tuple[int, ...]
Table = dict[str, Shape]

_GATED = ("gate_proj", "up_proj", "down_proj")


def decoder_embedding(config: ModelConfig) -> Table:
    """The embedding of the families that share Llama's names."""
    return {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}


def decoder_head(config: ModelConfig) -> Table:
    """The final norm and the LM head of the families that share Llama's names."""
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return {
        "model.norm.weight": (config.hidden_size,),
        name: (config.vocab_size, config.hidden_size),
    }


def llama_layer(config: ModelConfig, layer: int) -> Table:
    """A layer of Llama and Mistral: biases as the config says."""
    return (
        _attention(config, layer)
        | gated_mlp(config, layer)
        | _norms(config, layer, "input_layernorm", "post_attention_layernorm")
    )


def qwen2_layer(config: ModelConfig, layer: int) -> Table:
    """Llama's, without a bias on the attention's output."""
    tensors = llama_layer(config, layer)
    tensors.pop(f"model.layers.{layer}.self_attn.o_proj.bias", None)
    return tensors


def qwen3_layer(config: ModelConfig, layer: int) -> Table:
    """Llama's, with norms over each head of queries and keys."""
    return llama_layer(config, layer) | head_norms(config, layer)


def phi3_layer(config: ModelConfig, layer: int) -> Table:
    """Llama's, with the projections stored joined."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
    prefix = f"model.layers.{layer}"
    return {
        f"{prefix}.self_attn.qkv_proj.weight": (queries + 2 * keys, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}.mlp.gate_up_proj.weight": (2 * inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    } | _norms(config, layer, "input_layernorm", "post_attention_layernorm")


def olmo2_layer(config: ModelConfig, layer: int) -> Table:
    """Llama's, with norms after the halves only, and over all queries and all keys."""
    attn = f"model.layers.{layer}.self_attn"
    return (
        _attention(config, layer)
        | {
            f"{attn}.q_norm.weight": (config.n_heads * config.head_size,),
            f"{attn}.k_norm.weight": (config.n_kv_heads * config.head_size,),
        }
        | gated_mlp(config, layer)
        | _norms(config, layer, "post_attention_layernorm", "post_feedforward_layernorm")
    )


def gemma2_layer(config: ModelConfig, layer: int) -> Table:
    """Llama's, with norms before and after both halves."""
    return llama_layer(config, layer) | _norms(
        config, layer, "pre_feedforward_layernorm", "post_feedforward_layernorm"
    )


def gemma3_layer(config: ModelConfig, layer: int) -> Table:
    """Gemma 2's, with norms over each head of queries and keys."""
    return gemma2_layer(config, layer) | head_norms(config, layer)


def mixtral_layer(config: ModelConfig, layer: int) -> Table:
    """Llama's, with a router and experts in the place of the MLP."""
    return (
        _attention(config, layer)
        | _experts(config, f"model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2"))
        | _norms(config, layer, "input_layernorm", "post_attention_layernorm")
    )


def qwen3_moe_layer(config: ModelConfig, layer: int) -> Table:
    """Qwen3's, with a router and experts in the place of the MLP where the config says so."""
    if config.layer_experts(layer) is None:
        return qwen3_layer(config, layer)
    return (
        _attention(config, layer)
        | head_norms(config, layer)
        | _experts(config, f"model.layers.{layer}.mlp", _GATED)
        | _norms(config, layer, "input_layernorm", "post_attention_layernorm")
    )


def qwen2_moe_layer(config: ModelConfig, layer: int) -> Table:
    """Qwen2's, with a router, experts and a shared one where the config says so."""
    if config.layer_experts(layer) is None:
        return qwen2_layer(config, layer)
    assert config.experts is not None
    mlp, inner = f"model.layers.{layer}.mlp", config.experts.shared_intermediate_size
    tensors = (
        _attention(config, layer)
        | _experts(config, mlp, _GATED)
        | _gated(config, f"{mlp}.shared_expert", inner, with_bias=False)
        | {f"{mlp}.shared_expert_gate.weight": (1, config.hidden_size)}
        | _norms(config, layer, "input_layernorm", "post_attention_layernorm")
    )
    tensors.pop(f"model.layers.{layer}.self_attn.o_proj.bias", None)
    return tensors


def gpt_oss_layer(config: ModelConfig, layer: int) -> Table:
    """Llama's, with sinks; each expert's gate and up in one product, and biases everywhere.

    transformers stores all experts of a layer in one tensor (stacked_experts.py).
    """
    assert config.experts is not None
    prefix = f"model.layers.{layer}"
    n_experts = config.experts.n_experts
    hidden, inner = config.hidden_size, config.experts.intermediate_size
    experts: Table = {}
    for number in range(n_experts):
        linears = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        experts |= _linears(f"{prefix}.mlp.experts.{number}", linears, with_bias=True)
    return (
        _attention(config, layer)
        | {
            f"{prefix}.self_attn.sinks": (config.n_heads,),
            f"{prefix}.mlp.router.weight": (n_experts, hidden),
            f"{prefix}.mlp.router.bias": (n_experts,),
        }
        | experts
        | _norms(config, layer, "input_layernorm", "post_attention_layernorm")
    )


def deepseek_layer(config: ModelConfig, layer: int) -> Table:
    """Latent attention; an MLP, or a router, experts and shared ones stored as one."""
    mlp, experts = f"model.layers.{layer}.mlp", config.layer_experts(layer)
    tensors = _latent_attention(config, layer) | _norms(
        config, layer, "input_layernorm", "post_attention_layernorm"
    )
    if experts is None:
        return tensors | gated_mlp(config, layer)
    inner = experts.shared_intermediate_size
    tensors |= _experts(config, mlp, _GATED)
    tensors |= _gated(config, f"{mlp}.shared_experts", inner, with_bias=config.mlp_bias)
    if config.family == "deepseek_v3":
        tensors[f"{mlp}.gate.e_score_correction_bias"] = (experts.n_experts,)
    return tensors


def _latent_attention(config: ModelConfig, layer: int) -> Table:
    assert config.latent is not None
    latent, attn = config.latent, f"model.layers.{layer}.self_attn"
    hidden, bias = config.hidden_size, config.attention_bias
    queries = config.n_heads * (latent.nope_size + latent.rope_size)
    tensors = _linears(attn, {"kv_a_proj_with_mqa": (latent.width, hidden)}, bias)
    if latent.query_rank is None:
        tensors |= _linears(attn, {"q_proj": (queries, hidden)}, with_bias=False)
    else:
        tensors |= _linears(attn, {"q_a_proj": (latent.query_rank, hidden)}, bias)
        tensors |= _linears(attn, {"q_b_proj": (queries, latent.query_rank)}, with_bias=False)
        tensors[f"{attn}.q_a_layernorm.weight"] = (latent.query_rank,)
    tensors[f"{attn}.kv_a_layernorm.weight"] = (latent.rank,)
    keys_values = config.n_heads * (latent.nope_size + latent.value_size)
    tensors[f"{attn}.kv_b_proj.weight"] = (keys_values, latent.rank)
    outputs = {"o_proj": (hidden, config.n_heads * latent.value_size)}
    return tensors | _linears(attn, outputs, bias)


def head_norms(config: ModelConfig, layer: int) -> Table:
    """Norms over each head of queries and keys."""
    attn = f"model.layers.{layer}.self_attn"
    return {
        f"{attn}.q_norm.weight": (config.head_size,),
        f"{attn}.k_norm.weight": (config.head_size,),
    }


def gated_mlp(config: ModelConfig, layer: int) -> Table:
    """Gate, up and down of a layer's MLP."""
    mlp = f"model.layers.{layer}.mlp"
    return _gated(config, mlp, config.intermediate_size, with_bias=config.mlp_bias)


def _gated(config: ModelConfig, prefix: str, inner: int, *, with_bias: bool) -> Table:
    hidden = config.hidden_size
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return _linears(prefix, dict(zip(_GATED, shapes, strict=True)), with_bias)


def _experts(config: ModelConfig, prefix: str, names: tuple[str, str, str]) -> Table:
    """A router and each expert's three products, in the order gate, up, down."""
    assert config.experts is not None
    hidden, inner = config.hidden_size, config.experts.intermediate_size
    tensors: Table = {f"{prefix}.gate.weight": (config.experts.n_experts, hidden)}
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    for number in range(config.experts.n_experts):
        for name, shape in zip(names, shapes, strict=True):
            tensors[f"{prefix}.experts.{number}.{name}.weight"] = shape
    return tensors


def _attention(config: ModelConfig, layer: int) -> Table:
    queries, keys = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
    linears = {
        "q_proj": (queries, config.hidden_size),
        "k_proj": (keys, config.hidden_size),
        "v_proj": (keys, config.hidden_size),
        "o_proj": (config.hidden_size, queries),
    }
    return _linears(f"model.layers.{layer}.self_attn", linears, config.attention_bias)


def _linears(prefix: str, linears: dict[str, tuple[int, int]], with_bias: bool) -> Table:
    tensors: Table = {}
    for name, shape in linears.items():
        tensors[f"{prefix}.{name}.weight"] = shape
        if with_bias:
            tensors[f"{prefix}.{name}.bias"] = shape[:1]
    return tensors


def _norms(config: ModelConfig, layer: int, *names: str) -> Table:
    return {f"model.layers.{layer}.{name}.weight": (config.hidden_size,) for name in names}


def gpt2_embedding(config: ModelConfig) -> Table:
    """GPT-2's tables of tokens and positions."""
    return {
        "wte.weight": (config.vocab_size, config.hidden_size),
        "wpe.weight": (config.max_positions, config.hidden_size),
    }


def gpt2_head(config: ModelConfig) -> Table:
    """GPT-2's final norm and LM head."""
    name = "wte.weight" if config.tie_word_embeddings else "lm_head.weight"
    return {
        "ln_f.weight": (config.hidden_size,),
        "ln_f.bias": (config.hidden_size,),
        name: (config.vocab_size, config.hidden_size),
    }


def gpt2_layer(config: ModelConfig, layer: int) -> Table:
    """GPT-2's layer: Conv1D weights have the inputs first, the outputs second."""
    prefix = f"h.{layer}."
    hidden, inner = config.hidden_size, config.intermediate_size
    linears = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    tensors: Table = {}
    for name, shape in linears.items():
        tensors[f"{prefix}{name}.weight"] = shape
        tensors[f"{prefix}{name}.bias"] = shape[1:]
    for name in ("ln_1", "ln_2"):
        tensors[f"{prefix}{name}.weight"] = (hidden,)
        tensors[f"{prefix}{name}.bias"] = (hidden,)
    return tensors
