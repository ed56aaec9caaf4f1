"""Stages cut over shards: the very same bits as the whole stage, whatever is asked of them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.checkpoints import make_decoder, make_gpt2, make_llama
from support.models.family_cases import CASES
from support.models.gguf_files import write_gguf
from support.models.packed_blocks import packed_and_plain
from support.models.quantized_cases import CASES as STORED
from support.models.quantized_checkpoints import quantized
from support.needs import needs_library
from support.rings.changing_ring import pull
from support.rings.shard_threads import on_each_shard
from support.rings.stage_chain import CPU, StageChain, probed, random_prompt
from support.rings.torch_rings import TorchStages, request, run
from support.soak import cases, is_soak

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CapacityError, LostShardError
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.linear import KernelChoice
from shardnet.model.shards import cut
from shardnet.model.shards.group import ShardGroup
from shardnet.runtime.engine.requests import TokenGenerated
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import OpenSequence
from shardnet.types import (
    DType,
    Epoch,
    KvDType,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
)

pytestmark = needs_library

USUAL = [("llama", 4), ("gpt2", 2), ("gpt_oss-odd", 3), ("deepseek_v3", 2)]
ALL = [(name, n_shards) for name in ("llama", "gpt2", *CASES) for n_shards in (2, 3, 4)]
EVEN = {"num_attention_heads": 8, "num_key_value_heads": 2}
"""Of four shards each two have the same KV head. In most other cases heads do not divide by 4."""
HEADS = [(8, 2), (6, 3), (4, 1)]
KINDS = [DType.FLOAT32, DType.BFLOAT16, Quantization.INT8]
STORED_USUAL = ["awq", "fp8-blocks"]
SAMPLED = SamplingParams(temperature=0.8, seed=3)


def make(name: str, folder: Path) -> Path:
    if name == "gpt2":
        return make_gpt2(folder)
    config = EVEN if name == "llama" else CASES[name]
    return make_decoder(folder, name.split("-")[0], **config)


def assert_same_bits(
    folder: Path, n_shards: int, choice: KernelChoice | None = None, shares: Sequence[int] = ()
) -> None:
    """Prefill and decode, in two stages each of which is cut."""
    n_layers = Checkpoint.open(folder).config.n_layers
    ranges = [LayerRange(0, 1), LayerRange(1, n_layers)]
    prompt = random_prompt(70, 290, seed=1)

    def logits(group: ShardGroup | None = None) -> torch.Tensor:
        chain = StageChain.load(folder, ranges, choice, group=group, shares=shares)
        [made] = chain.generate([prompt], 3)
        return made

    whole = logits()
    for shard in on_each_shard(n_shards, logits):
        assert torch.equal(shard, whole)


@pytest.fixture
def _cuts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small linears cut too: all of a tiny checkpoint's are."""
    monkeypatch.setattr(cut, "WHOLE_WEIGHTS", 0)


@pytest.mark.usefixtures("_cuts_all")
@pytest.mark.parametrize(("name", "n_shards"), cases(USUAL, [c for c in ALL if c not in USUAL]))
def test_every_family_gives_the_bits_of_the_whole_stage(
    name: str, n_shards: int, tmp_path: Path
) -> None:
    shares = (2, 7, 3) if n_shards == 3 else ()
    assert_same_bits(make(name, tmp_path), n_shards, shares=shares)


