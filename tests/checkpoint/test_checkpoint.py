from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_gpt2, make_llama

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.tensors import stored_tensor
from shardnet.errors import CheckpointError
from shardnet.model.families.stage_tensors import left_over

Damage = Callable[[Path], object]
PIECE_BYTES = 4096


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("indexed"), max_shard_size="60KB")


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a single-file checkpoint; None leaves one out."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["single", "indexed"])
def test_tensors_are_read_as_stored_and_counted(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    checkpoint = Checkpoint.open(folder)
    stored = {
        key: (tensor, path.name)
        for path in folder.glob("*.safetensors")
        for key, tensor in load_file(path).items()
    }
    assert checkpoint.tensors.keys() == stored.keys()
    for key, (tensor, file) in stored.items():
        info = checkpoint.stored[key]
        assert (info.shape, info.dtype, info.file) == (tuple(tensor.shape), "F32", file)
        before = checkpoint.bytes_read[file]
        assert torch.equal(checkpoint.read(key), tensor)
        assert checkpoint.bytes_read[file] - before == tensor.nbytes == info.size_bytes


def test_a_file_that_shrinks_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensor, "READ_AT_A_TIME", PIECE_BYTES)
    folder = make_llama(tmp_path)
    checkpoint = Checkpoint.open(folder)
    largest = max(checkpoint.stored.values(), key=lambda tensor: tensor.size_bytes)
    assert largest.size_bytes > 3 * PIECE_BYTES

    def shrink(n_bytes: int) -> None:
        truncate(folder / largest.file, largest.offset + n_bytes)

    with pytest.raises(CheckpointError, match=f"{largest.file}: it has changed"):
        checkpoint.read(largest.name, came=shrink)


def test_a_file_put_in_the_place_of_an_opened_one_is_named(tmp_path: Path) -> None:
    """Also one of the same size: its tensors are another model's."""
    folder = make_llama(tmp_path)
    checkpoint = Checkpoint.open(folder)
    info = next(iter(checkpoint.stored.values()))
    other = tmp_path / "other"
    shutil.copyfile(folder / info.file, other)
    other.replace(folder / info.file)
    for read in (checkpoint.read, checkpoint.stored_of, checkpoint.sources_of):
        with pytest.raises(CheckpointError, match=f"{info.file}: it has changed"):
            read(info.name)
    (folder / info.file).unlink()
    with pytest.raises(CheckpointError, match=f"{info.file}.*cannot be read"):
        checkpoint.read(info.name)


