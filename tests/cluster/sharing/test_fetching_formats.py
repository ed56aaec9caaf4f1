"""Weight sharing in every format: a stage's stored tensors come, and no byte more."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from support.cluster.bulk_peers import Sources, open_sources
from support.models.checkpoints import make_decoder, make_llama
from support.models.consolidated_checkpoints import to_meta
from support.models.family_cases import CASES
from support.models.gguf_files import pack_as, write_gguf
from support.models.torch_checkpoints import to_torch_files
from support.rings.stage_chain import CPU, Rows, StageChain, batch_of, probed

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import (
    Replica,
    begin_replica,
    check_heads,
    lay_out,
    range_tensors,
)
from shardnet.cluster.sharing.bulk_client import BulkClient
from shardnet.cluster.sharing.fetching import Fetch, Fetched
from shardnet.model.families.stage_tensors import stage_tensors
from shardnet.types import DType, LayerRange

LAYERS = LayerRange(1, 2)


def make_source(form: str, folder: Path) -> Path:
    match form:
        case "safetensors":
            return make_llama(folder, max_shard_size="60KB")
        case "gguf":
            source = make_llama(folder / "hf", hidden_size=96, intermediate_size=160)
            pack = pack_as(gguf.GGMLQuantizationType.Q8_0)
            return write_gguf(source, folder / "model.gguf", pack=pack)
        case "gguf-table":  # whose rows are looked up in a file that the other node has, too
            ngrams = {"ple_layer_ids": [2], "ngram_vocab_size_base": 30, "heads_per_ngram": 2}
            sizes = {"split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 1}
            kinds = {"layer_types": ["linear_attention"] * 3 + ["indexed_attention"]}
            config = ngrams | sizes | kinds | {"output_gate_type": "sigmoid"}
            source = make_decoder(folder / "hf", "qwen4_exp_text", **config)
            return write_gguf(source, folder / "model.gguf")
        case "torch":
            return to_torch_files(make_llama(folder.parent / "hf"), folder, 2)
        case "consolidated":
            source = make_llama(folder.parent / "hf", intermediate_size=128)
            return to_meta(source, folder, 2, cut_embedding_columns=True)
    raise AssertionError(form)


async def begin(sources: Sources, source: Path, folder: Path) -> None:
    """Fetch all but the tensors, as Sharing does."""
    model_id = Checkpoint.open(source).model_id
    link = await sources.dial("anna")
    client = BulkClient(link, model_id)
    heads = await client.skeleton()
    check_heads(heads, client.name)
    files = lay_out(folder, heads)
    for head in heads:
        async for at, piece in client.head(head):
            files.write(head.name, at, piece)
    files.close()
    await link.close()
    begin_replica(folder, model_id, client.name)


async def fetched_from(source: Path, replica: Path, layers: LayerRange = LAYERS) -> Fetched:
    """Fetch layers of a checkpoint from a node that has it."""
    async with open_sources() as sources:
        sources.add("anna", source, replica.parent / "cache")
        await begin(sources, source, replica)
        return await fetch(sources, replica, layers)


async def fetch(sources: Sources, folder: Path, layers: LayerRange) -> Fetched:
    replica = Replica(folder)
    try:
        return await Fetch(
            model_id=replica.checkpoint.model_id,
            replica=replica,
            sources=["anna"],
            dial=sources.dial,
            writer=sources.disk,
            on_progress=lambda done, total: None,
            log=print,
        ).run(range_tensors(replica.checkpoint, layers))
    finally:
        await sources.disk.run(replica.close)


@pytest.mark.parametrize("form", ["safetensors", "gguf", "gguf-table", "torch", "consolidated"])
def test_a_stage_comes_from_another_node(form: str, tmp_path: Path) -> None:
    source = make_source(form, tmp_path / "source")
    replica = tmp_path / "replica"
    replica.mkdir()
    fetched = asyncio.run(fetched_from(source, replica))
    whole, part = Checkpoint.open(source), Checkpoint.open(replica)
    wanted = stage_tensors(whole.config, LAYERS).all
    assert fetched.n_bytes == sum(whole.tensors[name].size_bytes for name in wanted)
    assert fetched.n_bytes < sum(info.size_bytes for info in whole.stored.values()) / 2
    assert (part.model_id, part.config) == (whole.model_id, whole.config)
    for name in wanted:
        assert torch.equal(part.read(name), whole.read(name))
    sources = {source.name for name in wanted for source in whole.tensors[name].sources}
    assert set(part.missing(part.stored)) == part.stored.keys() - sources


def test_a_table_comes_from_another_node_and_is_looked_up_in_the_copy(tmp_path: Path) -> None:
    """No row is asked of the other node afterwards: its files are gone."""
    layers, config = LayerRange(2, 3), CASES["qwen4_exp_text"]
    source = make_decoder(tmp_path / "source", "qwen4_exp_text", with_tokenizer=False, **config)
    replica, choice = tmp_path / "replica", probed(CPU, DType.FLOAT32, None)
    whole = StageChain.load(source, [layers], choice).stages[0]
    batch = batch_of([Rows(slot=0, position=0, ids=[5, 6, 1, 7, 8, 5, 6], n_sampled=0)])
    hidden = torch.randn(7, whole.width)
    wanted = whole.forward(batch, hidden)
    replica.mkdir()
    fetched = asyncio.run(fetched_from(source, replica, layers))
    tables = stage_tensors(whole.config, layers).looked_up
    held = Checkpoint.open(replica)
    assert 0 < sum(held.tensors[name].size_bytes for name in tables) < fetched.n_bytes
    shutil.rmtree(source)
    stage = StageChain.load(replica, [layers], choice).stages[0]
    assert {part.path.parent for table in stage.tables for part in table.parts} == {replica}
    assert torch.equal(stage.forward(batch, hidden), wanted)
