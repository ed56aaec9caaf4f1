"""Checkpoints that cannot be run: one line names what is wrong, and the nodes serve on."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.system.nodes import Crew, open_machine
from support.system.parrot import HIDDEN, N_TOKENS, Parrots, make_parrot


def remove(name: str) -> Callable[[Path], None]:
    """Delete a file."""
    return lambda folder: (folder / name).unlink()


def truncate(folder: Path) -> None:
    """Cut the last 100 bytes off the tensors."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    """Write a file anew."""

    def spoil(folder: Path) -> None:
        (folder / name).write_text(text)

    return spoil


def configure(**changes: Any) -> Callable[[Path], None]:
    """Change keys of config.json."""

    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def edit_header(
    change: Callable[[dict[str, Any]], None], cut_bytes: int = 0
) -> Callable[[Path], None]:
    """Change what the tensor file says of its tensors, and cut bytes off its end."""

    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        [length] = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        tensors = content[8 + length : len(content) - cut_bytes]
        path.write_bytes(struct.pack("<Q", len(text)) + text + tensors)

    return spoil


def drop_last(folder: Path) -> None:
    """Take the last tensor out of the file, its bytes too."""
    edit_header(lambda header: header.pop(LAST), cut_bytes=2 * N_TOKENS * HIDDEN)(folder)


def add_tensor(folder: Path) -> None:
    """Let the file tell of a tensor more, an empty one at its end."""

    def change(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for entry in header.values())
        header[EXTRA] = {"dtype": "BF16", "shape": [0], "data_offsets": [end, end]}

    edit_header(change)(folder)


def transpose(name: str) -> Callable[[dict[str, Any]], None]:
    """Swap the axes of a tensor."""

    def change(header: dict[str, Any]) -> None:
        header[name]["shape"].reverse()

    return change


def fill_with_nan(folder: Path) -> None:
    """Make the last tensor one of NaN: everything fits, and the model computes no number."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1000] + b"\xc0\x7f" * 500)


LAST = "lm_head.weight"
DOWN = "model.layers.3.mlp.down_proj.weight"
EXTRA = "model.layers.1.self_attn.q_norm.weight"

SPOILED: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no folder": (shutil.rmtree, ["no checkpoint folder"]),
    "no config": (remove("config.json"), ["config.json"]),
    "config is no JSON": (rewrite("config.json", "{"), ["config.json", "JSON"]),
    "no tensors": (remove("model.safetensors"), ["safetensors"]),
    "truncated": (truncate, ["model.safetensors", "truncated"]),
    "tensors are something else": (rewrite("model.safetensors", "<html>"), ["model.safetensors"]),
    "a tensor is missing": (drop_last, [LAST]),
    "a tensor is left over": (add_tensor, [EXTRA]),
    "wrong shape": (edit_header(transpose(DOWN)), [DOWN, "320"]),
    "unknown architecture": (configure(model_type="nonesuch"), ["config.json", "nonesuch"]),
    "unknown class": (
        configure(architectures=["LlamaForTokenClassification"]),
        ["LlamaForTokenClassification"],
    ),
    "unknown rope": (configure(rope_scaling={"rope_type": "spiral", "factor": 2.0}), ["spiral"]),
    "unknown activation": (configure(hidden_act="relu6"), ["hidden_act", "relu6"]),
    "config against tensors": (configure(num_key_value_heads=5), ["k_proj"]),
    "more layers than tensors": (configure(num_hidden_layers=5), ["model.layers.4"]),
    "no tokenizer": (remove("tokenizer.json"), ["has no tokenizer", "--token-ids"]),
    "tokenizer is no JSON": (rewrite("tokenizer.json", "{"), ["tokenizer.json"]),
    "no number": (fill_with_nan, ["finite number"]),
}


@pytest.fixture
def copy(tmp_path: Path, parrots: Parrots) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(parrots.alphabet, tmp_path / "copy"))


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_checkpoint_is_refused_by_name(
    trio: Crew, parrots: Parrots, copy: Path, what: str
) -> None:
    where = ["--nodes", trio.addresses(0, 2), "--max-tokens", "3"]
    spoil, parts = SPOILED[what]
    spoil(copy)
    error = trio.generate("a", copy, *where).error
    for part in parts:
        assert part in error
    assert trio.says("a", parrots.alphabet, 0, 2) == "bcd"


def test_unknown_keys_are_ignored_on_request_and_only_then(trio: Crew, copy: Path) -> None:
    """Also by a ring that stands, which was built for somebody who ignores them."""
    where = ["--nodes", trio.addresses(0, 2), "--max-tokens", "3"]
    configure(attn_logit_softcapping=50.0, logit_scale=0.5)(copy)
    names = "attn_logit_softcapping = 50.0, logit_scale = 0.5"
    run = trio.generate("a", copy, *where, "--ignore-unknown-config")
    assert run.stdout.strip() == "bcd"
    assert "warning: --ignore-unknown-config: " in run.stderr
    assert names in run.stderr
    error = trio.generate("a", copy, *where).error
    assert f"{copy}: 2 keys are not known to shardnet" in error
    assert names in error


def test_a_checkpoint_that_changes_is_loaded_again(
    trio: Crew, parrots: Parrots, copy: Path
) -> None:
    assert trio.says("a", copy, 0, 2) == "bcd"
    shutil.copytree(parrots.signs, copy, dirs_exist_ok=True)
    assert trio.says("z", copy, 0, 2) == "."
    truncate(copy)
    assert "truncated" in trio.generate("a", copy, "--nodes", trio.addresses(0, 2)).error


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Two nodes that see other files at one path, as on two machines: each its own folder's."""
    folder = tmp_path_factory.mktemp("apart")
    with open_machine(folder / "machine") as machine:
        nodes = []
        for name in ("hans", "ines"):
            (folder / name).mkdir()
            nodes += machine.start_nodes(name, cwd=folder / name)
        yield Crew(machine=machine, nodes=nodes)


def test_nodes_must_hold_the_same_model(apart: Crew, parrots: Parrots) -> None:
    """First nobody has a checkpoint, then both have different ones, then only the first node."""
    path = Path("/proc/self/cwd/model")
    if not path.parent.exists():
        pytest.skip("this system has no /proc/self/cwd")
    folder = apart.machine.folder.parent
    where = ["--nodes", apart.addresses(), "--max-tokens", "3"]
    error = apart.generate("a", path, *where).error
    assert f"no checkpoint folder at {path} on hans" in error
    assert "ines" in error
    assert error.count("has none") == 1
    shutil.copytree(parrots.alphabet, folder / "hans" / "model")
    make_parrot(folder / "ines" / "model", "abc", ends=True, intermediate=32)
    error = apart.generate("a", path, *where).error
    assert "hans has" in error
    assert "ines" in error
    assert "different models" in error
    shutil.rmtree(folder / "ines" / "model")
    assert apart.says("a", path) == "bcd"
