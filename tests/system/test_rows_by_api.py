"""Prompt logprobs, logits, hidden states and routing of real nodes: equal to transformers."""

from __future__ import annotations

import asyncio
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.types import ASGIApp
from support.models.checkpoints import make_decoder, make_llama
from support.oracles.oracle import load_reference
from support.servers.asgi_client import ask
from support.soak import is_soak
from support.system.nodes import Crew, Machine
from support.system.parrot import Parrots
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from shardnet.api import ALL_ROWS, GenerationResult, OutputParams, SamplingParams
from shardnet.api.client import connect
from shardnet.api.openai.embeddings import conversation
from shardnet.api.serve.server import application
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.service import Service
from shardnet.api.server.settings import Settings
from shardnet.assets import DEFAULT_MODEL_NAME, DEFAULT_MODEL_PATH
from shardnet.errors import ShardnetError
from shardnet.runtime.encoding.judge import INSTRUCTION
from shardnet.wire.messages.plans import ModelChoice

TOLERANCE = 1e-4
PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [290, 3, 3]]
SAMPLED = SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.2, min_p=0.02)


def complete(
    prompts: Any, choice: ModelChoice, outputs: OutputParams, **options: Any
) -> list[GenerationResult]:
    """Ask the first node of a ring, without a process of its own."""

    async def main() -> list[GenerationResult]:
        async with connect(choice.nodes[0]) as client:
            return await client.complete(prompts, model=choice, outputs=outputs, **options)

    return asyncio.run(main())


def two_nodes(machine: Machine, model: Path) -> ModelChoice:
    nodes = [node.address for node in machine.start_nodes("anna", "bert")]
    return ModelChoice(model=str(model), nodes=nodes, dtype="float32")


def forward(model: Any, ids: list[int]) -> tuple[Any, Any]:
    """transformers' logits [T, V], and hidden states [N, T, E], the last ones behind the norm."""
    with torch.inference_mode():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0].numpy(), torch.cat(out.hidden_states).numpy()


