"""`shardnet inspect`: what its flags ask for, and the file that it writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors import safe_open

from shardnet.api.events import GenerationResult, GenerationTiming, Rows, Usage
from shardnet.errors import ConfigurationError, ShardnetError
from shardnet.output_params import ALL_ROWS, OutputParams
from shardnet_cli.commands.inspect import RowOptions, _arrays, _metadata, _outputs, _write

SOME = OutputParams(logit_rows=1, hidden_rows=2, hidden_layers=(0, 3))
RESULT = GenerationResult(
    model="m",
    index=0,
    sample=0,
    prompt_token_ids=(5, 6, 7),
    token_ids=(8, 9),
    tokens=("a", "é"),
    text="aé",
    finish_reason="length",
    seed=0,
    sample_index=0,
    logprobs=None,
    usage=Usage(n_prompt=3, n_generated=2, n_reused=0),
    timing=GenerationTiming(load_s=0, ttft_s=0, decode_tok_s=0, total_s=0, per_stage=()),
    logits=Rows(position=3, width=4, data=np.arange(4, dtype="<f4").tobytes()),
    hidden=Rows(position=2, width=6, n_states=3, data=np.arange(12, dtype="<f4").tobytes()),
)


def test_the_file_is_read_by_others(tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    _write(path, _arrays(RESULT, SOME, 4), _metadata(RESULT, SOME))
    with safe_open(path, "np") as file:
        tensors = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
        said = file.metadata()
    assert tensors == {
        "token_ids": [5, 6, 7, 8],
        "logits": [[0, 1, 2, 3]],
        "hidden.0": [[0, 1], [6, 7]],
        "hidden.3": [[2, 3], [8, 9]],
        "hidden.last": [[4, 5], [10, 11]],
    }
    assert said["hidden_first_position"] == "2"
    assert (said["text"], said["new_token_ids"]) == ("aé", "[8, 9]")
    with pytest.raises(ConfigurationError, match=r"--out: .* cannot be written"):
        _write(tmp_path / "missing" / "new", {}, {})
    with pytest.raises(ShardnetError, match="3 hidden states came of each token, 5 were asked"):
        _arrays(RESULT, OutputParams(hidden_rows=ALL_ROWS, every_layer=True), 4)


def options(flags: tuple[str, str, str]) -> RowOptions:
    logits, hidden, rows = flags
    return RowOptions(logits=logits, hidden=hidden, rows=rows)


@pytest.mark.parametrize(
    ("flags", "params"),
    [
        (("last", "none", "all"), OutputParams(logit_rows=1)),
        (("all", "last", "3"), OutputParams(logit_rows=ALL_ROWS, hidden_rows=3)),
        (("none", "all", "last"), OutputParams(hidden_rows=1, every_layer=True)),
        (("1", "3,0", "2"), SOME),
    ],
)
def test_flags_say_what_is_wanted(flags: tuple[str, str, str], params: OutputParams) -> None:
    assert _outputs(options(flags)) == params


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("none", "none", "all"), "nothing is written"),
        (("0", "none", "all"), "'0' is not none, last, all or a number above 0"),
        (("last", "all", "-1"), "'-1' is not last"),
        (("last", "first", "all"), "'first' is not a list such as"),
        (("last", "0,-1", "all"), "ascending"),
    ],
)
def test_wrong_flags_are_named(flags: tuple[str, str, str], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        _outputs(options(flags))
