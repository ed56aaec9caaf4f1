"""Tables whose files other nodes have: which rows are asked for, how often, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from support.cluster.bulk_peers import empty_replica
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.models.gguf_files import write_gguf
from support.rings.stage_chain import CPU, Rows, StageChain, probed, random_prompt
from support.rings.stage_forms import form_of
from test_file_table import each_part, in_fp8
from test_file_table import node as make_node

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import Replica, range_tensors, stored_layers, table_tensors
from shardnet.checkpoint.tensors.stored_tensor import StoredRow
from shardnet.cluster.planning.model_shape import model_shape
from shardnet.cluster.planning.placing import make_plan
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.sharing.replica_sources import ReplicaSource
from shardnet.cluster.store.local_models import OpenModel
from shardnet.errors import CapacityError, PlanError
from shardnet.model.mixers.short_conv import NgramHashes
from shardnet.runtime.loading.loaded_stage import LoadedStage
from shardnet.runtime.loading.loading import load as load_order
from shardnet.runtime.loading.model_facts import identify
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.stage.estimate.memory_estimate import KEPT_ROWS_BYTES
from shardnet.stage.file_table import RowCache
from shardnet.types import PREFILL_CHUNK_ROWS, DType, LayerRange, NodeId
from shardnet.wire.messages.plans import ModelChoice

LAYERS = LayerRange(0, 4)
SIZES = {"ple_layer_ids": [2, 3], "ngram_vocab_size_base": 3000}
SIZES |= {"layer_types": ["linear_attention"] * 3 + ["indexed_attention"]}
OF_GGUF = {"split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 1, "ple_layer_ids": [2]}
PROMPT = random_prompt(300, 90, seed=7)


class Elsewhere:
    """A checkpoint without its tables, and one with them that is asked for their rows."""

    def __init__(self, whole: Path, folder: Path) -> None:
        source, tables = OpenModel(whole), table_tensors(Checkpoint.open(whole), LAYERS)
        self.source, self.folder = source, folder
        self.asked: list[Sequence[StoredRow]] = []
        replica = Replica(empty_replica(whole, folder))
        names = [n for n in range_tensors(replica.checkpoint, LAYERS) if n not in tables]
        for part in replica.parts(names):
            data = source.files.read(part.file, part.offset, part.size_bytes)
            replica.write(part, 0, memoryview(data))
            replica.record(part, source.files.digest(part))
        replica.close()
        self.chain, self.whole = load(folder), load(whole)
        self.tables = self.chain.stages[0].tables
        self.cache.ask = self.ask

    def ask(self, model_id: str, rows: Sequence[StoredRow]) -> bytearray:
        assert model_id == self.source.checkpoint.model_id
        assert len(rows) == len({*rows})
        self.asked.append(rows)
        places = [place for row in rows for place in self.source.rows(row.tensor, [row.number])]
        assert [n_bytes for _, _, n_bytes in places] == [row.n_bytes for row in rows]
        return bytearray(self.source.files.read_all(places))

    @property
    def cache(self) -> RowCache:
        [cache] = {table.cache for table in self.tables}
        assert cache is not None
        return cache

    def steps_give_the_same(self, end: int) -> None:
        """Compute the prompt in chunks, then token by token up to `end`, with both."""
        begins = [*range(0, len(PROMPT), PREFILL_CHUNK_ROWS), *range(len(PROMPT), end)]
        ids = [*PROMPT, *random_prompt(end - len(PROMPT), 90, seed=8)]
        for begin, stop in zip(begins, [*begins[1:], end], strict=True):
            rows = Rows(slot=0, position=begin, ids=ids[begin:stop], n_sampled=1)
            assert torch.equal(*(chain.step(rows) for chain in (self.chain, self.whole)))


def load(folder: Path) -> StageChain:
    return StageChain.load(folder, [LAYERS], probed(CPU, DType.FLOAT32, None))


def made(form: str, folder: Path) -> Path:
    """A model with tables in float32, in FP8 with a scale or some for each row, or in a GGUF.

    Or one with Engram's, whose rows are of classes of tokens.
    """
    if form == "engram":
        sizes = {"num_hidden_layers": 4, "engram_vocab_size": 3000, "engram_n_heads": 1}
        return make_decoder(folder / "model", "deepseek_v41", engram_layer_ids=[1, 2], **sizes)
    own = SIZES | {"gguf": OF_GGUF, "scales": {"ple_embed_dim": 4 * 64}}.get(form, {})
    sizes = CASES["qwen4_exp_text"] | own
    source = make_decoder(folder / "model", "qwen4_exp_text", with_tokenizer=False, **sizes)
    if form in ("fp8", "scales"):
        source, _ = in_fp8(source, folder, each_part if form == "scales" else None)
    return write_gguf(source, folder / "model.gguf") if form == "gguf" else source


@pytest.fixture
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Elsewhere]:
    form = getattr(request, "param", "float32")
    elsewhere = Elsewhere(made(form, tmp_path), tmp_path / "replica")
    yield elsewhere
    elsewhere.source.close()


@pytest.mark.parametrize("elsewhere", ["float32", "fp8", "scales", "gguf", "engram"], indirect=True)
def test_bits_are_those_of_files_here_and_a_step_asks_once_for_all_tables(
    elsewhere: Elsewhere,
) -> None:
    n_tables = len(elsewhere.cache.tables)
    assert n_tables == len(elsewhere.tables) > 0
    stored = stored_layers(Checkpoint.open(elsewhere.folder))
    assert {*chain(*stored.but_tables)} == {n for n, size in enumerate(stored.looked_up) if size}
    assert {*chain(*stored.held, *stored.but_tables)} == {*LAYERS}
    elsewhere.steps_give_the_same(len(PROMPT) + 3)
    assert len(elsewhere.asked) == math.ceil(len(PROMPT) / PREFILL_CHUNK_ROWS) + 3
    heads = 4 * n_tables
    assert [len(rows) <= heads for rows in elsewhere.asked[-3:]] == [True] * 3
    assert len({row.tensor for row in elsewhere.asked[0]}) >= n_tables
    elsewhere.asked.clear()
    elsewhere.steps_give_the_same(len(PROMPT) + 3)
    assert elsewhere.asked == [], "all of it is kept"


@pytest.mark.parametrize("n_sequences", [1, 2])
def test_tokens_of_a_step_are_hashed_once_for_each_table(
    elsewhere: Elsewhere, n_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    hashes = NgramHashes.__call__

    def counted(own: NgramHashes, ids: torch.Tensor) -> torch.Tensor:
        hashed.append(len(ids))
        return hashes(own, ids)

    monkeypatch.setattr(NgramHashes, "__call__", counted)
    slots = range(n_sequences)
    for position in range(3):
        steps = [Rows(slot=slot, position=position, ids=[5 + slot], n_sampled=1) for slot in slots]
        assert torch.equal(*(chain.step(*steps) for chain in (elsewhere.chain, elsewhere.whole)))
        assert len(hashed) == 2 * n_sequences * len(elsewhere.tables)
        hashed.clear()


def test_no_more_is_kept_than_there_is_room_for(elsewhere: Elsewhere) -> None:
    elsewhere.cache.most_bytes = 5000
    elsewhere.steps_give_the_same(len(PROMPT) + 2)
    assert 0 < elsewhere.cache._kept_bytes <= 5000
    assert len(elsewhere.cache._kept) * 256 < 5000


def test_memory_of_rows_is_planned_and_left_by_what_is_loaded(elsewhere: Elsewhere) -> None:
    facts = identify(elsewhere.folder)
    shape = model_shape(facts.config, DType.FLOAT32, 256)
    needed, choice = (
        shape.memory_bytes(LAYERS),
        ModelChoice(model="m", dtype="float32", context=256),
    )

    def planned(memory_bytes: int, room_bytes: int) -> Plan:
        node = make_node("bert", memory_bytes)
        bert = ReplicaSource(
            node=NodeId(node.node),
            name="bert",
            address=node.address,
            model_id=facts.model_id,
            is_complete=False,
            but_tables=(LAYERS,),
            room_bytes=room_bytes,
        )
        return make_plan(choice, facts, [node], holdings={bert.node: bert})

    def loaded(folder: Path, memory_bytes: int) -> LoadedStage:
        order = StageOrder(
            form=form_of(folder, context=256), folder=folder, layers=LAYERS, is_tail=True
        )
        return load_order(order, memory_bytes, lambda *_: None)

    alone, asking = planned(needed, 1 << 40), planned(needed + KEPT_ROWS_BYTES, 0)
    [[own], [other]] = alone.placement.stages, asking.placement.stages
    assert (own.asks_rows, other.asks_rows) == (False, True)
    assert other.working_bytes == own.working_bytes + KEPT_ROWS_BYTES
    assert asking.kept == alone.kept is not None
    with pytest.raises(PlanError):
        planned(needed + KEPT_ROWS_BYTES - 1, 0)
    whole = loaded(elsewhere.source.checkpoint.path, needed)
    part = loaded(elsewhere.folder, needed + KEPT_ROWS_BYTES)
    assert part.room_blocks == whole.room_blocks < 100
    assert part.weight_bytes_by_place[0] == whole.weight_bytes_by_place[0] + KEPT_ROWS_BYTES
    with pytest.raises(CapacityError):
        loaded(elsewhere.folder, needed)


def test_a_prompt_that_was_read_ahead_waits_for_nobody(elsewhere: Elsewhere) -> None:
    for table in elsewhere.tables:
        assert len([*table.asking(PROMPT)]) == 2
    n_asks = len(elsewhere.asked)
    assert n_asks == 2 * len(elsewhere.tables)
    elsewhere.steps_give_the_same(len(PROMPT) + 1)
    assert len(elsewhere.asked) == n_asks + 1, "a row that nobody knew before"


def test_read_ahead_is_no_more_than_is_kept(elsewhere: Elsewhere) -> None:
    elsewhere.cache.most_bytes = 2 * 100 * (256 + elsewhere.tables[0].row_bytes)
    for table in elsewhere.tables:
        assert len([*table.asking(PROMPT)]) == 2
    assert sum(map(len, elsewhere.asked)) == 200
    assert elsewhere.cache._kept.keys() == {row for rows in elsewhere.asked for row in rows}


def test_a_step_that_waits_is_asked_for_once_for_all_tables(elsewhere: Elsewhere) -> None:
    elsewhere.steps_give_the_same(len(PROMPT))
    elsewhere.asked.clear()
    text = [*PROMPT[-2:], 5, 6]
    for table in elsewhere.tables:
        table._ask_for([(text, 2)])
    [rows] = elsewhere.asked
    assert len({row.tensor.partition(".ple.")[0] for row in rows}) == 2
    assert len(rows) <= 2 * 4 * len(elsewhere.tables)
