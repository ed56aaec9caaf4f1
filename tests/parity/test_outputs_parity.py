"""Prompt logprobs, logits and hidden states on whole rings, against transformers, at every split.

Float32: within 1e-4 of transformers' full forward over the same tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from support.models.checkpoints import make_gpt2, make_llama
from support.rings.stage_chain import even_split, random_prompt
from support.rings.torch_rings import TorchStages, request, run, tokens_of
from support.soak import cases, is_soak
from transformers import AutoModelForCausalLM

from shardnet.output_params import ALL_ROWS, OutputKind, OutputParams
from shardnet.runtime.engine.outputs import PromptLogprobsReady, RowsReady
from shardnet.runtime.engine.requests import GenerationRequest, RequestEvent, Speculation
from shardnet.sampling_params import SamplingParams, TokenLogprobs

N_LAYERS = 4
TOLERANCE = 1e-4
MAKERS: dict[str, Callable[..., Path]] = {"llama": make_llama, "gpt2": make_gpt2}
EVERYTHING = OutputParams(n_prompt_logprobs=3, logit_rows=ALL_ROWS, hidden_rows=ALL_ROWS)

Rows = NDArray[np.float32]


@pytest.fixture(scope="module", params=list(MAKERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=cases([3], [1, 2, 4]))
def stages(request: pytest.FixtureRequest, folder: Path) -> TorchStages:
    return TorchStages(folder, even_split(N_LAYERS, request.param))


class Wanted:
    """What transformers says of `tokens`: logits [T, V] and hidden states [T, E]."""

    def __init__(self, model: Any, tokens: Sequence[int]) -> None:
        before: list[torch.Tensor] = []
        norm = model.model.norm if hasattr(model, "model") else model.transformer.ln_f
        hook = norm.register_forward_pre_hook(lambda module, args: before.append(args[0]))
        with torch.inference_mode():
            out = model(torch.tensor([list(tokens)]), output_hidden_states=True)
        hook.remove()
        self.tokens = tokens
        self.logits: Rows = out.logits[0].numpy()
        self.hidden: Rows = out.hidden_states[-1][0].numpy()
        self.before_norm: Rows = before[0][0].numpy()
        self.logprobs: Rows = torch.log_softmax(out.logits[0].double(), -1).numpy()

    def check_prompt(self, found: Sequence[TokenLogprobs], n_top: int, n_prompt: int) -> None:
        """Compare with the logprobs of the prompt's tokens from the second on."""
        assert [entry.token_id for entry in found] == list(self.tokens[1:n_prompt])
        for place, entry in enumerate(found):
            row = self.logprobs[place]
            assert entry.logprob == pytest.approx(row[entry.token_id], abs=TOLERANCE)
            assert len(entry.top) == n_top
            best = np.sort(row)[::-1][:n_top]
            np.testing.assert_allclose([value for _, value in entry.top], best, atol=TOLERANCE)
            for token_id, value in entry.top:
                assert value == pytest.approx(row[token_id], abs=TOLERANCE)


def rows_of(events: Sequence[RequestEvent], kind: OutputKind) -> tuple[int, Rows]:
    """The rows of a kind, joined, and the position of the first."""
    blocks = [e.block for e in events if isinstance(e, RowsReady) and e.block.kind is kind]
    for one, following in itertools.pairwise(blocks):
        assert following.position == one.position + one.n_rows
    parts = [np.frombuffer(b.payload, "<f4").reshape(-1, b.width) for b in blocks]
    return blocks[0].position, np.concatenate(parts)


def scored(events: Sequence[RequestEvent]) -> list[TokenLogprobs]:
    return [entry for e in events if isinstance(e, PromptLogprobsReady) for entry in e.logprobs]


def close(found: Rows, wanted: Rows) -> None:
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


def check_all(reference: Any, wanted: GenerationRequest, events: Sequence[RequestEvent]) -> None:
    """Compare everything there is about every row."""
    made = tokens_of(events)
    assert len(made) == wanted.max_tokens
    want = Wanted(reference, [*wanted.prompt, *made[:-1]])
    for kind, rows in ((OutputKind.LOGITS, want.logits), (OutputKind.HIDDEN, want.hidden)):
        position, found = rows_of(events, kind)
        assert position == 0
        close(found, rows)
    want.check_prompt(scored(events), 3, len(wanted.prompt))


def test_everything_about_every_row(stages: TorchStages, reference: Any) -> None:
    """Prompts of one token, of whole chunks, of more; with and without output; at once."""
    requests = [
        request(random_prompt(n_prompt, 300, seed=n_prompt), n_tokens, outputs=EVERYTHING)
        for n_prompt, n_tokens in ((1, 6), (16, 0), (100, 5), (33, 1), (1, 0), (2, 0))
    ]
    plain = [request(random_prompt(30, 300, seed=9), 8), request([5, 6], 8)]
    for wanted, events in zip(requests, run(stages, *requests, *plain), strict=False):
        check_all(reference, wanted, events)


def test_asking_changes_no_token(stages: TorchStages) -> None:
    prompts = [random_prompt(length, 300, seed=length) for length in (40, 70)]
    sampling = SamplingParams(temperature=0.8, seed=2)
    plain, asked = (
        run(stages, *(request(prompt, 12, sampling, **rest) for prompt in prompts))
        for rest in ({}, {"outputs": EVERYTHING})
    )
    assert [*map(tokens_of, plain)] == [*map(tokens_of, asked)]