def test_rows_and_prompt_logprobs_of_a_list(machine: Machine, tmp_path: Path) -> None:
    """Two node processes on loopback, prompts of different lengths, tokens drawn."""
    folder = make_llama(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    choice = two_nodes(machine, folder)
    options: dict[str, Any] = {"sampling": SAMPLED, "max_tokens": 4, "ignore_eos": True}
    asked = OutputParams(
        n_prompt_logprobs=2, logit_rows=ALL_ROWS, hidden_rows=ALL_ROWS, every_layer=True
    )
    answers = complete(PROMPTS, choice, asked, **options)
    means = complete(
        PROMPTS, choice, OutputParams(hidden_rows=ALL_ROWS, hidden_mean=True), **options
    )
    assert len(answers) == len(means) == len(PROMPTS)
    for prompt, answer, mean in zip(PROMPTS, answers, means, strict=True):
        assert answer.logits is not None
        assert answer.hidden is not None
        assert mean.hidden is not None
        assert answer.prompt_logprobs is not None
        logits, states = forward(model, [*prompt, *answer.token_ids[:-1]])
        hidden = states[-1]
        assert (answer.logits.position, answer.logits.n_rows) == (0, len(prompt) + 3)
        np.testing.assert_allclose(answer.logits.array(), logits, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(answer.hidden.states(), states, rtol=0, atol=TOLERANCE)
        assert mean.token_ids == answer.token_ids
        assert mean.hidden.n_rows == 1
        np.testing.assert_allclose(mean.hidden.array()[0], hidden.mean(0), rtol=0, atol=TOLERANCE)
        first, *others = answer.prompt_logprobs
        assert first is None
        assert [entry and entry.token_id for entry in others] == prompt[1:]
        logprobs = torch.log_softmax(torch.tensor(logits[:, :300]), -1)
        for row, entry in zip(logprobs, others, strict=False):
            assert entry is not None
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=TOLERANCE)
            assert len(entry.top) == 2
            assert entry.top[0].logprob == pytest.approx(float(row.max()), abs=TOLERANCE)


TASK = [
    ("It is a truth universally acknowledged, that a", [" man who", " purple engine", " of"]),
    ("She was ", ["to be happy.", "table the of.", "at home."]),
    ("Mr. Darcy", [" himself", " were been", "?? 17"]),
]


async def log_likelihoods(app: ASGIApp) -> list[list[tuple[float, bool]]]:
    """Score the choices of TASK by the very requests and arithmetic of lm_eval: for each choice
    its log-likelihood, and whether it is what greedy decoding would say."""

    async def encode(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        ids: list[int] = (await ask(app, "/tokenize", body)).json["tokens"]
        return ids

    scores = []
    for context, choices in TASK:
        n_spaces = len(context) - len(context.rstrip())
        n_context = len(await encode(context.rstrip()))
        asked = {
            "model": DEFAULT_MODEL_NAME,
            "prompt": [await encode(context + choice) for choice in choices],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        assert n_spaces < 2
        answer = (await ask(app, "/v1/completions", asked)).json
        found = []
        for choice in sorted(answer["choices"], key=itemgetter("index")):
            scored = choice["logprobs"]
            own = scored["token_logprobs"][n_context:-1]
            tops = scored["top_logprobs"][n_context:-1]
            is_greedy = all(one == max(top.values()) for one, top in zip(own, tops, strict=True))
            found.append((sum(own), is_greedy))
        scores.append(found)
    return scores


def test_a_task_is_scored_over_http_as_transformers_scores_it(trio: Crew) -> None:
    """And texts become the vectors that transformers makes of them."""
    nodes = [trio.nodes[number].address for number in (0, 2)]
    text = "It is a truth universally acknowledged"

    async def main() -> tuple[list[list[tuple[float, bool]]], list[list[float]]]:
        async with connect(nodes[0]) as client:
            client.choice = ModelChoice(model=DEFAULT_MODEL_NAME, nodes=nodes, dtype="float32")
            service = Service(client=client, settings=Settings(), models=ModelNames(client))
            app = application(service)
            bodies = [{"input": text, "pooling": pooling} for pooling in ("last", "mean")]
            vectors = [
                (await ask(app, "/v1/embeddings", body)).json["data"][0]["embedding"]
                for body in bodies
            ]
            return await log_likelihoods(app), vectors

    scores, [last, mean] = asyncio.run(main())
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL_PATH, dtype=torch.float32).eval()
    tokenizer: Any = Tokenizer.from_file(str(DEFAULT_MODEL_PATH / "tokenizer.json"))
    for (context, choices), found in zip(TASK, scores, strict=True):
        n_context = len(tokenizer.encode(context.rstrip(), add_special_tokens=False).ids)
        for choice, (score, is_greedy) in zip(choices, found, strict=True):
            ids = tokenizer.encode(context + choice, add_special_tokens=False).ids
            rows = torch.log_softmax(torch.tensor(forward(model, ids)[0]), -1)[n_context - 1 : -1]
            expected = rows.gather(1, torch.tensor(ids[n_context:]).unsqueeze(1)).sum()
            assert score == pytest.approx(float(expected), abs=TOLERANCE * len(rows))
            assert is_greedy == (rows.argmax(1).tolist() == ids[n_context:])
    assert [[is_greedy for _, is_greedy in found] for found in scores] == [[True, False, False]] * 3
    states = forward(model, tokenizer.encode(text).ids)[1][-1]
    for vector, expected in ((last, states[-1]), (mean, states.mean(0))):
        expected = expected / np.linalg.norm(expected)
        np.testing.assert_allclose(vector, expected, rtol=0, atol=TOLERANCE)


def test_documents_are_ranked_by_the_logits_that_transformers_gives(trio: Crew) -> None:
    nodes = [trio.nodes[number].address for number in (0, 2)]
    documents = ["She read.", {"text": "It rained all day in the north."}, "A letter came."]
    prompts: list[list[int]] = []

    async def main() -> Any:
        async with connect(nodes[0]) as client:
            client.choice = ModelChoice(model=DEFAULT_MODEL_NAME, nodes=nodes, dtype="float32")
            service = Service(client=client, settings=Settings(), models=ModelNames(client))
            for one in documents:
                text = one if isinstance(one, str) else one["text"]
                talk = conversation("what did she do?", text, INSTRUCTION)
                prompts.append((await client.tokenize(talk)).token_ids)
            body = {"query": "what did she do?", "documents": documents, "return_documents": True}
            return (await ask(application(service), "/v1/rerank", {**body, "top_n": 2})).json

    answer = asyncio.run(main())
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL_PATH, dtype=torch.float32).eval()
    tokenizer: Any = Tokenizer.from_file(str(DEFAULT_MODEL_PATH / "tokenizer.json"))
    ids = [tokenizer.encode(word, add_special_tokens=False).ids[0] for word in ("yes", "no")]
    scores = []
    for prompt in prompts:
        both = torch.tensor(forward(model, prompt)[0][-1])[ids]
        scores.append(float(torch.softmax(both, -1)[0]))
    order = sorted(range(3), key=lambda place: -scores[place])[:2]
    assert [one["index"] for one in answer["results"]] == order
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=TOLERANCE)
        given = documents[one["index"]]
        assert one["document"] == (given if isinstance(given, dict) else {"text": given})
    assert answer["usage"]["total_tokens"] == sum(map(len, prompts))


