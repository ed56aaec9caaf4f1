"""--lora and --use-lora: what they become in a request, and what is no adapter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import typer

from shardnet.slot_operations import MAX_ADAPTERS
from shardnet.wire.messages.plans import AdapterScale, NamedAdapter
from shardnet_cli.flags.options import Access
from shardnet_cli.flags.ring_options import RingOptions
from shardnet_cli.flags.sampling_options import SamplingOptions

ONE, TWO = ["tales=/a/tales"], ["tales=/a/tales", "code=b.gguf"]


def test_paths_are_absolute_and_names_are_kept() -> None:
    choice = RingOptions(lora=TWO).choice()
    assert choice.adapters == [
        NamedAdapter("tales", "/a/tales"),
        NamedAdapter("code", f"{os.getcwd()}/b.gguf"),
    ]
    assert choice.used_adapters == []


@pytest.mark.parametrize(
    "lora",
    [
        *(["tales"], ["=/a"], ["tales="], ["a b=/a"], ["a:b=/a"], ["a=/a", "a=/b"]),
        [f"n{n}=/a" for n in range(MAX_ADAPTERS + 1)],
    ],
)
def test_what_is_no_adapter(lora: list[str]) -> None:
    with pytest.raises(typer.BadParameter):
        RingOptions(lora=lora).choice()


@pytest.mark.parametrize(
    ("lora", "use_lora", "used"),
    [
        ([], None, {}),
        (ONE, None, {"tales": 1.0}),
        (TWO, ["code"], {"code": 1.0}),
        (TWO, ["code=0.5", "tales=-1"], {"code": 0.5, "tales": -1.0}),
        ([], ["other"], {"other": 1.0}),
        (TWO, None, None),
        (ONE, ["tales=much"], None),
    ],
)
def test_which_adapters_a_request_uses(lora: list[str], use_lora: Any, used: Any) -> None:
    choice, sampling = RingOptions(lora=lora).choice(), SamplingOptions(use_lora=use_lora)
    if used is None:
        with pytest.raises(typer.BadParameter):
            sampling.adapters(choice)
    else:
        assert sampling.adapters(choice) == used


def test_commands_that_cannot_choose_use_all() -> None:
    wanted = RingOptions(lora=TWO).wanted(Access()).adapted()
    assert wanted.choice.used_adapters == [AdapterScale("tales", 1.0), AdapterScale("code", 1.0)]
