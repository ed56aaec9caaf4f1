"""Prompts that begin with what is kept, on whole rings: every bit is that computed from scratch.

Agents ask random trees of prompts while slots are given up, clients leave, files on disk are
damaged and nodes are lost. `LEAST` says how much of what was computed before must be found again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.models.checkpoints import EOS_ID, make_decoder
from support.models.family_cases import CASES, FALCON_H1
from support.rings.changing_ring import ChangingRing
from support.rings.prompt_trees import PromptTree, Turn, text
from support.rings.stage_chain import even_split
from support.rings.torch_rings import TorchStages, request, run_here
from support.soak import cases, examples, is_soak

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.requests import (
    GenerationRequest,
    RequestEvent,
    RequestMoved,
    Speculation,
    TokenGenerated,
)
from shardnet.sampling_params import SamplingParams, TokenLogprobs
from shardnet.types import ANY_ROWS, KvDType, LiveState

CONTEXT = 2048
MOST_TOKENS = 1400
"""Of a prompt."""

SAMPLED = SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.3, n_logprobs=8)
"""What is drawn depends on every token before it, those of the prompt too."""

Told = Sequence[tuple[int, TokenLogprobs | None]]
"""The tokens of an answer, and what the model gave others in their places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Layers of one kind, in the smallest model that has them; `form` is the column of `LEAST`."""

    family: str
    form: str
    kv_dtype: KvDType = KvDType.AUTO
    config: dict[str, Any]


L, F, S, C = "linear_attention", "full_attention", "sliding_attention", "conv"
THREE = {"num_hidden_layers": 3}
KINDS = {
    "dense": Kind(family="llama", form="rows", config=THREE),
    "KDA": Kind(
        family="kimi_linear",
        form="states",
        config=CASES["kimi_linear"] | THREE | {"layer_types": [L, F, L]},
    ),
    "windows": Kind(
        family="gemma3_text",
        form="windows",
        kv_dtype=KvDType.INT8,
        config=THREE | {"head_dim": 8, "layer_types": [S, F, S], "sliding_window": 64},
    ),
    "chosen latents": Kind(
        family="hy_v4",
        form="rows",
        config=CASES["hy_v4"]
        | {"num_hidden_layers": 3, "hc_mult": 2, "indexer_types": ["full", "shared", "full"]}
        | {"mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
}
SELDOM = {
    "DeltaNet": Kind(family="qwen3_next", form="states", config=THREE | {"layer_types": [L, F, L]}),
    "Mamba-2": Kind(family="nemotron_h", form="states", config={}),
    "convolutions": Kind(
        family="lfm3",
        form="states",
        config=THREE | {"layer_types": [C, S, F], "sliding_window": 100},
    ),
    "latents": Kind(
        family="deepseek_v3", form="rows", config=CASES["deepseek_v3"] | {"num_hidden_layers": 3}
    ),
    "dense in int8": replace(KINDS["dense"], kv_dtype=KvDType.INT8),
    "long windows": replace(
        KINDS["windows"],
        kv_dtype=KvDType.AUTO,
        config=KINDS["windows"].config | {"sliding_window": 300},
    ),
    "windows and experts": Kind(
        family="gpt_oss", form="windows", config=THREE | {"sliding_window": 100}
    ),
    "DeltaNet, tied": Kind(
        family="qwen3_5_text",
        form="states",
        config=CASES["qwen3_5_text"] | {"num_hidden_layers": 4},
    ),
    "Mamba-2 beside attention": Kind(family="falcon_h1", form="states", config=FALCON_H1 | THREE),
    "Mamba-2 in int8": Kind(
        family="granitemoehybrid",
        form="states",
        kv_dtype=KvDType.INT8,
        config=CASES["granitemoehybrid"],
    ),
    "convolutions and experts": Kind(
        family="lfm2_moe", form="states", config=THREE | {"layer_types": [C, F, C]}
    ),
    "n-grams and chosen blocks": Kind(
        family="qwen4_exp_text", form="states", config=CASES["qwen4_exp_text"]
    ),
    "KDA and pooled latents": Kind(
        family="glm5_next_text", form="states", config=CASES["glm5_next_text"]
    ),
    "compressed entries": Kind(family="deepseek_v4", form="states", config=CASES["deepseek_v4"]),
    "shared entries": Kind(family="deepseek_v41_text", form="states", config={}),
    "Lightning and latents": Kind(
        family="bailing_hybrid", form="states", config=CASES["bailing_hybrid"]
    ),
}
ALL_KINDS = KINDS | SELDOM

LEAST = {
    "the next turn": {"rows": 1.0, "windows": 1.0, "states": 1.0},
    "parts within the last answer": {"rows": 1.0, "windows": 1.0, "states": 0.95},
    "the last message edited": {"rows": 1.0, "windows": 1.0, "states": 0.8},
    "a sub-agent": {"rows": 1.0, "windows": 0.96, "states": 0.96},
    "back to the main one": {"rows": 1.0, "windows": 1.0, "states": 1.0},
    "another sub-agent": {"rows": 1.0, "windows": 0.96, "states": 0.96},
    "a sub-agent beside another": {"rows": 1.0, "windows": 0.96, "states": 0.96},
    "after a restart": {"rows": 0.9, "windows": 0.9, "states": 0.8},
}
"""The least share of the positions in common with what was computed before that is not computed
again. Raise what is kept: these are the figures of today."""


class Scratch:
    """What prompts give on a ring of one stage that has nothing, each computed once."""

    def __init__(self, folder: Path, kv_dtype: KvDType) -> None:
        layers = even_split(Checkpoint.open(folder).config.n_layers, 1)
        self._stages = TorchStages(folder, layers, context=CONTEXT, kv_dtype=kv_dtype)
        self.is_exact = self._stages.exact_rows == ANY_ROWS
        self._known: dict[tuple[object, ...], Told] = {}

    async def tells(self, asked: GenerationRequest) -> Told:
        """Return what a prompt gives alone, whatever drafts it is asked with."""
        key = (asked.prompt, asked.max_tokens, asked.sampling.temperature)
        if key not in self._known:
            for compute in self._stages.computes:
                compute.reset()
            alone = replace(asked, speculation=None)
            [events] = await run_here(self._stages, alone, chunk_rows=256)
            self._known[key] = told(events)
        return self._known[key]


def told(events: Sequence[RequestEvent]) -> Told:
    return [(e.token_id, e.logprobs) for e in events if isinstance(e, TokenGenerated)]


def n_kept(events: Sequence[RequestEvent]) -> int:
    """How many positions were not computed when the request first ran; 0 if it never did."""
    kept = [
        e.n_kept for e in events if isinstance(e, RequestMoved) and e.state is LiveState.RUNNING
    ]
    return kept[0] if kept else 0


class HalfRight:
    """Drafts what is right, but for one token in four."""

    kinds = range(31)
    flies = True

    def __init__(self, n_prompt: int, answer: Told, seed: int) -> None:
        self._n_prompt, self._draws = n_prompt, random.Random(seed)
        self._ids = [token_id for token_id, _ in answer]

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        return True

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        begin = len(tokens) + len(ahead) - self._n_prompt
        right = self._ids[begin : begin + limit]
        return [token if self._draws.random() < 0.75 else 7 for token in right]

    def close(self) -> None: ...


class Asked:
    """A request that runs; its client leaves after `leaves_after` events, if it is not None."""

    def __init__(
        self, engine: Engine, asked: GenerationRequest, leaves_after: int | None = None
    ) -> None:
        self.events: list[RequestEvent] = []
        self._grown = asyncio.Event()
        self._leaves_after = leaves_after
        self.task = asyncio.create_task(self._run(engine, asked))

    async def _run(self, engine: Engine, asked: GenerationRequest) -> None:
        try:
            async with aclosing(engine.generate(asked)) as events:
                async for event in events:
                    self.events.append(event)
                    self._grown.set()
                    if len(self.events) == self._leaves_after:
                        return
        finally:
            self._leaves_after = len(self.events)
            self._grown.set()

    async def until(self, n_events: int) -> None:
        """Wait for so many events, or the end."""
        while len(self.events) < n_events and len(self.events) != self._leaves_after:
            self._grown.clear()
            await self._grown.wait()


@pytest.fixture(scope="module", params=cases([*KINDS], [*SELDOM]))
def kind(request: pytest.FixtureRequest) -> Kind:
    return ALL_KINDS[request.param]


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(kind.family)
    return make_decoder(path, kind.family, **{"max_position_embeddings": CONTEXT} | kind.config)


@pytest.fixture(scope="module")
def scratch(kind: Kind, folder: Path) -> Scratch:
    return Scratch(folder, kind.kv_dtype)


@pytest.fixture(autouse=True)
def _whatever_it_costs(drafts_always_pay: None, reading_always_pays: None) -> None: ...


class Agents:
    """Ask a tree of prompts on a ring to which everything happens that may."""

    def __init__(self, kind: Kind, folder: Path, scratch: Scratch, disk: Path, seed: int) -> None:
        self._draws = random.Random(seed)
        self._kind, self._scratch, self._disk = kind, scratch, disk
        self._tree = PromptTree(self._draws, MOST_TOKENS)
        self._seed = seed
        self.trace: list[str] = []
        self.n_followed = 0
        self._ring = ChangingRing(
            folder,
            context=CONTEXT,
            kv_dtype=kind.kv_dtype,
            room_blocks=self._draws.choice([8, 14, 40]),
            room_states=self._draws.choice([12, 16, 40]),
            disk=disk,
        )

    async def live(self, n_rounds: int) -> None:
        """Ask rounds of prompts, and check that nothing is left at the end."""
        await self._ring.start(self._draws.randint(1, 3))
        for _ in range(n_rounds):
            await self._round()
            await self._between()
        self._ring.engine.drop_warm()
        await Asked(self._ring.engine, request([1, 2, 3], 1)).task  # behind all that was freed
        assert self._ring.engine.counters.used_blocks == 0
        await self._ring.stop()
        assert max(self._ring.blocks_used) <= 1

    async def _round(self) -> None:
        """Ask some prompts at once, each when the one before is so far; a node may be lost."""
        draws = self._draws
        turns = [self._tree.draw() for _ in range(draws.choice([1, 1, 2, 3, 4]))]
        is_followed = draws.random() < 0.4
        lengths = [40, 80] if is_followed else [1, 6, 12, 40]
        wanted = [await self._request(turn, draws.choice(lengths)) for turn in turns]
        running: list[Asked] = []
        if is_followed:
            lost = draws.randrange(len(self._ring.stages.computes))
            self._ring.stand_by(draws.randint(1, 3), lost)
        for one in wanted:
            leaves_after = draws.choice([None, None, None, None, 1, 2, 6])
            running.append(Asked(self._ring.engine, one, leaves_after))
            await running[-1].until(draws.choice([0, 1, 2, 5, 10 if is_followed else 1000]))
            if is_followed:
                await self._ring.follow(draws.choice([0, 0, 1, 2]))
        if is_followed:
            await self._lose_what_was_followed(running[-1])
        elif draws.random() < 0.3:
            await running[-1].until(draws.choice([0, 2, 6]))
            moves = draws.random() < 0.5
            self.trace.append("the ring is replaced" if moves else "a node is lost")
            await self._ring.replace(draws.randint(1, 3), moves=moves)
        await asyncio.gather(*(one.task for one in running))
        for turn, one, asked in zip(turns, running, wanted, strict=True):
            await self._check(turn, one, asked)

    async def _lose_what_was_followed(self, last: Asked) -> None:
        """Have another ring follow a stage in rounds, the last of which may be cut off."""
        draws = self._draws
        await self._ring.follow(draws.randint(0, 5))
        if draws.random() < 0.5:
            await last.until(len(last.events) + draws.choice([0, 0, 1, 17]))
            await self._ring.follow(layers_left=draws.randint(0, 1))
        n_moved = await self._ring.take_over()
        self.n_followed += n_moved
        self.trace.append(f"a node is lost, {n_moved} were followed")

    async def _request(self, turn: Turn, max_tokens: int) -> GenerationRequest:
        draws = self._draws
        sampling = structs.replace(SAMPLED, temperature=draws.choice([0.0, 0.8]))
        is_exact = self._scratch.is_exact
        wanted = request(
            turn.prompt,
            max_tokens,
            sampling,
            stop_ids=frozenset([EOS_ID]),
            deterministic=not is_exact,
        )
        if not is_exact or draws.random() < 0.5:
            return wanted
        answer, seed = await self._scratch.tells(wanted), draws.random()
        drafts = Speculation(
            make_draft_source=lambda ready: HalfRight(len(turn.prompt), answer, seed), most=9
        )
        return replace(wanted, speculation=drafts)

    async def _check(self, turn: Turn, one: Asked, asked: GenerationRequest) -> None:
        """Compare an answer, or as much as its client took of it, with that from scratch."""
        expected, found = await self._scratch.tells(asked), told(one.events)
        self.trace.append(
            f"{turn.how} of {len(turn.prompt)}: {n_kept(one.events)} kept, {len(found)} told"
        )
        is_whole = not isinstance(one.events[-1], RequestMoved | TokenGenerated)
        assert found == (expected if is_whole else expected[: len(found)]), self._history()
        self._tree.turns.append(replace(turn, answer=[token_id for token_id, _ in found]))

    async def _between(self) -> None:
        """Let something happen to what is kept."""
        what = self._draws.choice([*["nothing"] * 5, "restart", "damage", "damage", "drop"])
        if what == "drop":
            self._ring.engine.drop_warm()
        if what in ("restart", "damage"):
            await self._ring.stop()
            if what == "damage":
                damage(self._disk, self._draws)
            await self._ring.start(self._draws.randint(1, 3))
        self.trace.append(what)

    def _history(self) -> str:
        return "\n".join([f"seed {self._seed}:", *self.trace])


def damage(disk: Path, draws: random.Random) -> None:
    """Damage a fifth of the files: a byte is another, the end is lacking, or all of it."""
    for file in sorted(file for file in disk.rglob("*") if file.is_file()):
        if draws.random() < 0.8:
            continue
        content = bytearray(file.read_bytes())
        match draws.choice([*["byte"] * 4, "end", "all"]):
            case "byte" if content:
                content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
                file.write_bytes(content)
            case "end":
                file.write_bytes(content[: draws.randrange(len(content) + 1)])
            case _:
                file.unlink()


@pytest.mark.parametrize("seed", range(examples(1)))
def test_agents_are_told_what_is_computed_from_scratch(
    kind: Kind, folder: Path, scratch: Scratch, tmp_path: Path, seed: int
) -> None:
    agents = Agents(kind, folder, scratch, tmp_path, seed)
    try:
        asyncio.run(agents.live(n_rounds=16 if is_soak() else 7))
    except Exception as error:
        error.add_note("\n".join([f"seed {seed}:", *agents.trace]))
        raise


def test_what_was_computed_is_not_computed_again(
    kind: Kind, folder: Path, scratch: Scratch, tmp_path: Path
) -> None:
    """A long beginning that all share, and a long one of each agent's own."""
    draws = random.Random(1)
    ring = ChangingRing(
        folder,
        context=CONTEXT,
        kv_dtype=kind.kv_dtype,
        room_blocks=64,
        room_states=40,
        disk=tmp_path,
    )
    kept: dict[str, tuple[int, int]] = {}

    async def ask(*turns: tuple[Turn, int]) -> list[Turn]:
        """Ask prompts at once, each with how many of its first positions were asked for before."""
        wanted = [
            request(turn.prompt, 12, SAMPLED, deterministic=not scratch.is_exact)
            for turn, _ in turns
        ]
        running = [Asked(ring.engine, one) for one in wanted]
        await asyncio.gather(*(one.task for one in running))
        answered = []
        for (turn, n_common), one, asked in zip(turns, running, wanted, strict=True):
            found = told(one.events)
            assert found == await scratch.tells(asked), turn.how
            kept[turn.how] = (n_kept(one.events), n_common)
            answered.append(replace(turn, answer=[token_id for token_id, _ in found]))
        return answered

    async def go_on(how: str, before: Turn, n_common: int) -> Turn:
        """Ask for a next turn behind the first so many tokens of one that was answered."""
        turn = before.then(how, n_common, text(draws, 60))
        return (await ask((turn, min(n_common, len(before.tokens) - 1))))[0]

    def agent(how: str, shared: list[int]) -> Turn:
        return Turn(how=how, prompt=[*shared, *text(draws, 400)], begin=len(shared))

    async def main() -> None:
        shared = text(draws, 530)
        await ring.start(2)
        [first] = await ask((agent("first", shared), 0))
        second = await go_on("the next turn", first, len(first.tokens))
        await go_on("parts within the last answer", second, len(second.prompt) + 5)
        third = await go_on("the last message edited", second, second.begin)
        await ask((agent("a sub-agent", shared), len(shared)))
        last = await go_on("back to the main one", third, len(third.tokens))
        await ask((agent("another sub-agent", shared), len(shared)))
        shared = text(draws, 530)
        beside = (agent("a sub-agent beside another", shared), len(shared))
        await ask((agent("first", shared), 0), beside)
        await ring.stop()
        await ring.start(2)
        await go_on("after a restart", last, len(last.tokens))
        await ring.stop()

    asyncio.run(main())
    for how, least in LEAST.items() if scratch.is_exact else ():
        n_found, n_common = kept[how]
        assert n_found >= int(least[kind.form] * n_common), how
