"""How long turns of a long conversation take, and what memory keeps of conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardnet.cluster.measuring.measurement import Measured
from shardnet.cluster.placement.estimate import ASSUMED_DISK_BYTES_PER_S
from shardnet.cluster.placement.figures import LinkSpeed, StageSpeed
from shardnet.cluster.planning.placing import make_plan
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.turns import (
    StagePace,
    depth_seconds,
    kept_positions,
    long_turn,
    planned_turns,
    prompt_s,
)
from shardnet.model.families.registry import parse_config
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.runtime.scheduling.admission_queue import WARM_CONTEXTS, WARM_SHARE
from shardnet.types import LayerRange, NodeId
from shardnet.wire.messages.measurements import NodeMeasured
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice

GIB = 2**30
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 1 << 16,
    "torch_dtype": "bfloat16",
}
DENSE = SIZES | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
HYBRID = SIZES | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
}
WINDOWS = SIZES | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 512,
    "query_pre_attn_scalar": 64,
}


def planned(
    raw: dict[str, Any],
    *,
    context: int = 32768,
    memory: int = GIB,
    disk_bytes_per_s: float | None = None,
    is_measured: bool = True,
) -> Plan:
    """Plan a model over two nodes, each of which takes 0.1 s for a layer's chunk."""
    names = [NodeId("a"), NodeId("b")]
    nodes = [
        NodeInfo(
            node=name,
            name=name,
            address=f"{name}:1",
            version="0",
            device="cpu",
            memory_bytes=memory,
            memory_free_bytes=memory,
            cores=2,
            threads=1,
            dtypes=["bfloat16", "float32"],
            host_id="h",
        )
        for name in names
    ]
    speed = StageSpeed(layer_s=0.01, layer_256_s=0.1, embed_s=0.0, head_s=0.5)
    measured = Measured(
        speeds=dict.fromkeys(names, speed) if is_measured else {},
        links={(names[0], names[1]): LinkSpeed(round_trip_s=0.2, bytes_per_s=1e12)},
        reports=tuple(
            NodeMeasured(
                node=name, name=name, memory_bytes=memory, disk_bytes_per_s=disk_bytes_per_s
            )
            for name in names
        ),
    )
    facts = ModelFacts(
        model_id="ab" * 32,
        path=Path("/m"),
        config=parse_config(raw, "config.json"),
        config_text="{}",
        stamp=(),
        is_complete=True,
    )
    choice = ModelChoice(model="/m", context=context, nodes=["a:1", "b:1"], layers=[(0, 4), (4, 8)])
    return make_plan(choice, facts, nodes, measured)


def test_chunks_follow_each_other_and_the_first_passes_all_stages() -> None:
    stages = [StagePace(chunk_s=1.0, hop_s=0.5), StagePace(chunk_s=3.0)]
    assert prompt_s(stages, 0, 1024) == pytest.approx(4 * 3 + 1 + 0.5)
    assert prompt_s(stages, 1024, 1024 + 384) == pytest.approx(1.5 * 3 + 1 + 0.5)
    assert prompt_s(stages, 1024, 1024) == 0


def test_attention_takes_longer_the_more_is_before_it_up_to_its_window() -> None:
    stage = StagePace(chunk_s=1.0, depth_s=((0.001, None), (0.001, 512)))
    assert [stage.at(position) for position in (0, 256, 1024)] == pytest.approx(
        [1.0, 1.0 + 2 * 0.256, 1.0 + 1.024 + 0.512]
    )


@pytest.mark.parametrize(("raw", "windows"), [(DENSE, {None}), (WINDOWS, {512, None})])
def test_a_position_costs_what_its_products_are_of_those_of_the_layer(
    raw: dict[str, Any], windows: set[int | None]
) -> None:
    config = parse_config(raw, "config.json")
    found = depth_seconds(config, LayerRange(0, 8), 0.1)
    weights = 256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 512  # and a few of norms
    assert [each for each, _ in found] == pytest.approx([0.1 * 4 * 128 / weights] * 8, rel=0.01)
    assert {window for _, window in found} == windows


def test_layers_with_a_state_take_the_same_everywhere() -> None:
    config = parse_config(HYBRID, "config.json")
    assert len(depth_seconds(config, LayerRange(0, 8), 0.1)) == 2


