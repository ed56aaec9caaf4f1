"""What is read of a request: its pictures, and whether its answer is new or goes on with a text."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from support.models import trained_tokenizers as trained

from shardnet.cluster.head.clients import Clients
from shardnet.cluster.head.lead import Lead
from shardnet.cluster.head.pictures import Pictures
from shardnet.cluster.head.requests import in_order, prompt_ids, text_stream, with_ids
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import ContextExceededError, UsageError
from shardnet.model.vision.picture import PreparedPicture
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import MAX_PICTURES
from shardnet.tokenizers.chat.chat_template import CONTINUES
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.wire.messages.chat import ChatMessage, Picture
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice

SAID = [ChatMessage(role="user", content="hello"), ChatMessage(role="assistant", content="the")]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    trained.write_sentencepiece(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def tokenizer(words: Path) -> Iterator[Tokenizer]:
    """One of words that begin with a space, without a chat template."""
    with Tokenizer.load(words) as tokenizer:
        tokenizer.chat_template()  # its process is not what a test leaves behind
        yield tokenizer


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"prompt": "hello the"}, (" cat\nUser: the", False)),
        ({"messages": SAID[:1]}, ("cat", True)),
        ({"messages": SAID, "template_options": [(CONTINUES, True)]}, (" cat", True)),
    ],
)
def test_an_answer_is_a_new_message_or_goes_on(
    tokenizer: Tokenizer,
    words: Path,
    fields: dict[str, Any],
    shown: tuple[str, bool],
    is_resumed: bool,
) -> None:
    """Also where another node knows its token ids alone; a dialogue ends where the user speaks."""
    output = tokenizer.encode("cat\nUser: the", bos="off")
    message = Generate(
        request=1, choice=ModelChoice(model="m"), sampling=SamplingParams(), **fields
    )
    with contextlib.ExitStack() as opened:
        lead = lead_of(tokenizer)
        if is_resumed:
            message = with_ids(message, prompt_ids(message, lead))
            lead = lead_of(opened.enter_context(Tokenizer.load(words)))
        stream = text_stream(message, lead, prompt_ids(message, lead))
        text, stopped = "", False
        for token_id in output:
            more, stopped = stream.push(token_id)
            text += more
            if stopped:
                break
        assert (text + stream.finish(), stopped) == shown


def test_a_client_that_leaves_while_its_picture_is_read_leaves_nothing_behind() -> None:
    """What waits for the tower has little room: pictures that nobody has dropped would fill it."""
    pixels = np.zeros(4, np.float32)
    prepared = PreparedPicture(
        pixels=pixels, grid=(1, 1, 1), token_ids=(5,), is_row=np.ones(1, np.bool_)
    )
    begun, go_on = threading.Event(), threading.Event()

    def prepare(rgb: object, detail: str) -> PreparedPicture:
        begun.set()
        assert go_on.wait(30)
        return prepared

    process: Any = SimpleNamespace(decode=lambda data: np.zeros((1, 1, 3), np.uint8))
    processor: Any = SimpleNamespace(key="k", placeholder_id=5, prepare=prepare)
    sampling, shown = SamplingParams(), [Picture(data=b"p")]
    message = Generate(
        request=1, choice=ModelChoice(model="m"), sampling=sampling, token_ids=[5], pictures=shown
    )

    async def main() -> None:
        disk = DiskJobs("test-pictures")
        pictures = Pictures(disk=disk, find=Mock(), _process=process)

        async def read() -> None:
            with pictures.held(shown) as held:
                await pictures.placed(message, [5], processor, held)
                assert len(pictures._waiting) == 1

        reading = asyncio.create_task(read())
        await asyncio.to_thread(begun.wait, 30)
        reading.cancel()
        await asyncio.wait([reading])
        go_on.set()
        await disk.drain()
        assert not pictures._waiting
        await read()
        assert not pictures._waiting
        disk.close()

    asyncio.run(main())


def test_a_processor_reads_its_files_off_the_event_loop() -> None:
    """Transformers' opens them when it is first asked for anything, as for its placeholder."""
    asked = list[int]()

    class Processor:
        @cached_property
        def placeholder_id(self) -> int:
            asked.append(threading.get_ident())
            return 5

    choice, facts = SimpleNamespace(mmproj=""), SimpleNamespace(path=Path("m"))
    tokenizer = SimpleNamespace(added_tokens=lambda longest: [])
    lead: Any = SimpleNamespace(
        plan=SimpleNamespace(choice=choice, facts=facts), tokenizer=tokenizer
    )

    async def main() -> None:
        disk = DiskJobs("test-processors")
        pictures = Pictures(disk=disk, find=Mock(return_value=Processor()))
        processor = await pictures.processor(lead)
        assert processor.placeholder_id == 5
        assert asked != [threading.get_ident()]
        disk.close()

    asyncio.run(main())


