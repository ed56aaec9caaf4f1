"""Which experts rows visit, on whole rings: as in transformers, however the rows travelled.

The second layer has none: it says -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.models.checkpoints import make_decoder
from support.oracles.oracle import load_reference
from support.rings.stage_chain import even_split, random_prompt
from support.rings.torch_rings import TorchStages, request, run, tokens_of
from support.soak import cases

from shardnet.output_params import OutputKind, OutputParams
from shardnet.runtime.engine.outputs import RowsReady
from shardnet.runtime.engine.requests import RequestEvent, RequestMoved, Speculation
from shardnet.runtime.scheduling.drafting import NgramDrafts
from shardnet.slot_operations import OpenSequence

N_LAYERS = 4
ASKING = OutputParams(routing=True)
Experts = NDArray[np.int16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_decoder(tmp_path_factory.mktemp("model"), "qwen3_moe", mlp_only_layers=[1])


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(scope="module", params=cases([1], [2, 3, 4]))
def stages(request: pytest.FixtureRequest, folder: Path) -> TorchStages:
    return TorchStages(folder, even_split(N_LAYERS, request.param))


def wanted_experts(model: Any, tokens: Sequence[int]) -> list[list[list[int]]]:
    """What transformers' routers choose for `tokens`: [T, layers, K], the best first."""
    chosen: dict[int, Any] = {}
    hooks = []
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):

            def keep(module: Any, args: Any, out: Any, number: int = number) -> None:
                chosen[number] = out[2]

            hooks.append(layer.mlp.gate.register_forward_hook(keep))
    with torch.inference_mode():
        model(torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    none = torch.full_like(next(iter(chosen.values())), -1)
    layers = [chosen.get(number, none) for number in range(len(model.model.layers))]
    experts: list[list[list[int]]] = torch.stack(layers, 1).tolist()
    return experts


def routing_of(events: Sequence[RequestEvent]) -> Experts:
    """The experts of all rows, which must follow each other from position 0."""
    blocks = [event.block for event in events if isinstance(event, RowsReady)]
    assert {block.kind for block in blocks} == {OutputKind.ROUTING}
    position = 0
    for block in blocks:
        assert block.position == position
        position += block.n_rows
    rows = [
        np.frombuffer(block.payload, "<i2").reshape(block.n_rows, N_LAYERS, -1) for block in blocks
    ]
    return np.concatenate(rows)


def check(reference: Any, prompt: Sequence[int], events: Sequence[RequestEvent]) -> None:
    tokens = [*prompt, *tokens_of(events)]
    rows = tokens[: max(len(prompt), len(tokens) - 1)]
    assert routing_of(events).tolist() == wanted_experts(reference, rows)


def test_rows_of_chunks_and_batches(stages: TorchStages, reference: Any) -> None:
    """Several prompts at once, in chunks of 16 rows, beside one that asks for nothing."""
    prompts = [random_prompt(length, 300, seed=length) for length in (1, 16, 50, 33)]
    asking = [request(prompt, 6, outputs=ASKING) for prompt in prompts]
    unread = request(random_prompt(20, 300, seed=7), 0, outputs=ASKING)
    *answers, plain = run(stages, *asking, unread, request([5, 6], 8))
    for wanted, events in zip([*asking, unread], answers, strict=True):
        check(reference, wanted.prompt, events)
    assert not [event for event in plain if isinstance(event, RowsReady)]


def test_asking_changes_no_token_and_not_asking_sends_nothing(
    stages: TorchStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, sent = random_prompt(40, 300, seed=1), []
    for compute in stages.computes:

        def told(*args: Any, inner: Any = compute.compute) -> Any:
            result = inner(*args)
            sent.append(len(result.routing))
            return result

        monkeypatch.setattr(compute, "compute", told)
    (plain,) = run(stages, request(prompt, 12))
    assert set(sent) == {0}
    (asked,) = run(stages, request(prompt, 12, outputs=ASKING))
    assert set(sent) == {0, 1}
    assert tokens_of(plain) == tokens_of(asked)


@pytest.mark.usefixtures("drafts_always_pay")
def test_rejected_guesses_leave_nothing(stages: TorchStages, reference: Any) -> None:
    phrase = random_prompt(12, 300, seed=11)
    draft_source = Speculation(make_draft_source=lambda wake: NgramDrafts())
    (events,) = run(stages, request(phrase * 4, 40, outputs=ASKING, speculation=draft_source))
    timing = events[-1].timing  # type: ignore[union-attr]
    assert timing.n_drafted > timing.n_accepted > 0
    check(reference, phrase * 4, events)


def test_a_prefix_that_lies_warm_is_computed_again(stages: TorchStages, reference: Any) -> None:
    """Who records uses nobody's rows: it is not known any more whom they visited."""
    prompt = random_prompt(100, 300, seed=6)
    longer = [*prompt, 7, 8]
    _, plain, events = run(
        stages,
        request(prompt, 3),
        request(longer, 3),
        request(longer, 3, outputs=ASKING),
        at_once=False,
    )
    check(reference, longer, events)
    n_kept = [[e.n_kept for e in es if isinstance(e, RequestMoved)] for es in (plain, events)]
    assert max(n_kept[0]) > 0
    assert max(n_kept[1]) == 0


def test_a_pause_repeats_nothing(stages: TorchStages, reference: Any) -> None:
    """The younger of two sequences outgrows the room, is replayed and goes on."""
    requests = [
        request(random_prompt(length, 300, seed=length), 36, outputs=ASKING)
        for length in (229, 230)
    ]
    opened: list[object] = []
    operate = stages.computes[0].operate
    stages.computes[0].operate = lambda op: (opened.append(op), operate(op))[1]  # type: ignore
    answers = run(stages, *requests, room_blocks=3)
    stages.computes[0].operate = operate  # type: ignore[method-assign]
    assert sum(isinstance(op, OpenSequence) for op in opened) > len(requests)
    for wanted, events in zip(requests, answers, strict=True):
        check(reference, wanted.prompt, events)