def routed(model: Any, ids: list[int]) -> Any:
    """The experts that transformers' routers choose: [T, layers, K]."""
    chosen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda m, a, out: chosen.append(out[2])) for gate in gates]
    forward(model, ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).numpy()


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_the_routing_of_a_list(machine: Machine, tmp_path: Path) -> None:
    """Two node processes, prompts of different lengths, tokens drawn."""
    folder = make_decoder(tmp_path / "model", "mixtral", num_hidden_layers=3)
    model = load_reference(folder)
    answers = complete(
        PROMPTS,
        two_nodes(machine, folder),
        OutputParams(routing=True),
        sampling=SAMPLED,
        max_tokens=4,
        ignore_eos=True,
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.routing is not None
        assert (answer.routing.position, answer.routing.n_rows) == (0, len(prompt) + 3)
        routing = answer.routing.array()
        assert routing.dtype == np.int16
        assert routing.tolist() == routed(model, [*prompt, *answer.token_ids[:-1]]).tolist()


def test_a_model_without_experts_has_no_routing(trio: Crew, parrots: Parrots) -> None:
    nodes = [trio.nodes[number].address for number in (0, 2)]
    choice = ModelChoice(model=str(parrots.alphabet), nodes=nodes)
    words = "is a llama model without experts: there is no routing to record"
    with pytest.raises(ShardnetError, match=words):
        complete("abc", choice, OutputParams(routing=True), max_tokens=1)


def test_a_prompt_is_scored_without_any_token(trio: Crew, parrots: Parrots) -> None:
    answer = trio.generate(
        *("abca", parrots.alphabet, "--nodes", trio.addresses(0, 2), "--json"),
        *("--max-tokens", "0", "--prompt-logprobs", "0"),
    ).json
    assert answer["token_ids"] == []
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [round(entry["logprob"], 3) for entry in others[:2]] == [0, 0]
    assert others[2]["logprob"] < -10
    assert [entry["top"] for entry in others] == [[], [], []]


def test_the_last_hidden_state_before_the_norm(trio: Crew, parrots: Parrots) -> None:
    nodes = [trio.nodes[number].address for number in (0, 2)]
    choice = ModelChoice(model=str(parrots.alphabet), nodes=nodes)
    outputs = OutputParams(hidden_rows=1, before_norm=True)
    [answer] = complete("abca", choice, outputs, max_tokens=0)
    assert answer.hidden is not None
    assert (answer.hidden.position, answer.hidden.n_rows) == (3, 1)
    assert answer.hidden.array().argmax() == answer.prompt_token_ids[-1]  # one-hot rows


def test_nothing_that_was_not_asked_for_is_told(trio: Crew, parrots: Parrots) -> None:
    answer = trio.generate(
        "abc", parrots.alphabet, "--nodes", trio.addresses(0), "--max-tokens", "1", "--json"
    ).json
    assert answer["prompt_logprobs"] is None
