"""The maths of one model, whatever family and file it came from.

Knows what a forward pass, the planner and the KV cache need. Must not know config.json, which the
families' readers read, nor tensors: it imports no torch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardnet.model.config.module_outline import ModuleOutline
from shardnet.output_params import RoutingShape
from shardnet.types import DType, LayerRange

N_DIGITS = 3
"""Of a position or token id in a row, to the base of 256: bfloat16 holds each."""
N_PIECES = 3
"""Numbers of a row that add up to one in float32, whatever the row's dtype."""
DEFAULT_CONTEXT = 8192
"""Positions of one sequence where nothing else is asked and the model allows more."""


class Activation(enum.Enum):
    """The nonlinearity of the MLP. The value is transformers' name."""

    SILU = "silu"
    GELU = "gelu"
    GELU_NEW = "gelu_new"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU_QUICK = "quick_gelu"
    RELU = "relu"
    RELU_SQUARED = "relu2"


class NormKind(enum.Enum):
    """What the norms over the hidden size are, where what is stored does not say it."""

    STORED = "stored"
    """RMSNorm, or LayerNorm where a bias is stored."""
    CENTRED = "centred"
    """LayerNorm without a bias."""
    BARE = "bare"
    """RMSNorm, of which nothing is stored."""
    BARE_CENTRED = "bare centred"
    """LayerNorm, of which nothing is stored."""


class RopeKind(enum.Enum):
    """How the rotary frequencies are scaled. The value is transformers' `rope_type`."""

    DEFAULT = "default"
    PROPORTIONAL = "proportional"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LONGROPE = "longrope"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    `share` is the part of each head that is rotated, from 0 to 1: its first columns, or of
    PROPORTIONAL the first ones of both halves, with the frequencies that they have where all are
    rotated; cosine and sine are multiplied by `magnitude`. `original_max_positions` are those
    trained with before scaling. Each field after it belongs to one kind: two to LLAMA3, three to
    YARN, two to LONGROPE with one factor per frequency. `axes` says of each frequency which axis of
    a position it turns by: 0 time, 1 height, 2 width (M-RoPE); () where positions have one.
    """

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = 10000.0
    share: float = 1.0
    factor: float = 1.0
    magnitude: float = 1.0
    original_max_positions: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    axes: tuple[int, ...] = ()

    def rotated(self, head_size: int) -> int:
        """Return how many of a head's columns the tables have; unrotated ones turn by nothing."""
        return head_size if self.kind is RopeKind.PROPORTIONAL else int(head_size * self.share)

    @property
    def depends_on_context(self) -> bool:
        """Whether contexts beyond `original_max_positions` have tables of their own."""
        return self.kind in (RopeKind.DYNAMIC, RopeKind.LONGROPE)