def test_hidden_states_after_layers(stages: TorchStages, reference: Any) -> None:
    """Every stage gives those of its layers; the last ones are behind the final norm."""
    prompt, some = random_prompt(70, 300, seed=5), (1, 3, N_LAYERS)
    every = OutputParams(hidden_rows=ALL_ROWS, every_layer=True).for_layers(N_LAYERS)
    outputs = [
        replace(every, logit_rows=1),
        OutputParams(hidden_rows=3, hidden_layers=some, before_norm=True, logit_rows=ALL_ROWS),
        OutputParams(),
    ]
    answers = run(stages, *(request(prompt, 6, outputs=wanted) for wanted in outputs))
    [made] = {tuple(tokens_of(events)) for events in answers}
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *made[:-1]]])
        states = reference(ids, output_hidden_states=True).hidden_states
    want = Wanted(reference, ids[0].tolist())
    position, found = rows_of(answers[0], OutputKind.HIDDEN)
    assert position == 0
    close(found, torch.cat([state[0] for state in states], 1).numpy())
    position, found = rows_of(answers[1], OutputKind.HIDDEN)
    assert position == len(want.tokens) - 3
    residual = [states[1][0].numpy(), states[3][0].numpy(), want.before_norm, want.before_norm]
    close(found, np.concatenate(residual, 1)[-3:])
    close(rows_of(answers[1], OutputKind.LOGITS)[1], want.logits)


@pytest.mark.parametrize("n_tokens", [0, 1, 7])
def test_the_last_rows(stages: TorchStages, reference: Any, n_tokens: int) -> None:
    """Of requests that ask for fewer and more rows than there are, at once."""
    numbers = (1, 3, 25, 500)
    outputs = [OutputParams(logit_rows=n, hidden_rows=n, before_norm=True) for n in numbers]
    prompt = random_prompt(40, 300, seed=4)
    answers = run(stages, *(request(prompt, n_tokens, outputs=wanted) for wanted in outputs))
    (made,) = {tuple(tokens_of(events)) for events in answers}
    want = Wanted(reference, [*prompt, *made[:-1]])
    for events, n_rows in zip(answers, numbers, strict=True):
        for kind, rows in ((OutputKind.LOGITS, want.logits), (OutputKind.HIDDEN, want.before_norm)):
            position, found = rows_of(events, kind)
            assert position == max(0, len(rows) - n_rows)
            close(found, rows[-n_rows:])


def test_the_mean_of_hidden_states(stages: TorchStages, reference: Any) -> None:
    outputs = OutputParams(hidden_rows=ALL_ROWS, hidden_mean=True)
    wanted = request(random_prompt(50, 300, seed=5), 3, outputs=outputs)
    (events,) = run(stages, wanted)
    want = Wanted(reference, [*wanted.prompt, *tokens_of(events)[:-1]])
    close(rows_of(events, OutputKind.HIDDEN)[1], want.hidden.mean(0, keepdims=True))


def test_a_prefix_that_lies_warm_is_computed_again(stages: TorchStages, reference: Any) -> None:
    prompt = random_prompt(120, 300, seed=6)
    wanted = request([*prompt, 7, 8], 4, outputs=EVERYTHING)
    _, events, _ = run(
        stages, request(prompt, 3), wanted, request([*prompt, 7, 9], 3), at_once=False
    )
    check_all(reference, wanted, events)


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_a_pause_repeats_nothing(stages: TorchStages, reference: Any) -> None:
    """The younger of two sequences outgrows the room, is replayed and goes on."""
    requests = [
        request(random_prompt(length, 300, seed=length), 36, outputs=EVERYTHING)
        for length in (229, 230)
    ]
    opened = []
    operate = stages.computes[0].operate
    stages.computes[0].operate = lambda op: (opened.append(op), operate(op))[1]  # type: ignore
    answers = run(stages, *requests, room_blocks=3)
    stages.computes[0].operate = operate  # type: ignore[method-assign]
    assert len([op for op in opened if hasattr(op, "sampling")]) > len(requests)
    for wanted, events in zip(requests, answers, strict=True):
        check_all(reference, wanted, events)


class MostlyRightDrafts:
    """Knows the text, and is wrong about each fifth token of it."""

    kinds: Sequence[int] = range(31)
    flies = True

    def __init__(self, text: Sequence[int]) -> None:
        self._text = [token if i % 5 else (token + 1) % 300 for i, token in enumerate(text)]

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        return True

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        return self._text[len(tokens) + len(ahead) :][:limit]

    def close(self) -> None: ...


@pytest.mark.usefixtures("drafts_always_pay")
def test_rows_of_wrong_guesses_are_left_out(stages: TorchStages, reference: Any) -> None:
    prompt = random_prompt(48, 300, seed=11)
    (events,) = run(stages, request(prompt, 40))
    text = [*prompt, *tokens_of(events)]
    drafts = Speculation(make_draft_source=lambda wake: MostlyRightDrafts(text))
    wanted = request(prompt, 40, outputs=EVERYTHING, speculation=drafts)
    (events,) = run(stages, wanted)
    timing = events[-1].timing  # type: ignore[union-attr]
    assert timing.n_drafted > timing.n_accepted > 0
    check_all(reference, wanted, events)