def test_a_request_shows_no_more_pictures_than_it_may_have() -> None:
    """However often it shows the same one: each place is prepared."""
    said = [ChatMessage(role="user", content=None, parts=[0] * (MAX_PICTURES + 1))]
    message = Generate(
        request=1,
        choice=ModelChoice(model="m"),
        sampling=SamplingParams(),
        messages=said,
        pictures=[Picture(data=b"p")],
    )
    with pytest.raises(UsageError, match="messages show 101 pictures, at most 100 are read"):
        in_order(message)
    said[0].parts.pop()
    assert len(in_order(message)) == MAX_PICTURES


def test_tokens_of_a_picture_are_checked_before_they_reach_a_step(tokenizer: Tokenizer) -> None:
    """A step fails for all that are in it."""
    message = Generate(
        request=1, choice=ModelChoice(model="m"), sampling=SamplingParams(), token_ids=[5]
    )
    lead = lead_of(tokenizer)
    placed = AsyncMock(return_value=([5, tokenizer.n_tokens, 5], ()))
    pictures = SimpleNamespace(processor=AsyncMock(), placed=placed)
    lead.plan.choice = SimpleNamespace(mmproj="")  # type: ignore[misc,assignment]
    clients: Any = SimpleNamespace(pictures=pictures, _prompt_ids=AsyncMock(return_value=[5]))
    message.pictures.append(Picture(data=b"p"))
    with pytest.raises(UsageError, match="at place 1 of the prompt is outside the model's"):
        asyncio.run(Clients._prompt(clients, message, lead, set()))


@pytest.mark.parametrize("n_words", [20, 2000])
def test_a_prompt_that_is_too_long_is_told_of_the_ring_s_context(
    tokenizer: Tokenizer, n_words: int
) -> None:
    """Also one that is refused before it is encoded, and could not fit the model either."""
    message = Generate(
        request=1,
        choice=ModelChoice(model="m"),
        sampling=SamplingParams(),
        prompt="hello " * n_words,
        max_tokens=1,
    )
    lead = lead_of(tokenizer)
    lead.ring.spec.form.context = 16  # type: ignore[misc]
    counters = SimpleNamespace(room_blocks=64)
    lead.ring.engine = SimpleNamespace(counters=counters)  # type: ignore[assignment]
    with pytest.raises(ContextExceededError) as caught:
        prompt_ids(message, lead)
    assert caught.value.n_prompt > caught.value.n_context == 16


def lead_of(tokenizer: Tokenizer) -> Lead:
    """A head's ring, as far as prompts are read by it."""
    config = SimpleNamespace(vocab_size=tokenizer.n_tokens, max_positions=512)
    spec = SimpleNamespace(config=config, form=SimpleNamespace(context=512))
    return cast(
        Lead,
        SimpleNamespace(
            tokenizer=tokenizer,
            plan=SimpleNamespace(facts=SimpleNamespace(config=config, path="m")),
            ring=SimpleNamespace(spec=spec),
        ),
    )
