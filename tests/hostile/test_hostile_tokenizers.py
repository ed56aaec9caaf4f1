"""Tokenizers that have their library panic, abort, loop or take all memory: each is named, this
process lives, and what can still be done with it is done.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from shardnet.errors import CheckpointError, UsageError
from shardnet.tokenizers import tokenizer as text_process
from shardnet.tokenizers.detokenizer import IncrementalDecoder
from shardnet.tokenizers.tokenizer import Tokenizer

FILES = Path(__file__).parent / "tokenizers"

AT_LOAD = {
    "charsmap_cut_short": "Cannot parse precompiled_charsmap",
    "gigantic_id": "4294967290 is not a token id",
    "growing_decoder": "needs more than 256 MiB",
    "nested_decoders": "recursion limit exceeded",
    "strip_decoder": "slice index starts at 1 but ends at 0",
}
AT_A_PROMPT = {
    "charsmap_out_of_bounds": "index out of bounds",
    "growing_normalizer": "ended its process with SIGABRT",
    "looping_regex": "retry-limit-in-match over",
    "template_without_token": "no entry found for key",
}
AT_A_TOKEN = {
    "panic_at_two_tokens": ([1, 2], "index out of bounds"),
    "slow_at_two_tokens": ([3, 3], r"took more than 0\.5 s"),
}


@pytest.fixture(autouse=True)
def _same_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use less memory than a node allows, and end as the process that began."""
    for name, limits in (("LOAD", text_process.LOAD), ("ENCODE", text_process.ENCODE)):
        monkeypatch.setattr(text_process, name, replace(limits, memory_bytes=256 << 20))
    pid = os.getpid()
    yield
    assert os.getpid() == pid


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copy(FILES / f"{request.param}.json", tmp_path / "tokenizer.json")
    return tmp_path


def test_every_file_is_tried() -> None:
    tried = {*AT_LOAD, *AT_A_PROMPT, *AT_A_TOKEN}
    assert {file.stem for file in FILES.glob("*.json")} == tried
    readme = (FILES / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}.json` |" in readme for name in tried)


@pytest.mark.parametrize(
    ("folder", "words"), AT_LOAD.items(), indirect=["folder"], ids=AT_LOAD.keys()
)
def test_what_cannot_be_loaded_is_named(folder: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        Tokenizer.load(folder)
    assert str(folder / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize(
    ("folder", "words"), AT_A_PROMPT.items(), indirect=["folder"], ids=AT_A_PROMPT.keys()
)
def test_a_prompt_that_fails_ends_alone(folder: Path, words: str) -> None:
    """Its tokens are still decoded: that needs no library. The next prompt is tried anew.

    What encodes a shorter one is the prompt's fault.
    """
    refused = UsageError if words == AT_A_PROMPT["looping_regex"] else CheckpointError
    with closing(Tokenizer.load(folder)) as tokenizer:
        for _ in range(2):
            with pytest.raises(refused, match=words) as caught:
                tokenizer.encode("a" * 40)
            assert str(folder / "tokenizer.json") in str(caught.value)
        assert tokenizer.decode([3, 1]) == "x a"


@pytest.mark.parametrize(
    ("folder", "ids", "words"),
    [(name, *rest) for name, rest in AT_A_TOKEN.items()],
    indirect=["folder"],
    ids=AT_A_TOKEN.keys(),
)
def test_a_token_that_fails_ends_alone(folder: Path, ids: list[int], words: str) -> None:
    """The next tokens fail at once, as no process is started for them; the next prompt has one."""
    with closing(Tokenizer.load(folder)) as tokenizer:
        decoder = IncrementalDecoder(tokenizer)
        decoder.push(ids[0])
        with pytest.raises(CheckpointError, match=words) as caught:
            decoder.push(ids[1])
        assert str(folder / "tokenizer.json") in str(caught.value)
        with pytest.raises(CheckpointError, match="the process that decodes its tokens has ended"):
            tokenizer.decode([1])
        assert tokenizer.encode("b", bos="off") in ([1], [2])
        tokenizer.ready()
        assert tokenizer.decode([1]) == tokenizer.token_text(1) != ""


def test_a_node_never_imports_the_library() -> None:
    """So none of its panics can reach one."""
    program = (
        "import sys; import shardnet.cluster.node.node, shardnet.cluster.member.stage_host; "
        "import shardnet.runtime.loading.loading, shardnet.runtime.loading.wire_loss; "
        "from shardnet.assets import DEFAULT_MODEL_PATH; "
        "from shardnet.tokenizers.tokenizer import Tokenizer; "
        "tokenizer = Tokenizer.load(DEFAULT_MODEL_PATH); "
        "ids = tokenizer.encode('a b'); tokenizer.decode(ids); tokenizer.close(); "
        "assert 'jinja2' not in sys.modules; assert 'tokenizers' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_the_process_that_reads_tokenizers_imports_no_families() -> None:
    """They take longer than all else that it imports, and each node starts such a process."""
    program = (
        "import sys; from pathlib import Path; from shardnet.assets import DEFAULT_MODEL_PATH; "
        "from shardnet.tokenizers.text_backend import TextBackend; "
        "assert TextBackend.load_optional(Path(DEFAULT_MODEL_PATH)) is not None; "
        "assert not [name for name in sys.modules if name.startswith('shardnet.model.families')]"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
