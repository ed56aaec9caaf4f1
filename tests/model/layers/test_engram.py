"""Engram: how tokens are hashed, and what tables add to streams, against plain formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardnet.errors import CheckpointError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import (
    ModelConfig,
    Ngrams,
    ShortConv,
    StateShape,
    StreamKind,
    Streams,
)
from shardnet.model.config.ngram_hashes import head_rows
from shardnet.model.families.engram_parts import (
    engram_looked_up,
    engram_tensors,
    load_engram,
    read_engram,
)
from shardnet.model.layers.attention import ForwardStep, Span
from shardnet.model.layers.decoder_layer import Layer, NoSublayer
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import PlainTable, RowsOf, WeightSource
from shardnet.model.mixers.short_conv import NgramHashes, NgramSublayer
from shardnet.types import SlotId

SAID: dict[str, Any] = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}
"""As DeepSeek-V4.1-Flash is published."""
SMALL = SAID | {"engram_layer_ids": [1, 3], "engram_vocab_size": 40, "engram_n_heads": 2}
SMALL |= {"engram_head_dim": 16, "engram_compressed_vocab_size": 30, "engram_num_embeddings": None}
N_STREAMS, WIDTH, BESIDE, VOCAB = 3, 24, 7, 90
EPS = 1e-20


def config_of(said: dict[str, Any], vocab_size: int = 129280) -> ModelConfig:
    """A model with streams whose layers keep a state, as far as Engram asks."""
    made = object.__new__(ModelConfig)
    values: dict[str, Any] = dict.fromkeys(ModelConfig.__dataclass_fields__)
    values |= {"n_layers": 16, "vocab_size": vocab_size, "hidden_size": WIDTH, "norm_eps": EPS}
    values |= {"mixerless_layers": (), "streams": Streams(count=3, kind=StreamKind.APART, eps=0.0)}
    values["short_conv"] = ShortConv(width=2, n_taps=2, has_bias=False, layers=tuple(range(16)))
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return replace(made, ngrams=read_engram(Fields(said, "config.json"), made))


SMALL_CONFIG = config_of(SMALL, VOCAB)


def ngrams_of(config: ModelConfig) -> Ngrams:
    assert config.ngrams is not None
    return config.ngrams


def plain_rows(said: dict[str, Any], classes: Sequence[int], layer: int, ids: list[int]) -> Any:
    """The rows [T, H] of a whole text, by the makers' description."""
    used: set[int] = set()
    longest, n_heads = said["engram_max_ngram_size"], said["engram_n_heads"]
    primes: list[int] = []
    for number in said["engram_layer_ids"]:
        for _ in range(2, longest + 1):
            last = said["engram_vocab_size"] - 1
            for _ in range(n_heads):
                prime = (
                    n for n in count(last + 1) if all(n % d for d in range(2, int(n**0.5) + 1))
                )
                last = next(n for n in prime if n not in used)
                used.add(last)
                primes += [last] * (number == layer)
    most = max(1, (2**63 - 1) // said["engram_compressed_vocab_size"] // 2)
    factors = (
        np.random.default_rng(10007 * layer).integers(0, most, longest, dtype=np.int64) * 2 + 1
    )
    made = []
    for at in range(len(ids)):
        text = [classes[ids[at - k] if at >= k else said["engram_pad_token_id"]] for k in range(4)]
        mixed, row = np.int64(text[0]) * factors[0], []
        for k in range(1, longest):
            mixed = mixed ^ np.int64(text[k]) * factors[k]
            for head in range(n_heads):
                number = (k - 1) * n_heads + head
                row.append(sum(primes[:number]) + int(mixed) % primes[number])
        made.append(row)
    return torch.tensor(made)


def test_tables_have_as_many_rows_as_is_published() -> None:
    config = config_of(SAID)
    own = ngrams_of(config)
    assert engram_looked_up(config, 1) == {"model.layers.1.engram.embed.weight": (384006168, 256)}
    assert [sum(head_rows(own, layer)) for layer in (1, 14)] == SAID["engram_num_embeddings"]
    name = "model.layers.14.engram"
    assert engram_tensors(config, 14) == {
        f"{name}.kv_proj.weight": (4 * WIDTH, 24 * 256),
        f"{name}.q_weight": (3, WIDTH),
        f"{name}.k_weight": (3, WIDTH),
    }
    assert engram_tensors(config, 2) == engram_looked_up(config, 2) == {}


def test_factors_are_those_that_the_makers_draw() -> None:
    """They follow from NumPy's generator: were it another one, rows would be others."""
    own, classes = ngrams_of(config_of(SAID)), torch.zeros(129280, dtype=torch.int64)
    found = [NgramHashes(own, layer, 129280, classes).factors for layer in (1, 14)]
    assert found == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("engram_layer_ids", [1, 1], "engram_layer_ids"),
        ("engram_layer_ids", [1, 16], "engram_layer_ids"),
        ("engram_layer_ids", [1, "2"], "engram_layer_ids"),
        ("engram_layer_ids", [True], "engram_layer_ids"),
        ("engram_max_ngram_size", 1, "engram_max_ngram_size"),
        ("engram_max_ngram_size", 33, "expected 1 to 32"),
        ("engram_n_heads", 2**40, "expected 1 to 32"),
        ("engram_head_dim", 2**17, "expected 1 to 65536"),
        ("engram_vocab_size", 2**31, "expected 1 to 2147483647"),
        ("engram_pad_token_id", 129280, "engram_pad_token_id"),
        ("engram_compressed_vocab_size", 129281, "expected 1 to 129280"),
        ("engram_num_embeddings", [384006168, 384016680], "expected .384006168, 384016682."),
    ],
)
def test_what_no_model_says_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(SAID | {key: value})