def test_a_turn_is_read_from_the_slowest_disk_where_that_pays() -> None:
    stages = [
        StagePace(chunk_s=1.0, block_bytes=100, disk_bytes_per_s=1000.0),
        StagePace(chunk_s=1.0, block_bytes=100, state_bytes=300, disk_bytes_per_s=500.0),
    ]
    turns = planned_turns(stages, 32768, head_s=0.25)
    assert (turns.n_prompt, turns.n_next, turns.disk_bytes_per_s) == (30_000, 700, 500.0)
    n_blocks = 30_000 // 256
    read_s, rest_s = (n_blocks * 100 + 300) / 500, prompt_s(stages, n_blocks * 256, 30_700)
    assert turns.resumed_s == pytest.approx(0.25 + read_s + rest_s)
    assert turns.next_s < turns.resumed_s < turns.first_s
    slow = [StagePace(chunk_s=1.0, block_bytes=100, disk_bytes_per_s=1.0)]
    assert planned_turns(slow, 32768, 0.0).resumed_s == prompt_s(slow, 0, 30_700)


@pytest.mark.parametrize(
    ("context", "turn"),
    [(1 << 20, (30_000, 700)), (8192, (7492, 700)), (100, (50, 50)), (1, (1, 0))],
)
def test_a_turn_is_one_that_the_context_holds(context: int, turn: tuple[int, int]) -> None:
    assert long_turn(context) == turn
    assert planned_turns([StagePace(chunk_s=1.0)], context, 0.0).n_prompt == turn[0]


def test_a_plan_tells_of_turns_from_what_was_measured() -> None:
    turns = planned(DENSE).reply(1).turns
    assert turns is not None
    depth = sum(each for each, _ in depth_seconds(parse_config(DENSE, "c"), LayerRange(0, 4), 0.1))
    chunks = [0.4 + depth * at for at in range(0, 30_000, 256)]
    chunks[-1] *= (30_000 % 256) / 256
    assert turns.first_s == pytest.approx(sum(chunks) + 0.4 + 0.1 + 0.5, rel=1e-3)
    assert turns.next_s < turns.resumed_s < turns.first_s / 10
    assert turns.disk_bytes_per_s == ASSUMED_DISK_BYTES_PER_S
    told = planned(DENSE, disk_bytes_per_s=1e6).reply(1).turns
    assert told is not None
    assert told.disk_bytes_per_s == 1e6
    assert told.resumed_s > turns.resumed_s


def test_without_measurements_a_plan_tells_what_is_kept_alone() -> None:
    reply = planned(DENSE, is_measured=False).reply(1)
    assert reply.turns is None
    assert reply.kept is not None


def test_memory_keeps_what_warm_slots_may_hold_of_the_smallest_stage() -> None:
    """Keys and values of a position are 2 heads of 64 twice over, in bfloat16."""
    large, small = (
        planned(DENSE, context=2048, memory=memory).reply(1).kept for memory in (GIB, GIB // 2)
    )
    assert large is not None
    assert small is not None
    assert large.kv_bytes == large.positions * 8 * 2 * 2 * 64 * 2
    assert small.positions < large.positions <= WARM_SHARE * GIB / (4 * 2 * 2 * 64 * 2)
    assert (large.n_prompt, large.conversations) == (1348, large.positions // 256 // 6)
    assert (large.states, large.state_bytes) == (0, 0)
    whole = planned(DENSE).reply(1).kept
    assert whole is not None
    assert whole.positions >= WARM_CONTEXTS * 32768
    assert whole.conversations == whole.positions // 256 // 118


def test_conversations_of_hybrids_need_a_state_each() -> None:
    kept = planned(HYBRID).reply(1).kept
    assert kept is not None
    assert 0 < kept.conversations <= kept.states
    config = parse_config(HYBRID, "config.json")
    one = sum(s.size_bytes(config.checkpoint_dtype) for n in range(8) if (s := config.state(n)))
    assert kept.state_bytes == kept.states * one
    few, many = (kept_positions(1180, 1, 1, n_states) for n_states in (3, 100))
    assert (few.conversations, many.conversations) == (3, 10)
