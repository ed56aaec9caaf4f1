"""The facts for a diagnosis, gathered from nodes in this process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from support.cluster.checkup_facts import findings
from support.cluster.small_node import small_settings
from support.cluster.watchers import new_record
from support.models.checkpoints import make_llama
from support.models.gguf_files import pack_as, write_gguf

from shardnet.api import diagnostics
from shardnet.api.diagnostics import FactSources, gather_facts
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.cluster.diagnosis.facts import Facts, KeyFacts
from shardnet.cluster.discovery.service_browser import NodeRecord
from shardnet.cluster.machine.local_nodes import LocalNode
from shardnet.cluster.node import reporter
from shardnet.cluster.node.node import listening
from shardnet.cluster.planning.placing import unmeasured
from shardnet.errors import CheckpointError
from shardnet.runtime.loading.model_facts import identify
from shardnet.types import NodeId


def test_nodes_are_asked_for_what_this_machine_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node here knows nobody, and has a model under a name of which a part is given. Another
    one is named, and answers. There is no key, so this process looks for nodes itself."""
    for module, deadline in ((diagnostics, "ANSWER_S"), (reporter, "IDENTIFY_S")):
        monkeypatch.setattr(module, deadline, 60.0)

    def lacks(model: str, *, ignore_unknown_config: bool) -> None:
        raise CheckpointError(f"there is no checkpoint folder at {model}")

    monkeypatch.setattr(diagnostics, "identify_at", lacks)
    cleos = new_record("cleo")

    async def browse() -> list[NodeRecord]:
        return [cleos]

    async def main() -> Facts:
        settings = small_settings(tmp_path / "anna")
        other = replace(small_settings(tmp_path / "bert"), node=NodeId("b" * 32), name="bert")
        async with (
            listening(settings, "127.0.0.1", 0) as anna,
            listening(other, "127.0.0.1", 0) as bert,
        ):
            here = LocalNode(
                node=anna.node, name="anna", address=anna.address, pid=1, started=0.0, place=""
            )
            return await gather_facts(
                FactSources(
                    key=KeyFacts(path="/none"),
                    identity=None,
                    here=[here],
                    named=[bert.address, anna.address],
                    browse=browse,
                    model=DEFAULT_MODEL_NAME.rpartition("/")[2],
                    timeout_s=60.0,
                )
            )

    facts = asyncio.run(main())
    assert facts.asked_reply is not None
    assert [reply.name for reply in facts.replies] == ["anna", "bert"]
    assert [one.name for one in facts.unknown] == ["bert"]
    assert facts.found is not None
    assert [one.node for one in facts.others_found] == [cleos.node]
    assert facts.model is not None
    assert facts.model.shape is not None
    assert facts.model.model_id == facts.asked_reply.report.model_id  # type: ignore[union-attr]
    assert ("problem", "model") not in {found[:2] for found in findings(facts)}


def test_a_packed_model_is_weighed_as_a_plan_weighs_it(tmp_path: Path) -> None:
    """Doctor said of a file of 4 bits what it would take unpacked."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    source = make_llama(tmp_path / "plain", num_attention_heads=4, vocab_size=64, **wide)
    pack = pack_as(gguf.GGMLQuantizationType.Q4_0)
    packed = write_gguf(source, tmp_path / "packed.gguf", pack=pack)
    sources = FactSources(
        key=KeyFacts(path="/none"),
        identity=None,
        here=[],
        named=[],
        browse=None,
        model=str(packed),
        timeout_s=60.0,
    )
    told = asyncio.run(gather_facts(sources)).model
    assert told is not None
    assert told.shape is not None
    usual, _ = unmeasured(identify(packed), [])
    assert told.shape == usual
    assert told.shape.layer_bytes < 0.4 * 2 * 4 * 256 * (256 + 512)