UNROTATED = Rope(kind=RopeKind.LINEAR, factor=math.inf)
"""Of layers without rotary positions: every angle is 0, and a rotation changes no bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts that replace the MLP in some layers.

    `top_k` of the `n_experts` are used per token. `intermediate_size` is the width of one expert,
    `shared_intermediate_size` that of the expert that every token uses, 0 for none. With
    `normalize_top_k` the weights of the chosen experts are scaled to sum to 1. `layers` are the
    absolute numbers of the layers with experts. With a `swiglu_limit` gate and up are clamped to
    it, and the gate is multiplied by the sigmoid of `swiglu_alpha` times itself; None for the
    model's activation. Experts are in `n_groups` equal groups, of which a token uses the best
    `top_groups`. The chosen experts' outputs are multiplied by `output_scale`, the shared one's is
    not. With `has_softmax` they are chosen by it in families that leave it open. In `hashed_layers`
    the token says which.
    """

    n_experts: int
    top_k: int
    intermediate_size: int
    normalize_top_k: bool
    shared_intermediate_size: int = 0
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    n_groups: int = 1
    top_groups: int = 1
    output_scale: float = 1.0
    has_softmax: bool = False
    hashed_layers: tuple[int, ...] = ()
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention over latents (arXiv 2405.04434): all heads share one cached latent per position.

    A latent has `rank` columns and `rope_size` rotated ones. A head's own keys have `nope_size`
    columns, its values `value_size`. `query_rank` is the rank of the query projection, None for
    full rank. `interleaved`: columns that are rotated together are adjacent. `norm_eps` is that of
    the norms over latents and low-rank queries.
    """

    rank: int
    rope_size: int
    nope_size: int
    value_size: int
    query_rank: int | None
    interleaved: bool
    norm_eps: float = 1e-6

    @property
    def width(self) -> int:
        """Columns that are cached per position."""
        return self.rank + self.rope_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """What chooses the positions that a token attends to (arXiv 2512.02556).

    A token attends to the `n_chosen` positions that score highest: the sum over `n_heads` of a
    weight times what is above 0 of a query times the position's key, of `head_size` columns, which
    is cached. Their first columns are rotated, or with `rotates_last` the last ones; `interleaved`
    as in Latent. `layers` are the absolute numbers of the layers that choose; others with attention
    take the choice of the last one before them.

    With `n_pooled` above 1 it is entries of so many positions each that are chosen, and the
    positions behind the last whole entry are always attended. Beside latents an entry's key is the
    sum of its positions' keys, weighted column by column with the softmax of scores that are cached
    behind the keys. Beside a head's keys and values it is the keys' mean, and these are cached as
    columns of `n_kv_heads` values, with the positions on `n_axes` that they are rotated by.
    """

    n_heads: int
    head_size: int
    n_chosen: int
    interleaved: bool
    rotates_last: bool = False
    norm_eps: float = 1e-6
    n_pooled: int = 1
    n_axes: int = 0
    layers: tuple[int, ...]

    @property
    def width(self) -> int:
        """Columns that are cached per position beside latents."""
        return self.head_size * (1 if self.n_pooled == 1 else 2)

    @property
    def n_attended(self) -> int:
        """The most positions that a token attends to."""
        return self.n_chosen + self.n_pooled - 1

    def beside_values(self, n_kv_heads: int) -> int:
        """Columns that each of so many values has behind its own."""
        n_columns = self.head_size + N_DIGITS * self.n_axes
        return 2 * -(-n_columns // (2 * n_kv_heads))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """Attention over a window and over entries that stand for several positions (DeepSeek-V4).

    `rates` say of how many positions an entry of each layer is made, 0 where it has none: so in the
    last one, which predicts further tokens and keeps the keys of all positions. Layers of
    the `indexer` choose among their entries, which are made of the positions before, too, and have
    a key of the indexer each; others attend to all. Keys are values, one of `head_size` columns, of
    which the last `rope_size` are rotated. Queries have rank `query_rank`; heads stand in
    `n_groups`, of which each gives `output_rank` columns.

    Where there are `sources` the layers up to the next one attend to the entries of theirs, which
    are made of no position before their own, and of which each layer has a copy: they travel at the
    end of rows, so that a layer depends on the rows that it gets alone. Those without a choice of
    their own take that of the last layer before them that has one. Layers behind `blocks_from`
    choose among entries of the `n_blocks` blocks of `block_size` that it has chosen, if any.
    """

    window: int
    rates: tuple[int, ...]
    sources: tuple[int, ...] = ()
    blocks_from: int = 0
    n_blocks: int = 0
    block_size: int = 1
    indexer: Indexer
    head_size: int
    rope_size: int
    query_rank: int
    n_groups: int
    output_rank: int

    def entry_size(self, layer: int) -> int:
        """Columns of an entry, with its key of the indexer."""
        return self.head_size + (self.indexer.head_size if layer in self.indexer.layers else 0)

    @property
    def n_carried(self) -> int:
        """Columns of an entry and its key at the end of a row."""
        return self.head_size + self.indexer.head_size if self.sources else 0

    @property
    def n_chosen(self) -> int:
        """Numbers of entries, and of blocks, that a row has chosen."""
        return self.indexer.n_chosen + self.n_blocks

    def has_blocks(self, layer: int) -> bool:
        """Whether a layer chooses in blocks of one before it."""
        return self.n_blocks > 0 and layer > self.blocks_from

    def row_size(self, layer: int) -> int:
        """Columns of an entry that lie at each of its positions."""
        return -(-self.entry_size(layer) // self.rates[layer]) if self.rates[layer] else 0

    def pending(self, layer: int) -> tuple[int, int]:
        """How many positions wait for their entries at the most, and the columns of each."""
        if self.sources:
            rate = self.rates[layer] if self.sources[layer] == layer else 0
            return (0, rate * self.head_size) if rate < 2 else (rate, 2 * self.head_size)
        twice = 2 if layer in self.indexer.layers else 1  # of those before, and of its own
        n = twice * self.rates[layer]
        return n, 2 * twice * self.entry_size(layer) if n else 0

    def sharing(self, sources: Sequence[int], kept: Sequence[int]) -> Compressed:
        """Return it with the `sources` of the layers that are `kept` of more: the first of each."""
        if not sources:
            return self
        olds = [sources[layer] for layer in kept]
        new = tuple(olds.index(old) for old in olds)
        making = {n for n, source in enumerate(new) if n == source and self.rates[n]}
        layers = tuple(sorted({*self.indexer.layers} | making))
        first = next((n for n, layer in enumerate(kept) if layer >= self.blocks_from), len(kept))
        return replace(
            self,
            sources=new,
            blocks_from=first,
            indexer=replace(self.indexer, layers=layers),
        )

    def state(self, layer: int) -> StateShape:
        """The rows of the window, and those that wait, in as many rows as the window has."""
        n, width = self.pending(layer)
        n_columns = -(-(self.window * self.head_size + n * width) // self.window)
        return StateShape(
            recent=(self.window, n_columns),
            recurrent=(0, 0, 0),
            is_beside_kv=self.rates[layer] > 0,
            n_spread=max(1, self.rates[layer]),
        )


class StreamKind(enum.Enum):
    """How several residual streams are mixed."""

    BALANCED = "balanced"
    """Into each other too, by matrices whose rows and columns add up to 1 (DeepSeek-V4)."""
    APART = "apart"
    """Each goes on as it is, with its share of what a sub-layer gives (Hunyuan 4)."""
    GATED = "gated"
    """As APART, and a sub-layer has the mean of normed streams, each column gated (Qwen 3.8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Several residual streams, of which a sub-layer has a mix, and to all of which it gives.

    What it gives is multiplied by up to `magnitude`. `eps` is added to factors and to what they are
    divided by, in `n_rounds` of the balance. Gates come of linears of a low `rank`. Without
    `has_head` the streams' mean goes on behind the last layer. What predicts further tokens takes
    them all where they are `in_mtp`, else what is joined and normed. With `is_lagged` a sub-layer
    has the mix that the one before has made factors for, and the head that of the last one.
    """

    count: int
    kind: StreamKind
    eps: float
    magnitude: float = 2.0
    n_rounds: int = 1
    rank: int = 0
    has_head: bool = True
    in_mtp: bool = False
    is_lagged: bool = False

    @property
    def n_carried(self) -> int:
        """Columns behind the streams: the pieces of the next sub-layer's factors."""
        return N_PIECES * self.count if self.is_lagged else 0

    @property
    def n_kinds(self) -> int:
        """Kinds of factors around a sub-layer: before it, behind it, and from stream to stream."""
        return 3 if self.kind is StreamKind.BALANCED else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """How queries grow with their position p.

    They are multiplied by 1 + `scale` * log(1 + floor((p + `shift`) / `floor`)).
    """

    scale: float
    floor: int
    shift: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What a layer keeps of a slot that is no key or value: the state after its last position.

    `recent` [positions, columns] are the last inputs of a convolution, in the compute dtype;
    `recurrent` [heads, columns of a key, columns of a value] is a matrix for each head, in float32.
    With `is_beside_kv` the layer has keys and values too, of which those of up to `n_spread`
    positions before the next one are written again. A position changes the state by the columns of
    `recent` and `n_small` numbers in float32. `features` [positions, columns] are the last inputs
    of another convolution, those of n-grams.
    """

    recent: tuple[int, int]
    recurrent: tuple[int, int, int]
    is_beside_kv: bool = False
    n_spread: int = 1
    n_small: int = 0
    features: tuple[int, int] = (0, 0)

    @property
    def n_inputs(self) -> int:
        """Numbers in the compute dtype."""
        return math.prod(self.recent) + math.prod(self.features)

    def size_bytes(self, dtype: DType) -> int:
        """Return the bytes of one slot's state in a layer that computes in `dtype`."""
        return self.n_inputs * dtype.size_bytes + 4 * math.prod(self.recurrent)

    def input_bytes(self, n_rows: int, dtype: DType) -> int:
        """Return the bytes of what so many rows change a state by."""
        row = (self.recent[1] + self.features[1]) * dtype.size_bytes + 4 * self.n_small
        return self.n_inputs * dtype.size_bytes + n_rows * row


NOTHING = StateShape(recent=(0, 0), recurrent=(0, 0, 0))
"""The state of layers that have neither attention nor a recurrence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Gated DeltaNet (arXiv 2412.06464), which replaces attention in some layers.

    Each of `n_key_heads` serves the same number of `n_value_heads`: consecutive ones, or with
    `takes_turns` every `n_key_heads`-th. Queries, keys and values pass a convolution over `n_taps`
    positions. `layers` are the absolute numbers of the layers that have it. How much of a
    difference is written is a sigmoid times `write_scale`. With `has_split_gate` the gate is no
    part of the linear of queries, keys and values.

    Or it `is_mamba`, Mamba-2 (arXiv 2405.21060): then queries are its C, keys its B, values its x,
    and key heads its groups. With `is_beside_attention` the layers have both (Falcon-H1); without
    `has_norm` outputs are not normed. With `has_key_decays` each column of a key decays by itself
    (KDA, arXiv 2510.26692), by no less than e^`decay_floor` where that is below 0 (Ling 3). With
    `gates_alone` outputs are multiplied by the sigmoids of their gates, in families that leave it
    open, else by the gates too.
    """

    n_key_heads: int
    n_value_heads: int
    key_size: int
    value_size: int
    n_taps: int
    layers: tuple[int, ...]
    takes_turns: bool = False
    has_split_gate: bool = False
    is_mamba: bool = False
    is_beside_attention: bool = False
    has_norm: bool = True
    write_scale: float = 1.0
    has_key_decays: bool = False
    decay_floor: float = 0.0
    gates_alone: bool = False

    @property
    def n_decays(self) -> int:
        """Numbers of a position that say how much of a state stays."""
        return self.n_value_heads * (self.key_size if self.has_key_decays else 1)

    @property
    def key_width(self) -> int:
        """Columns of all keys of a position, and of all queries."""
        return self.n_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """Columns of all values of a position, and of all outputs."""
        return self.n_value_heads * self.value_size

    @property
    def mixed_width(self) -> int:
        """Columns of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> StateShape:
        """What a layer keeps of a slot."""
        return StateShape(
            recent=(self.n_taps - 1, self.mixed_width),
            recurrent=(self.n_value_heads, self.key_size, self.value_size),
            is_beside_kv=self.is_beside_attention,
            n_small=self.n_value_heads + self.n_decays,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """Gated convolutions over a few positions, which replace attention in some layers (LFM2).

    Each of `width` columns is convolved by itself, over `n_taps` positions. `layers` are the
    absolute numbers of the layers that have it.
    """

    width: int
    n_taps: int
    has_bias: bool
    layers: tuple[int, ...]

    @property
    def state(self) -> StateShape:
        """What a layer keeps of a slot."""
        return StateShape(recent=(self.n_taps - 1, self.width), recurrent=(0, 0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ngrams:
    """Features of hashed n-grams of token ids, which layers add to their rows (Qwen 3.8, Engram).

    N-grams of 2 to `longest` ids have a row of `width` / `n_heads` columns for each of `heads_each`
    heads; a head has a prime number of rows, `least_rows` or more, and the table of a layer, in
    `n_parts`, a multiple of `divisor`. Before an `end_id` there is nothing. Features pass a
    convolution over `n_taps` positions, each `longest` apart. `layers` are the absolute numbers of
    the layers that add them; of a single one `given_rows` are those of each head and
    `given_factors` what ids are multiplied by, where files say so.

    Engram (arXiv 2601.07372) hashes not ids but which of `n_classes` of tokens they are of, whose
    texts are alike; only before a text there are `end_id`s, and there is no convolution.
    """

    width: int
    longest: int
    heads_each: int
    least_rows: int
    divisor: int
    n_parts: int
    seed: int
    end_id: int
    n_taps: int
    layers: tuple[int, ...]
    given_rows: tuple[int, ...] = ()
    given_factors: tuple[int, ...] = ()
    n_classes: int = 0

    @property
    def n_heads(self) -> int:
        """Heads of n-grams of all lengths."""
        return (self.longest - 1) * self.heads_each

    @property
    def n_digits(self) -> int:
        """Columns of a token id in a state."""
        return N_DIGITS

    def state(self, row_width: int) -> tuple[int, int]:
        """Return the positions and columns that a state has: inputs, and the token id's digits."""
        n_before = max((self.n_taps - 1) * self.longest, self.longest - 1)
        return n_before, (row_width if self.n_taps else 0) + N_DIGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFactors:
    """What the outputs of a layer's linears are multiplied by (Falcon-H1).

    `mamba_in` are the factors of gate, values, keys, queries and steps.
    """

    queries: float
    keys: float
    values: float
    attention: float
    mamba_in: tuple[float, ...]
    mamba_out: float
    gate: float
    down: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The heads of keys and values of a layer: how many, and the columns of each and of a query."""

    n_kv_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The maths of one model.

    `family` is a `model_type` in families/registry.py, `wrapper` one in families/wrappers.py if the
    checkpoint is multimodal and this is its language part, else "". `rope` is None for learned
    positions; `local_rope` is that of layers with a window, None if it is `rope`. `windows` are,
    per layer, the positions that a token attends to, itself included; None for all of them, an
    empty tuple for None in all layers. Scores are multiplied by `attention_scale`, None for 1 /
    sqrt(head size); a soft cap c turns x into c * tanh(x / c). With `has_sinks` a head may attend
    to nothing. `norm_offset` is added to every norm's stored weight. `checkpoint_dtype` is the
    dtype that the config names for the stored weights, None for none; `eos_token_ids` may be empty.

    With `has_parallel_mlp` the MLP sees what attention sees, and both outputs are added at once;
    with `has_embedding_norm` embeddings are normed as the last hidden state is. With
    `has_head_bias` the LM head has a bias.

    With `has_pairs` the columns of a head that are rotated together are adjacent, with
    `has_joined_heads` the outputs of a joined linear are query, key and value of each head in turn.
    `nope_layers` are the absolute numbers of the layers without rotary positions. `temperature` is
    that of queries: in families with such layers of theirs alone. With `has_unit_heads` heads of
    queries and keys are divided by their root mean square after the rotation.

    With `has_chunks` a window is the length of chunks, and tokens attend within their own. With an
    `indexer` tokens attend to the positions that it chooses. With `streams` a row has as many
    residual streams between layers, one behind the other. `compressed` attention is in all layers.
    Layers of `ngrams` add features of n-grams before their recurrence. With an
    `mlp_limit` gate and up of MLPs and shared experts are clamped as those of Experts.
    `late_limits` clamp experts of each layer, and other MLPs, behind the activation; 0 does not.

    Values have `value_size` columns, None for as many as keys, and are multiplied by
    `value_multiplier`.

    With `latent` attention `head_size` is the rotated part of a head, and there is one KV head.
    With `has_gates` each head's output is multiplied by the sigmoid of a gate of its width, with
    `has_head_norms` each head of queries and keys is normalised, in families that leave it open.
    Attention is in all layers but those of `delta_net`, unless it is beside it, `short_conv` and
    `mixerless_layers`, which keep nothing of a slot.

    `query_heads` are those of each layer where they differ: `n_heads` is the most of them.
    `full_heads` are those of layers without a window, None where they are as all others. With
    `is_value_key` such layers have no projection of values: those are the projected keys.

    With `has_mtp` the stage with the last layer has one more, numbered `n_layers`, which predicts a
    token further ahead and is no part of the model's own output. What adapters add to the weights
    of each layer takes `adapter_bytes`; () is nothing.

    With an `outline` transformers' own modules compute the model, `family` is a `model_type` of
    theirs, and of the maths there are only the sizes that the planner needs.
    """

    family: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    activation: Activation
    attention_bias: bool
    mlp_bias: bool
    rope: Rope | None
    tie_word_embeddings: bool
    checkpoint_dtype: DType | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    local_rope: Rope | None = None
    windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    norm_offset: float = 0.0
    norm_kind: NormKind = NormKind.STORED
    has_head_bias: bool = False
    has_parallel_mlp: bool = False
    has_embedding_norm: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    has_sinks: bool = False
    has_gates: bool = False
    has_head_norms: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    delta_net: DeltaNet | None = None
    output_factors: OutputFactors | None = None
    short_conv: ShortConv | None = None
    mixerless_layers: tuple[int, ...] = ()
    has_pairs: bool = False
    has_joined_heads: bool = False
    nope_layers: tuple[int, ...] = ()
    temperature: Temperature | None = None
    has_unit_heads: bool = False
    has_chunks: bool = False
    indexer: Indexer | None = None
    streams: Streams | None = None
    compressed: Compressed | None = None
    ngrams: Ngrams | None = None
    mlp_limit: float | None = None
    late_limits: tuple[tuple[float, float], ...] = ()
    full_heads: HeadShape | None = None
    value_size: int | None = None
    value_multiplier: float = 1.0
    is_value_key: bool = False
    query_heads: tuple[int, ...] = ()
    has_mtp: bool = False
    adapter_bytes: tuple[int, ...] = ()
    wrapper: str = ""
    outline: ModuleOutline | None = None

    @property
    def default_context(self) -> int:
        """Positions of one sequence where no `--context` is given.

        At most those trained with where a longer context has other rotary tables.
        """
        most = min(self.max_positions, DEFAULT_CONTEXT)
        if self.rope is not None and self.rope.depends_on_context:
            most = min(most, self.rope.original_max_positions)
        return most

    @property
    def row_width(self) -> int:
        """Columns of a row between layers, and between stages."""
        if self.outline is not None:
            return self.outline.row_width
        parts = (self.streams, self.compressed)
        return self.streams_width + sum(part.n_carried for part in parts if part is not None)

    @property
    def streams_width(self) -> int:
        """Columns of the residual streams of a row."""
        return self.hidden_size * (1 if self.streams is None else self.streams.count)

    def window(self, layer: int) -> int | None:
        """Positions that a token attends to in the absolute `layer`, None for all."""
        return self.windows[layer] if self.windows else None

    @property
    def smallest_window(self) -> int | None:
        """The smallest window of any layer, None where no layer has one."""
        return min((window for window in self.windows if window is not None), default=None)

    @property
    def largest_window(self) -> int | None:
        """The largest window of any layer, None where no layer has one."""
        return max((window for window in self.windows if window is not None), default=None)

    @property
    def key_size(self) -> int:
        """Columns of a key and of a query, the most of any layer."""
        own = self.usual_heads.key_size
        return max(own, self.full_heads.key_size) if self.full_heads else own

    @property
    def usual_heads(self) -> HeadShape:
        """The heads of keys and values that layers cache; values of 0 columns are in the keys."""
        if self.latent is not None:
            return HeadShape(n_kv_heads=self.n_kv_heads, key_size=self.latent.width, value_size=0)
        size = self.head_size
        of_values = self.value_size or size
        return HeadShape(n_kv_heads=self.n_kv_heads, key_size=size, value_size=of_values)

    def heads(self, layer: int) -> HeadShape:
        """The heads of keys and values that the absolute `layer` caches.

        Values beside a latent are the keys that positions are chosen by; else these are behind.
        """
        if self.compressed is not None:
            is_last = layer == self.n_layers  # it predicts further tokens
            size = self.head_size if is_last else self.compressed.row_size(layer)
            return HeadShape(n_kv_heads=1, key_size=size, value_size=0)
        if self.full_heads is not None and self.window(layer) is None:
            return self.full_heads
        if self.indexer is not None and layer in self.indexer.layers:
            usual, own = self.usual_heads, self.indexer
            if self.latent is not None:
                return replace(usual, value_size=own.width)
            beside = own.beside_values(usual.n_kv_heads)
            return replace(usual, value_size=usual.value_size + beside)
        return self.usual_heads

    def uneven_heads(self, layers: Iterable[int]) -> tuple[HeadShape, ...]:
        """The heads of each of the absolute `layers`, none at all where all are alike."""
        found = tuple(self.heads(layer) for layer in layers)
        return () if set(found) <= {self.usual_heads} else found

    @property
    def has_state(self) -> bool:
        """Whether layers keep a state, which is not rewound as positions are."""
        if self.outline is not None:
            return self.outline.has_state
        mixers = (self.delta_net, self.short_conv, self.compressed)
        return any(own is not None for own in mixers) or bool(self.mixerless_layers)

    @property
    def rewinds(self) -> bool:
        """Whether slots can be rewound to before drafts that were rejected."""
        return not self.has_state or self.outline is None

    @property
    def has_movable_slots(self) -> bool:
        """Whether what slots hold is moved to other nodes while it grows."""
        return self.outline is None

    def state(self, layer: int) -> StateShape | None:
        """What the absolute `layer` keeps instead of keys and values, or beside them, or None."""
        found = NOTHING if layer in self.mixerless_layers else None
        for own in (self.delta_net, self.short_conv):
            if own is not None and layer in own.layers:
                found = own.state
        if self.compressed is not None and layer < self.n_layers:
            found = self.compressed.state(layer)
        if found is not None and self.ngrams is not None and layer in self.ngrams.layers:
            return replace(found, features=self.ngrams.state(self.row_width))
        return found

    def layer_streams(self, layer: int) -> Streams | None:
        """The residual streams of the absolute `layer`, None where it has one."""
        own = self.streams
        return own if own is not None and (own.in_mtp or layer < self.n_layers) else None

    def has_kv(self, layer: int) -> bool:
        """Whether the absolute `layer` keeps keys and values."""
        state = self.state(layer)
        return state is None or state.is_beside_kv

    def takes_choice(self, layer: int) -> bool:
        """Whether the absolute `layer` attends to positions that a layer before it has chosen.

        Or chooses among those.
        """
        of_entries = self.compressed
        if of_entries is not None:
            takes = layer not in of_entries.indexer.layers or of_entries.has_blocks(layer)
            return bool(of_entries.sources and of_entries.rates[layer] and takes)
        own = self.indexer
        return own is not None and self.has_kv(layer) and layer not in own.layers

    def layer_experts(self, layer: int) -> Experts | None:
        """The experts of the absolute `layer`, None where it has an MLP.

        What predicts further tokens is like the last layers: it has experts if any layer has.
        """
        own = self.experts
        return own if own is not None and (layer in own.layers or layer == self.n_layers) else None

    @property
    def routing(self) -> RoutingShape | None:
        """Routing shape (layers, top-k), or None for a dense model."""
        if self.experts is None:
            return None
        return RoutingShape(n_layers=self.n_layers, top_k=self.experts.top_k)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The absolute numbers of the layers that have experts."""
        return () if self.experts is None else self.experts.layers

    def distinct_windows(self, layers: LayerRange) -> tuple[int | None, ...]:
        """The different windows of the layers of a stage."""
        return tuple(dict.fromkeys(self.window(layer) for layer in layers))

    def layer_rope(self, layer: int) -> Rope | None:
        """The rotary positions of the absolute `layer`."""
        if layer in self.nope_layers:
            return UNROTATED
        if self.compressed is not None:
            return self.rope if self.compressed.rates[layer] else self.local_rope
        is_local = self.local_rope is not None and self.window(layer) is not None
        return self.local_rope if is_local else self.rope

    def thinned(self, n_layers: int) -> ModelConfig:
        """Return the config of a model with `n_layers` of the layers, evenly spaced."""
        kept = [(2 * n + 1) * self.n_layers // (2 * n_layers) for n in range(n_layers)]

        def of_kept(layers: Iterable[int]) -> tuple[int, ...]:
            """Number those that are kept; the one behind the last predicts further tokens."""
            return tuple(n for n, layer in enumerate([*kept, self.n_layers]) if layer in layers)

        own: dict[str, Any] = {}
        for name in ("experts", "delta_net", "short_conv", "ngrams", "indexer"):
            part = getattr(self, name)
            if part is not None:
                own[name] = replace(part, layers=of_kept(part.layers))
        if self.experts is not None:
            hashed = of_kept(self.experts.hashed_layers)
            own["experts"] = replace(own["experts"], hashed_layers=hashed)
        if self.compressed is not None:
            choosing = replace(
                self.compressed.indexer, layers=of_kept(self.compressed.indexer.layers)
            )
            rates = tuple(self.compressed.rates[layer] for layer in [*kept, self.n_layers])
            own["compressed"] = replace(self.compressed, rates=rates, indexer=choosing)
            own["compressed"] = own["compressed"].sharing(self.compressed.sources, kept)
        windows = tuple(self.window(layer) for layer in kept) if self.windows else ()
        for name in ("late_limits", "query_heads"):
            if each := getattr(self, name):
                own[name] = tuple(each[layer] for layer in kept)
        return replace(
            self,
            n_layers=n_layers,
            windows=windows,
            nope_layers=of_kept(self.nope_layers),
            mixerless_layers=of_kept(self.mixerless_layers),
            **own,
        )
