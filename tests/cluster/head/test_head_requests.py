"""What is read of a request: its pictures, and whether its answer is new or goes on with a text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from support.models import trained_tokenizers as trained

from shardnet.cluster.head.lead import Lead
from shardnet.cluster.head.pictures import Pictures
from shardnet.cluster.head.requests import prompt_ids, text_stream, with_ids
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.model.vision.picture import PreparedPicture
from shardnet.sampling_params import SamplingParams
from shardnet.tokenizers.chat.chat_template import CONTINUES
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.wire.messages.chat import ChatMessage, Picture
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice

SAID = [ChatMessage(role="user", content="hello"), ChatMessage(role="assistant", content="the")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """One of words that begin with a space, without a chat template."""
    folder = tmp_path_factory.mktemp("words")
    trained.write_sentencepiece(folder, "llama")
    with Tokenizer.load(folder) as tokenizer:
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
    tokenizer: Tokenizer, fields: dict[str, Any], shown: tuple[str, bool], is_resumed: bool
) -> None:
    """Also where another node knows its token ids alone; a dialogue ends where the user speaks."""
    output = tokenizer.encode("cat\nUser: the", bos="off")
    message = Generate(
        request=1, choice=ModelChoice(model="m"), sampling=SamplingParams(), **fields
    )
    lead = lead_of(tokenizer)
    if is_resumed:
        message = with_ids(message, prompt_ids(message, lead))
        tokenizer.template_stops = ()  # another node's, which has not asked for any
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
