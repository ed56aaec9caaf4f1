"""The command line on a checkpoint with each form of tokenizer, and ids that the model lacks."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from support.models import trained_tokenizers as trained
from support.models.checkpoints import make_llama
from support.models.gguf_files import write_gguf
from support.models.loaded_tokenizers import gguf_tokenizer_of, load_here
from support.soak import cases
from support.system.nodes import Crew
from support.system.parrot import Parrots

from shardnet.api.client import connect
from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.errors import UsageError
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.wire.messages.plans import ModelChoice

BEYOND_ID = 258
"""One more than the parrots' last row."""


def write_words(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')


def behind(tokenizer: Tokenizer, prompt: list[int], token_ids: list[int]) -> str:
    """What ids add to the text of a prompt."""
    return tokenizer.decode(prompt + token_ids)[len(tokenizer.decode(prompt)) :]


FORMS: dict[str, Callable[[Path], object]] = {
    "sentencepiece": lambda folder: trained.write_sentencepiece(folder, "mistral"),
    "unigram": lambda folder: trained.write_sentencepiece(folder, "unigram"),
    "tiktoken": trained.write_tiktoken,
    "tekken": trained.write_tekken,
    "gpt2": write_words,
}


@pytest.mark.parametrize(
    "form", cases(["sentencepiece", "gpt2"], ["unigram", "tiktoken", "tekken"])
)
def test_generate_speaks_through_every_form(trio: Crew, tmp_path: Path, form: str) -> None:
    folder = make_llama(tmp_path / form, vocab_size=700, with_tokenizer=form == "gpt2")
    FORMS[form](folder)
    tokenizer = load_here(folder)
    where = ["--nodes", trio.addresses(0), "--json", "--ignore-eos", "--max-tokens", "12"]
    said = trio.generate("Café: 你好 the cat", folder, *where, "--logprobs", "2").json
    assert said["prompt_token_ids"] == tokenizer.encode("Café: 你好 the cat")
    assert said["text"] == behind(tokenizer, said["prompt_token_ids"], said["token_ids"])
    assert said["tokens"] == [tokenizer.token_text(token_id) for token_id in said["token_ids"]]
    assert all(tokenizer.has_token(token_id) for token_id in said["token_ids"])
    assert [entry["bytes"] for entry in said["logprobs"]] == [
        list(tokenizer.token_bytes(token_id)) for token_id in said["token_ids"]
    ]


GGUFS = {
    "pieces": lambda: trained.gguf_pieces("symbols"),
    "ranks": lambda: (
        trained.gguf_ranks(trained.LLAMA3, "llama-bpe")
        | {"tokenizer.chat_template": trained.GGUF_TEMPLATE}
    ),
}


@pytest.mark.parametrize("form", cases(["ranks"], ["pieces"]))
def test_a_gguf_brings_its_tokenizer_and_its_template(
    trio: Crew, tmp_path: Path, form: str
) -> None:
    """No file beside it is looked at, and rows that only pad are never drawn."""
    metadata = GGUFS[form]()
    n_rows = len(metadata["tokenizer.ggml.tokens"]) + 100
    source = make_llama(tmp_path / "source", vocab_size=n_rows, with_tokenizer=False)
    folder = tmp_path / "folder"
    folder.mkdir()
    path = write_gguf(source, folder / "small.gguf", tokenizer=metadata)
    shutil.copy(DEFAULT_MODEL_PATH / "tokenizer.json", folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7, "bos_token_id": 7}')
    tokenizer = gguf_tokenizer_of(metadata)
    where = ["--nodes", trio.addresses(0), "--json", "--max-tokens", "30"]
    plain = trio.generate("Café: the  cat", path, *where, "--ignore-eos").json
    assert plain["prompt_token_ids"] == tokenizer.encode("Café: the  cat")
    assert plain["text"] == behind(tokenizer, plain["prompt_token_ids"], plain["token_ids"])
    assert all(tokenizer.has_token(token_id) for token_id in plain["token_ids"])
    chatted = trio.generate("the cat", path, *where, "--chat").json
    begin, end = (tokenizer.token_text(n) for n in (tokenizer.bos_id, tokenizer.eos_ids[0]))
    want = tokenizer.encode(f"{begin}[the cat]{end}", bos="off")
    assert chatted["prompt_token_ids"] == want
    assert want[0] == tokenizer.bos_id
    assert load_here(folder).encode("Café: the  cat") == plain["prompt_token_ids"]


@pytest.fixture
def larger(parrots: Parrots, tmp_path: Path) -> Path:
    """A parrot whose tokenizer has a token more than the model has rows."""
    folder = shutil.copytree(parrots.alphabet, tmp_path / "larger")
    said = json.loads((folder / "tokenizer.json").read_text())
    said["added_tokens"].append(said["added_tokens"][0] | {"id": BEYOND_ID, "content": "<|more|>"})
    (folder / "tokenizer.json").write_text(json.dumps(said))
    return folder


def test_a_token_beyond_the_models_rows_is_refused_in_its_prompt_alone(
    trio: Crew, larger: Path
) -> None:
    where = ["--nodes", trio.addresses(0, 2), "--max-tokens", "3"]
    error = trio.generate("a<|more|>", larger, *where).error
    assert "token id 258 ('<|more|>') at place 1 of the prompt" in error
    assert "ids go from 0 to 257" in error
    assert trio.generate("a", larger, *where).stdout == "bcd\n"


def test_programs_are_told_the_token_and_the_limit(trio: Crew, larger: Path) -> None:
    nodes = trio.addresses(0, 2).split(",")
    choice = ModelChoice(model=str(larger), nodes=nodes)

    async def say(prompt: str) -> str:
        async with (
            connect(nodes[0]) as client,
            aclosing(client.generate(prompt, model=choice, max_tokens=3)) as events,
        ):
            return "".join([event.text async for event in events])

    with pytest.raises(UsageError, match=r"258 \('<\|more\|>'\) at place 2 .* from 0 to 257"):
        asyncio.run(say("ab<|more|>c"))
    assert asyncio.run(say("ab")) == "cde"
