"""Constrained output on whole rings, against llguidance's masks over transformers' logits."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from support.rings.real_ring import Said, ask, real_ring, say_all
from support.rings.stage_chain import CPU, probed
from support.soak import cases
from transformers import AutoModelForCausalLM

from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.constraints import Constraint
from shardnet.runtime.engine.guide import Constrained
from shardnet.runtime.engine.requests import GenerationRequest, Speculation
from shardnet.runtime.scheduling.drafting import NgramDrafts
from shardnet.runtime.stage.executor import Executor
from shardnet.tokenizers.grammar.compile_program import grammar_of
from shardnet.tokenizers.grammar.matcher import GrammarMatcher
from shardnet.tokenizers.grammar.vocabulary import Vocabulary
from shardnet.tokenizers.text_backend import TextBackend
from shardnet.types import DType

N_IDS, EOS = 4096, 1
N_TOKENS = 40
PROMPT = "The man was called "
ASKED = (
    Constraint.json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "ages": {
                    "type": "array",
                    "items": {"enum": [17, 71, 90]},
                    "minItems": 2,
                    "maxItems": 3,
                },
            },
            "required": ["name", "ages"],
            "additionalProperties": False,
        }
    ),
    Constraint(kind="regex", text="([a-z]{2,5}, ){4}[0-9]{3}"),
)


class Model:
    """The bundled model: its tokens, and its logits by transformers."""

    def __init__(self) -> None:
        backend = TextBackend.load_optional(DEFAULT_MODEL_PATH)
        assert backend is not None
        self.table = backend.table()
        self.prompt = backend.encode(PROMPT, "auto", True)
        self.tokenizer = Vocabulary.of(self.table, N_IDS, [EOS]).tokenizer()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            DEFAULT_MODEL_PATH, dtype=torch.float32
        ).eval()

    @cache  # noqa: B019  # one model for this module
    def expected(self, constraint: Constraint) -> list[int]:
        """The likeliest of the allowed tokens, one after the other, by llguidance alone."""
        grammar = grammar_of(constraint.kind, constraint.text)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        tokens: list[int] = []
        inputs, past = self.prompt, None
        while len(tokens) < N_TOKENS and not matcher.is_stopped():
            with torch.no_grad():
                said = self._model(torch.tensor([inputs]), cache=past, use_cache=True)
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:N_IDS] == 1)
            token = int(said.logits[0, -1].masked_fill(~allowed, -torch.inf).argmax())
            assert matcher.consume_token(token)
            tokens.append(token)
            inputs, past = [token], said.cache
            if token == EOS:
                break
        return tokens


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def run(model: Model, *, n_stages: int, speculation: Speculation | None) -> list[Said]:
    """Ask for each of ASKED, and for one that is drawn, beside a request that is free."""
    thread = Executor("masks")

    def asked(constraint: Constraint, temperature: float = 0.0) -> GenerationRequest:
        grammar = grammar_of(constraint.kind, constraint.text)
        return replace(
            ask(model.prompt, N_TOKENS, speculation=speculation, temperature=temperature, seed=3),
            stop_ids=frozenset({EOS}),
            constrained=Constrained(
                matcher=GrammarMatcher.compiled(grammar, model.tokenizer, N_IDS), thread=thread
            ),
        )

    async def scenario() -> list[Said]:
        choice = probed(CPU, DType.FLOAT32, None)
        folder = Path(DEFAULT_MODEL_PATH)
        async with real_ring(folder, choice, n_stages=n_stages, n_layers=8) as engine:
            free = ask(model.prompt, 20)
            drawn = asked(ASKED[1], temperature=1.5)
            said = await say_all(engine, [*map(asked, ASKED), drawn, free])
            assert said.pop().tokens == (await say_all(engine, [free]))[0].tokens
            return said

    try:
        return asyncio.run(scenario())
    finally:
        thread.join()


@pytest.mark.usefixtures("drafts_always_pay")
@pytest.mark.parametrize(
    ("n_stages", "guesses"), cases([(1, False), (2, True)], [(1, True), (2, False)])
)
def test_tokens_are_the_likeliest_that_are_allowed(
    model: Model, n_stages: int, guesses: bool
) -> None:
    speculation = Speculation(make_draft_source=lambda wake: NgramDrafts()) if guesses else None
    said = run(model, n_stages=n_stages, speculation=speculation)
    expected = [model.expected(constraint) for constraint in ASKED]
    assert [one.tokens for one in said[:2]] == expected
    assert said[0].n_accepted > 0  # what the schema forces was drafted
    texts = [model.table.decode(one.tokens, keep_special_tokens=False) for one in said]
    assert set(json.loads(texts[0])["ages"]) <= {17, 71, 90}
    assert all(re.fullmatch(ASKED[1].text, text) for text in texts[1:])
    assert texts[1] != texts[2]  # drawn, not the likeliest