def test_more_heads_than_any_model_has_are_refused_before_primes_are_sought() -> None:
    many = {"engram_layer_ids": [*range(16)], "engram_max_ngram_size": 32, "engram_n_heads": 32}
    with pytest.raises(CheckpointError, match="engram_max_ngram_size is 32, with 32 heads each"):
        config_of(SAID | many | {"engram_vocab_size": 2**31 - 1})


@dataclass
class Weights:
    """Random parameters, and the rows of tables that were looked up."""

    config: ModelConfig
    dtype: torch.dtype = torch.float32
    asked: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        shapes = engram_tensors(self.config, 1) | engram_looked_up(self.config, 1)
        self.tensors = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
        draws = torch.randint(30, (VOCAB,), generator=generator)
        self.classes = torch.cat((torch.arange(30), draws))[:VOCAB]

    def token_classes(self) -> Tensor:
        return self.classes

    def stored_table(self, name: str, *, rows_of: RowsOf) -> Any:
        table = PlainTable(self.tensors[f"{name}.weight"].to(self.dtype))

        def rows(ids: Tensor) -> Tensor:
            self.asked.append(ids)
            return table.rows(ids)

        def bring(texts: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
            return [rows_of(*text) for text in texts]

        return SimpleNamespace(rows=rows, bring=bring)

    def linear(self, name: str) -> Any:
        weight = self.tensors[f"{name}.weight"].to(self.dtype)
        return lambda rows: torch.stack([weight @ row for row in rows])

    def parameter(self, name: str) -> Tensor:
        return self.tensors[name]


@dataclass(frozen=True)
class Attention:
    """What keeps a state as attention over a window does, and changes no row."""

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        for span in step.spans:
            state, n_rows = step.kv.state(span.slot, index), span.end - span.start
            state.keep_before(n_rows, span.n_drafts)
            state.count(n_rows, (lambda source, target, n_rows: None) if state.kept else None)
        return hidden


@dataclass
class Text:
    """A layer with a cache, in which slots go on."""

    weights: Weights

    def __post_init__(self) -> None:
        config, attention = self.weights.config, Attention()
        made = Layer(attention=attention, mlp=NoSublayer())
        source: WeightSource = self.weights  # type: ignore[assignment]
        assert load_engram(config, source, 2, made) is made
        sublayer = load_engram(config, source, 1, made).attention
        assert isinstance(sublayer, NgramSublayer)
        self.sublayer = sublayer
        state = config.state(1)
        assert isinstance(state, StateShape)
        assert state.features == (3, 3), "three tokens as digits, and no more"
        self.kv = KvCache(1, 1, 8, self.weights.dtype, torch.device("cpu"), 8, states=(state,))

    def step(self, hidden: Tensor, *groups: tuple[int, int, list[int], int]) -> Tensor:
        """Run rows of (slot, position, ids, drafts) each."""
        spans, begin = [], 0
        for slot, position, ids, n_drafts in groups:
            self.kv.ensure(SlotId(slot), position + len(ids), len(ids))
            end = begin + len(ids)
            spans.append(
                Span(
                    slot=SlotId(slot),
                    start=begin,
                    end=end,
                    position=position,
                    masks=None,
                    n_drafts=n_drafts,
                )
            )
            begin = end
        ids = torch.tensor([one for _, _, own, _ in groups for one in own])
        step = ForwardStep(token_ids=ids, positions=ids, spans=tuple(spans), kv=self.kv)
        rotary: Any = None
        return self.sublayer(hidden, 0, rotary, step)


IDS = [2, 2, 5, 31, 88, 7, 7, 2, 60, 61, 5, 31, 88, 7, 12, 13, 14, 89, 0, 1]


def hidden_rows(n_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(n_rows, N_STREAMS * WIDTH + BESIDE, generator=generator)
    rows[0] = 0
    return rows.to(dtype)


def plain(weights: Weights, hidden: Tensor, ids: list[int]) -> Tensor:
    """What the layer makes of a whole text, in float64."""
    name, made = "model.layers.1.engram", hidden.double()
    rows = plain_rows(SMALL, weights.classes.tolist(), 1, ids)
    own = {kind: tensor.double() for kind, tensor in weights.tensors.items()}
    features = own[f"{name}.embed.weight"][rows].flatten(1)
    keys, values = (features @ own[f"{name}.kv_proj.weight"].T).split([72, WIDTH], 1)
    for at in range(len(ids)):
        for n in range(N_STREAMS):
            place = slice(n * WIDTH, (n + 1) * WIDTH)
            stream, key = hidden[at, place].double(), keys[at, place]
            dot = (stream * own[f"{name}.q_weight"][n] * own[f"{name}.k_weight"][n] * key).sum()
            dot = dot * (stream.square().mean() + EPS).rsqrt() * (key.square().mean() + EPS).rsqrt()
            dot = dot * WIDTH**-0.5
            gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
            made[at, place] += gate * values[at]
    return made


def test_streams_get_what_the_table_has_and_what_is_beside_them_stays() -> None:
    weights, hidden = Weights(SMALL_CONFIG), hidden_rows(len(IDS))
    made = Text(weights).step(hidden, (0, 0, IDS, 0))
    assert torch.equal(made[:, -BESIDE:], hidden[:, -BESIDE:])
    torch.testing.assert_close(made.double(), plain(weights, hidden, IDS), atol=2e-5, rtol=2e-5)
    wanted = plain_rows(SMALL, weights.classes.tolist(), 1, IDS)
    assert torch.equal(weights.asked[0].view_as(wanted), wanted)


@pytest.mark.parametrize("layer", [1, 3])
def test_rows_are_those_of_the_makers_description_wherever_a_text_is_cut(layer: int) -> None:
    classes = Weights(SMALL_CONFIG).classes
    hashes = NgramHashes(ngrams_of(SMALL_CONFIG), layer, VOCAB, classes)
    wanted = plain_rows(SMALL, classes.tolist(), layer, IDS)
    assert torch.equal(hashes.of_text(torch.tensor(IDS)), wanted)
    for n_before in (1, 3):
        assert torch.equal(hashes.of_text(torch.tensor(IDS), n_before), wanted[n_before:])
    assert int(wanted.max()) < sum(head_rows(ngrams_of(SMALL_CONFIG), layer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_a_whole_text_in_chunks_batches_and_behind_rejected_drafts(
    dtype: torch.dtype,
) -> None:
    hidden, weights = hidden_rows(len(IDS), dtype), Weights(SMALL_CONFIG, dtype)
    whole = Text(weights).step(hidden, (0, 0, IDS, 0))
    text, n = Text(weights), len(IDS)
    parts = [text.step(hidden[:1], (0, 0, IDS[:1], 0)), text.step(hidden[1:6], (0, 1, IDS[1:6], 0))]
    beside = hidden_rows(11, dtype)
    both = text.step(torch.cat((beside, hidden[6:9])), (1, 0, IDS[:11], 0), (0, 6, IDS[6:9], 0))
    parts.append(both[11:])
    wrong = [IDS[9], 40, 41, 42]
    drafted = text.step(hidden[9:13], (0, 9, wrong, 3))  # of which one is right
    parts.append(drafted[:1])
    parts += [text.step(hidden[at : at + 1], (0, at, IDS[at : at + 1], 0)) for at in range(10, n)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(both[:11], Text(weights).step(beside, (0, 0, IDS[:11], 0)))
