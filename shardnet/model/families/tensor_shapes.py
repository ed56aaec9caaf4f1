"""The parameters of the parts that families share: transformers' names and their shapes.

Knows attention, MLPs, experts, norms, embedding and head by Llama's names. Must not know files,
stages or torch: a family's file puts a layer together, stage_tensors.py a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shardnet.model.config.model_config import ModelConfig, StreamKind

Shape = tuple[int, ...]
Table = dict[str, Shape]
"""Parameter names with their shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What the parameters of a layer's experts are called, below `model.layers.N`.

    `block` holds the router and `experts.X`, each of which has the linears `gate`, `up` and `down`.
    Where gate and up are one linear, both have its name.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    @property
    def linears(self) -> tuple[str, str, str]:
        """The names of gate, up and down."""
        return self.gate, self.up, self.down


STREAM_NAMES: Final = tuple(
    (own.format(kind), f"{stored}_{kind}.weight")
    for own, stored in (
        ("attn_hc.{}", "hc_attn"),
        ("ffn_hc.{}", "hc_ffn"),
        ("model.hc_head.hc_{}", "output_hc"),
        ("hc_head.hc_{}", "nextn.hc_head"),
    )
    for kind in ("fn", "base", "scale")
)
"""What GGUF calls the parameters of `stream_mixer`, but for gated ones."""


def decoder_embedding(config: ModelConfig) -> Table:
    """Name the embedding."""
    return {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}


def decoder_head(config: ModelConfig) -> Table:
    """Name the final norm and the LM head, which is the embedding where they are tied."""
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return {
        "model.norm.weight": (config.hidden_size,),
        name: (config.vocab_size, config.hidden_size),
    }


def norms(config: ModelConfig, layer: int, *names: str) -> Table:
    """Name norms over the hidden size."""
    return {f"model.layers.{layer}.{name}.weight": (config.hidden_size,) for name in names}


def head_norms(
    config: ModelConfig, layer: int, names: tuple[str, str] = ("q_norm", "k_norm")
) -> Table:
    """Name the norms over each head of queries and keys."""
    attn = f"model.layers.{layer}.self_attn"
    return {f"{attn}.{name}.weight": (config.head_size,) for name in names}


def attention(
    config: ModelConfig, layer: int, *, output: str = "o_proj", output_bias: bool = True
) -> Table:
    """Name queries, keys, values and the `output`, with biases as the config says.

    Without `output_bias` the output has none in any case.
    """
    attn = f"model.layers.{layer}.self_attn"
    queries, keys = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
    inputs = {
        "q_proj": (queries, config.hidden_size),
        "k_proj": (keys, config.hidden_size),
        "v_proj": (keys, config.hidden_size),
    }
    outputs = {output: (config.hidden_size, queries)}
    bias = config.attention_bias
    return linears(attn, inputs, with_bias=bias) | linears(
        attn, outputs, with_bias=bias and output_bias
    )


def plain_mlp(config: ModelConfig, layer: int, up: str, down: str) -> Table:
    """Name the linears `up` and `down` of a layer's MLP without a gate, with biases as it says."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {up: (inner, hidden), down: (hidden, inner)}
    return linears(f"model.layers.{layer}.mlp", shapes, with_bias=config.mlp_bias)


def gated(
    config: ModelConfig,
    prefix: str,
    inner: int,
    *,
    with_bias: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Table:
    """Name gate, up and down below `prefix`, from the hidden size to `inner` and back.

    Where gate and up have the same name they are one linear.
    """
    hidden, (gate, up, down) = config.hidden_size, names
    rows = 2 * inner if gate == up else inner
    shapes = {gate: (rows, hidden), up: (rows, hidden), down: (hidden, inner)}
    return linears(prefix, shapes, with_bias=with_bias)


def sparse_mlp(config: ModelConfig, layer: int, names: ExpertNames) -> Table:
    """Name the router `gate` and each expert's three linears, without biases."""
    assert config.experts is not None
    prefix, hidden = f"model.layers.{layer}.{names.block}", config.hidden_size
    inner = config.experts.intermediate_size
    tensors: Table = {f"{prefix}.gate.weight": (config.experts.n_experts, hidden)}
    for number in range(config.experts.n_experts):
        tensors |= gated(config, f"{prefix}.experts.{number}", inner, names=names.linears)
    return tensors


def linears(prefix: str, shapes: dict[str, tuple[int, int]], *, with_bias: bool = False) -> Table:
    """Name linears below `prefix`, given as [outputs, inputs] by name."""
    tensors: Table = {}
    for name, shape in shapes.items():
        tensors[f"{prefix}.{name}.weight"] = shape
        if with_bias:
            tensors[f"{prefix}.{name}.bias"] = shape[:1]
    return tensors


def stream_mixer(config: ModelConfig, name: str, begin: str = "") -> Table:
    """Name what mixes residual streams around a sub-layer, or with `begin` behind the last layer.

    Their own names begin with it.
    """
    assert config.streams is not None
    count, width, rank = config.streams.count, config.streams_width, config.streams.rank
    if config.streams.kind is StreamKind.GATED:
        shares = {} if begin else {"block_inject_weight": (count, width)}
        gates = {"input_mix_weight_down": (rank, width), "input_mix_weight_up": (width, rank)}
        return linears(name, gates | shares) | {f"{name}.hc_norm.weight": (width,)}
    kinds = 1 if begin else config.streams.n_kinds
    n_out = (count, 2 * count, (2 + count) * count)[kinds - 1]
    own = f"{name}.{begin}"
    return {f"{own}fn": (n_out, width), f"{own}base": (n_out,), f"{own}scale": (kinds,)}