def test_opening_imports_no_torch(single: Path) -> None:
    code = (
        "import sys; from shardnet.checkpoint.checkpoint import Checkpoint;"
        f"Checkpoint.open({str(single)!r}).model_id; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


class TestModelId:
    def test_is_the_same_for_a_copy(self, single: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(single, tmp_path / "copy")
        (copy / "README.md").write_text("not part of the model")
        assert Checkpoint.open(copy).model_id == Checkpoint.open(single).model_id

    @pytest.mark.parametrize(
        "change",
        [
            lambda f: (f / "config.json").write_text(
                (f / "config.json").read_text().replace("1e-06", "1e-05")
            ),
            lambda f: (f / "tokenizer.json").write_text("{}"),
            lambda f: (f / "generation_config.json").unlink(),
            lambda f: (f / "tokenizer_config.json").rename(f / "special_tokens_map.json"),
            lambda f: rewrite(f, **{"lm_head.weight": torch.zeros(320, 48, dtype=torch.float16)}),
        ],
        ids=["config", "tokenizer", "generation config", "name of a file", "header"],
    )
    def test_changes_with_what_decides_the_output(
        self, single: Path, tmp_path: Path, change: Damage
    ) -> None:
        copy = shutil.copytree(single, tmp_path / "copy")
        change(copy)
        assert Checkpoint.open(copy).model_id != Checkpoint.open(single).model_id


@pytest.mark.parametrize("shards", ["5GB", "60KB"])
def test_two_trainings_of_one_shape_are_two_models(tmp_path: Path, shards: str) -> None:
    one, same, other = (
        Checkpoint.open(make_llama(tmp_path / name, seed=seed, max_shard_size=shards))
        for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    assert one.model_id == same.model_id != other.model_id
    assert set(one.bytes_read.values()) == {0}


def truncate(path: Path, size_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size_bytes)


def write_header(path: Path, header: bytes, length: int | None = None) -> None:
    length = len(header) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + header)


SINGLE_DAMAGES: dict[str, tuple[Damage, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
    "config is no json": (lambda f: (f / "config.json").write_text("{"), "not readable as JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "a JSON object"),
    "config is not utf-8": (
        lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'),
        "not readable as JSON",
    ),
    "no tensors": (
        lambda f: (f / "model.safetensors").unlink(),
        "no tensors are here: neither model.safetensors",
    ),
    "empty file": (lambda f: truncate(f / "model.safetensors", 0), "truncated"),
    "cut in the header": (lambda f: truncate(f / "model.safetensors", 100), "truncated"),
    "cut in the data": (lambda f: truncate(f / "model.safetensors", 200_000), "truncated"),
    "longer than described": (
        lambda f: truncate(f / "model.safetensors", 900_000),
        "truncated or damaged",
    ),
    "header claims 2^60": (
        lambda f: write_header(f / "model.safetensors", b"{}", 1 << 60),
        "header claims 1152921504606846976",
    ),
    "header is no json": (lambda f: write_header(f / "model.safetensors", b"x" * 9), "JSON"),
    "header nests too deep": (
        lambda f: write_header(f / "model.safetensors", b"[" * 200_000),
        "JSON",
    ),
    "entry without offsets": (
        lambda f: write_header(f / "model.safetensors", b'{"a": {"dtype": "F32"}}'),
        "entry of tensor a is damaged",
    ),
    "size is not shape times dtype": (
        lambda f: write_header(
            f / "model.safetensors",
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        ),
        "entry of tensor a is damaged",
    ),
}


@pytest.mark.parametrize("name", list(SINGLE_DAMAGES))
def test_a_damaged_checkpoint_is_named(single: Path, tmp_path: Path, name: str) -> None:
    damage, message = SINGLE_DAMAGES[name]
    copy = shutil.copytree(single, tmp_path / "copy")
    damage(copy)
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint.open(copy)
    assert str(copy) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no such checkpoint folder"):
        Checkpoint.open(tmp_path / "nowhere")


def edit_index(folder: Path, **changes: object) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


INDEX_DAMAGES: dict[str, tuple[Damage, str]] = {
    "a file is missing": (
        lambda f: next(f.glob("model-00002*")).unlink(),
        "model-00002.*No such file",
    ),
    "a tensor is not where the index says": (
        lambda f: edit_index(f, **{"model.norm.weight": "model-00001-of-00007.safetensors"}),
        "model-00001.*: tensor model.norm.weight is missing",
    ),
    "a file outside the folder": (
        lambda f: edit_index(f, ghost="../model.safetensors"),
        "expected a file name without a folder",
    ),
    "a file outside the folder of Windows": (
        lambda f: edit_index(f, ghost="..\\model.safetensors"),
        "expected a file name without a folder",
    ),
    "a stream of a file": (
        lambda f: edit_index(f, ghost="model.safetensors:x"),
        "expected a file name without a folder",
    ),
    "a file that is no name": (
        lambda f: edit_index(f, ghost=7),
        "expected a file name without a folder",
    ),
    "no weight map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "weight_map is missing",
    ),
}


@pytest.mark.parametrize("name", list(INDEX_DAMAGES))
def test_a_damaged_index_is_named(indexed: Path, tmp_path: Path, name: str) -> None:
    damage, message = INDEX_DAMAGES[name]
    copy = shutil.copytree(indexed, tmp_path / "copy")
    damage(copy)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(copy)


def test_overlapping_tensors_are_an_error(single: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(single, tmp_path / "copy")
    entry = b'{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    header = b'{"a": ' + entry + b', "b": ' + entry + b"}"
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="tensor b lies over another one"):
        Checkpoint.open(copy)


def test_a_tensor_that_is_not_there_is_named(single: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor ghost is missing"):
        Checkpoint.open(single).read("ghost")


def test_left_over_tensors(tmp_path: Path) -> None:
    """Buffers of old versions and a tied head are known by name, nothing else is."""
    llama = Checkpoint.open(make_llama(tmp_path / "llama", with_tokenizer=False)).config
    gpt2 = Checkpoint.open(make_gpt2(tmp_path / "gpt2", with_tokenizer=False)).config
    inv_freq = "model.layers.3.self_attn.rotary_emb.inv_freq"
    assert left_over(llama, ["model.norm.weight", inv_freq]) == []
    assert left_over(llama, ["model.layers.4.mlp.up_proj.weight", "zz"]) == [
        "model.layers.4.mlp.up_proj.weight",
        "zz",
    ]
    known = ["h.0.attn.bias", "transformer.h.0.attn.masked_bias", "lm_head.weight", "wte.weight"]
    assert left_over(gpt2, [*known, "h.0.attn.scale"]) == ["h.0.attn.scale"]