@pytest.mark.usefixtures("_cuts_all")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
def test_unequal_shards_of_any_number_give_the_bits_of_the_whole_stage(
    heads: tuple[int, int], kind: DType | Quantization, tmp_path: Path
) -> None:
    """Each with all heads and all kinds; the long form has them all together."""
    n_heads, n_kv_heads = heads
    sizes = {"num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "head_dim": 16}
    folder = make_decoder(
        tmp_path, "llama", num_hidden_layers=2, hidden_size=96, intermediate_size=144, **sizes
    )
    dtype, quant = (DType.FLOAT32, kind) if isinstance(kind, Quantization) else (kind, None)
    all_shares = ((5, 1), (1, 1, 1), (2, 7, 3), (1, 1, 1, 1, 1), (3, 1, 1, 6, 2))
    first = (HEADS.index(heads) + KINDS.index(kind)) % 3
    for shares in all_shares if is_soak() else all_shares[first::3]:
        assert_same_bits(folder, len(shares), probed(CPU, dtype, None, quant), shares)


@pytest.mark.usefixtures("_cuts_all")
@pytest.mark.parametrize(
    ("name", "kind"),
    cases(
        [("qwen2", Quantization.INT4)],
        [(name, kind) for name in ("llama", "gpt2", "mixtral") for kind in Quantization],
    ),
)
def test_quantised_while_loading(name: str, kind: Quantization, tmp_path: Path) -> None:
    assert_same_bits(make(name, tmp_path), 2, probed(CPU, DType.FLOAT32, None, kind))


@pytest.mark.usefixtures("_cuts_all")
@pytest.mark.parametrize(
    "name", cases(STORED_USUAL, [name for name in STORED if name not in STORED_USUAL])
)
def test_quantised_as_stored(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    source = make_llama(tmp_path / "source", with_tokenizer=False, num_hidden_layers=2, **sizes)
    write = partial(STORED[name].write, np.random.default_rng(7))
    quantized(source, tmp_path / "made", STORED[name].config, write, STORED[name].also)
    assert_same_bits(tmp_path / "made", 4)


@pytest.mark.usefixtures("_cuts_all")
def test_blocks_of_gguf(tmp_path: Path) -> None:
    """Rows of queries and keys that stand in another order, forms that differ, a packed table."""
    kinds = {"attn_q": "Q4_0", "attn_k": "Q8_0", "ffn_up": "Q5_0", "ffn": "Q4_0", "token": "Q8_0"}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    source = make_decoder(tmp_path, "llama", num_attention_heads=4, **sizes)
    packed, _ = packed_and_plain(kinds)
    assert_same_bits(write_gguf(source, tmp_path / "packed.gguf", pack=packed), 2)


def test_two_sharded_stages_generate_what_whole_ones_do(tmp_path: Path) -> None:
    """The whole way from requests to tokens: chunks, batches, warm slots, greedy and sampled.

    All shards but the first follow as they do in processes.
    """
    folder = make_decoder(tmp_path, "llama", num_hidden_layers=2, **EVEN)
    ranges = [LayerRange(0, 1), LayerRange(1, 2)]
    prompt = random_prompt(40, 290, seed=1)
    requests = [
        request(prompt, 6),
        request(prompt, 6, SAMPLED),
        request([*prompt[:30], 5], 4, SamplingParams(n_logprobs=2, repetition_penalty=1.2)),
    ]
    texts = []
    for n_shards in (1, 2):
        stages = TorchStages(folder, ranges, n_shards=n_shards)
        texts.append(
            [
                [
                    (event.token_id, event.logprobs)
                    for event in events
                    if isinstance(event, TokenGenerated)
                ]
                for at_once in (True, False)
                for events in run(stages, *requests, at_once=at_once)
            ]
        )
        del stages
        gc.collect()  # a ring that has ended is a cycle; shards end with their stage
    assert texts[0] == texts[1]
    assert all(len(text) >= 4 for text in texts[0])


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "deepseek_v2", "llama"])
def test_slots_move_between_whole_and_sharded_stages(family: str, tmp_path: Path) -> None:
    """Rows, quantised or not, of a window or not, and states: both ways, through plain bytes."""
    more: dict[str, Any] = {}
    if family == "gemma3_text":
        more = {"head_dim": 32, "sliding_window": 6}
    if family == "qwen3_next":
        more = {"layer_types": ["linear_attention", "full_attention"]}
    if family == "deepseek_v2":
        more = {"num_key_value_heads": 8}
    if family == "llama":  # of two shards one has two of the three
        more = {"num_attention_heads": 6, "num_key_value_heads": 3}
    folder = make_decoder(tmp_path, family, num_hidden_layers=2, **EVEN | more)
    kv_dtype = KvDType.INT8 if family == "gemma3_text" else KvDType.AUTO
    layers = [LayerRange(0, 2)]
    stages = [
        TorchStages(folder, layers, kv_dtype=kv_dtype, n_shards=n_shards)
        for n_shards in (1, 2, 5 if family == "llama" else 4)
    ]
    prompt = random_prompt(300, 290, seed=1)
    drawn = []
    for first, second in ((0, 1), (1, 2), (2, 0)):
        old, new = stages[first], stages[second]
        old.open(SAMPLED, n_prompt=300)
        old.step(0, prompt[:150], 0)
        old.step(150, prompt[150:], 1)
        _move(old, new, prompt)
        drawn.append([new.step(300 + n, [n], 1).token_ids for n in range(4)])
        drawn.append([old.step(300 + n, [n], 1).token_ids for n in range(4)])
        for each in (old, new):
            each.computes[0].reset()
    assert all(tokens == drawn[0] for tokens in drawn)


def _move(old: TorchStages, new: TorchStages, prompt: list[int]) -> None:
    """Move sequence 0 as nodes do it."""
    sequence, slot, end = SequenceId(0), SlotId(0), len(prompt)
    source, target = old.computes[0].moves, new.computes[0].moves
    target.begin(sequence, prompt)
    found = source.look(sequence, slot, end)
    assert all(source.form(layer) == target.form(layer) for layer in found)
    pull(found, target, found, sequence)
    opened = OpenSequence(
        sequence_id=sequence,
        slot=slot,
        sampling=SAMPLED,
        n_kept=end,
        n_prompt=end,
        is_restored=True,
    )
    new.computes[0].operate(opened)


def test_rows_that_equal_those_sampled_are_computed_by_all_shards(tmp_path: Path) -> None:
    """So it is where a token is repeated and the logprobs of the prompt are asked for, too."""
    folder = make_decoder(tmp_path, "llama", num_hidden_layers=2)
    whole, cut = (TorchStages(folder, [LayerRange(0, 2)], n_shards=n) for n in (1, 2))
    for stages in (whole, cut):
        stages.open(SAMPLED)
    assert cut.step(0, [5, 5], 2) == whole.step(0, [5, 5], 2)
    [model] = [compute._model for compute in cut.computes]
    step = MicroBatch(
        epoch=Epoch(1),
        step=StepId(2),
        groups=(
            RowGroup(sequence_id=SequenceId(0), slot=SlotId(0), position=2, n_rows=2, n_sampled=2),
        ),
        token_ids=[6, 7],
    )
    rows = model.run(step, None)
    assert torch.equal(model.logits(rows), model.logits(rows))


def test_a_lost_shard_is_named_and_ends_the_stage(tmp_path: Path) -> None:
    """A step that no shard can compute does not."""
    stages = TorchStages(make_decoder(tmp_path, "llama"), [LayerRange(0, 4)], n_shards=2)
    stages.open(SAMPLED)
    with pytest.raises(CapacityError, match="beyond the context"):  # on each shard
        stages.step(stages.context, [1], 1)
    stages.step(0, [1, 2, 3], 1)
    assert not stages.computes[0].is_lost
    followers = stages.computes[0]._model.followers
    followers._followers[0].process.kill()
    followers._followers[0].process.wait()
    with pytest.raises(LostShardError, match="shard 1 of 2"):
        stages.step(3, [4], 1)
    assert stages.computes[0].is_lost
