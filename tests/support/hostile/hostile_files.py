"""The corpus of hostile files: what each case changes in a good checkpoint, and how it is refused.

`python -m support.hostile.hostile_files` in tests/ writes the files to tests/hostile/files, one
folder per case; a test compares them. Cases that would be large are in the test itself.
"""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from support.hostile import small_files as small
from support.hostile.small_files import CONFIG, TENSORS, Files, as_json, text

FOLDER: Final = Path(__file__).parents[2] / "hostile" / "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Files put into the good checkpoint `base`; `refused` is a part of the message.

    `file` is what the message names.
    """

    base: str
    files: Files
    file: str
    refused: str


def _config(message: str, **changes: Any) -> Case:
    return _json("config.json", CONFIG | changes, message)


def _json(name: str, value: object, message: str, base: str = "safetensors") -> Case:
    return _raw(name, as_json(value), message, base)


def _raw(name: str, content: bytes, message: str, base: str = "safetensors") -> Case:
    return Case(base=base, files={name: content}, file=name, refused=message)


def _header(message: str, **entry: Any) -> Case:
    """A safetensors file with one more entry."""
    plain = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    name = entry.pop("name", "extra")
    content = small.safetensors(json.dumps({name: plain | entry}).encode(), bytes(8))
    return _raw("model.safetensors", content, message)


def _pickle(message: str, steps: bytes) -> Case:
    content = small.torch_file(b"\x80\x02" + steps, {"0": small.values((8, 8))})
    return _raw("pytorch_model.bin", content, message, "torch")


def _index(message: str, **files: object) -> Case:
    good = json.loads(small.GOOD["indexed"]()["model.safetensors.index.json"])
    good["weight_map"] |= files
    return _json("model.safetensors.index.json", good, message, "indexed")


def _gguf(message: str, *, more: dict[str, bytes] | None = None, **counts: int) -> Case:
    made = small.gguf(small.GGUF_METADATA | (more or {}), small.GGUF_TENSORS, **counts)
    return _raw("model.gguf", made, message, "gguf")


def _doubling(levels: int) -> bytes:
    """Steps that leave a tuple of two equal tuples, of two equal tuples, …"""
    return b")" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(levels))


def _tensor_call(shape: bytes, strides: bytes) -> bytes:
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
    return (
        b"}"
        + text("a")
        + b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + small.integer(64)
        + b"tQ"
        + small.integer(0)
        + shape
        + strides
        + b"tRs."
    )


def _directory(content: bytes, member: bytes, at: int, data: bytes) -> bytes:
    """Put bytes into the entry of a member in an archive's directory."""
    place = content.rindex(member) - 46 + at
    return content[:place] + data + content[place + len(data) :]


def _archive() -> bytes:
    return small.torch_file_of(TENSORS)


def _overlapping() -> bytes:
    content = _archive()
    return _directory(
        content, b"archive/data/1", 42, struct.pack("<I", content.index(b"archive/data/0") - 30)
    )


def _end(at: int, data: bytes) -> bytes:
    content = bytearray(_archive())
    place = content.rindex(b"PK\5\6") + at
    content[place : place + len(data)] = data
    return bytes(content)


_AXES = b"(" + small.integer(1) * 9 + b"t"
_LONG = b"(\x8a\xff" + b"\x7f" * 255 + b"t"

CASES: Final[dict[str, Case]] = {
    "config-nested": _config("nested more than 32 deep", id2label=json.loads("[" * 40 + "]" * 40)),
    "config-digits": _raw(
        "config.json",
        as_json(CONFIG).replace(b'"hidden_size": 8', b'"hidden_size": ' + b"9" * 401),
        "a number of more than 400 digits",
    ),
    "config-utf-16": _raw("config.json", json.dumps(CONFIG).encode("utf-16"), "not readable"),
    "config-half-a-pair": _config("surrogates not allowed", id2label={"0": "\ud800"}),
    "config-escape-in-a-key": _config(r"'\x1b[2J' = 1 is not known", **{"\x1b[2J": 1}),
    "config-long-value": _config("odd = [0, 0, 0, 0, 0, 0, ...]", odd=[0] * 3000),
    "config-layers": _config("num_hidden_layers is 100000, expected", num_hidden_layers=100_000),
    "config-vocabulary": _config("2147483647 tokens, expected", vocab_size=2**31 - 1),
    "config-experts": _config(
        "16383500 experts in all layers, expected at most",
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        num_hidden_layers=500,
        num_local_experts=32767,
        num_experts_per_tok=2,
    ),
    "config-pointer": _raw(
        "config.json", b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"
    ),
    "generation-many-ids": _json(
        "generation_config.json", {"eos_token_id": [*range(2000)]}, "a list of at most 1024"
    ),
    "generation-huge-id": _json(
        "generation_config.json", {"eos_token_id": 10**390}, "must be a token id or a list"
    ),
    "tokens-twice": _raw("added_tokens.json", b'{"a": 1, "a": 2}', "the key 'a' is there twice"),
    "tokens-two-ids": Case(
        base="safetensors",
        files={"added_tokens.json": as_json({"<s>": 3})},
        file="",
        refused="the added token '<s>' has two ids",
    ),
    "header-nested-shape": _header("entry of tensor extra is damaged", shape=[[2]]),
    "header-nine-axes": _header("entry of tensor extra is damaged", shape=[2, *[1] * 8]),
    "header-digits": _header("entry of tensor extra is damaged", shape=[10**300, 0]),
    "header-long-shape": _header("entry of tensor extra is damaged", shape=[1] * 2000),
    "header-empty-and-huge": _header(
        "entry of tensor extra is damaged", shape=[0, 2**47, 2**47], data_offsets=[0, 0]
    ),
    "header-negative": _header("entry of tensor extra is damaged", data_offsets=[-8, 0]),
    "header-long-name": _header("it has 600 characters, expected at most 512", name="x" * 600),
    "header-escape-in-a-name": _header(r"'\x1b[2J' cannot name a tensor", name="\x1b[2J"),
    "header-overlap": _raw(
        "model.safetensors",
        small.safetensors(
            json.dumps(
                {key: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for key in "ab"}
            ).encode(),
            bytes(8),
        ),
        "tensor b lies over another one",
    ),
    "index-outside": _index("expected a file name without a folder", ghost="../model.safetensors"),
    "index-nul": _index("expected a file name without a folder", ghost="a\0.safetensors"),
    "index-no-name": _index("expected a file name without a folder", ghost=7),
    "index-escape-in-a-name": _index(
        r"'\x1b[2J' cannot name a tensor", **{"\x1b[2J": "model-1.safetensors"}
    ),
    "pickle-hash-bomb": _pickle("a key is no text", b"}" + _doubling(60) + b"Ns."),
    "pickle-repr-bomb": _pickle("a storage is none", _doubling(60) + b"Q."),
    "pickle-value-bomb": _pickle("is no tensor", b"}" + text("a") + _doubling(60) + b"s."),
    "pickle-nine-axes": _pickle("of at most 8 axes", _tensor_call(_AXES, _AXES)),
    "pickle-long-integer": _pickle("do not fit each other", _tensor_call(_LONG, _LONG)),
    "pickle-text-shape": _pickle("of at most 8 axes", _tensor_call(text("11"), text("11"))),
    "pickle-arguments": _pickle(
        "20 arguments", b"ccollections\nOrderedDict\n(" + b"N" * 20 + b"tR."
    ),
    "pickle-runs-code": _pickle("names os.system", b"cos\nsystem\n" + text("true") + b"\x85R."),
    "pickle-no-memory": _pickle("nothing was stored as 9", b"h\x09."),
    "pickle-long-name": _pickle("a name without an end", b"c" + b"a" * 5000 + b"\nb\n."),
    "zip-directory": _raw(
        "pytorch_model.bin", _end(12, b"\xff\xff\xff\x7f"), "for central directory", "torch"
    ),
    "zip-place": _raw(
        "pytorch_model.bin",
        _directory(_archive(), b"archive/data/3", 42, b"\xfe\xff\xff\x7f"),
        "is not where the directory says",
        "torch",
    ),
    "zip-size": _raw(
        "pytorch_model.bin",
        _directory(_archive(), b"archive/data/3", 20, b"\xfe\xff\xff\x7f" * 2),
        "is not where the directory says",
        "torch",
    ),
    "zip-overlap": _raw("pytorch_model.bin", _overlapping(), "two storages overlap", "torch"),
    "gguf-keys": _gguf("the number of metadata keys: claims 1048576", n_keys=1 << 20),
    "gguf-tensors": _gguf("the number of tensors: claims 1048576", n_tensors=1 << 20),
    "gguf-nested-array": _gguf(
        "an array of type 9", more={"a": struct.pack("<IIQIQ", 9, 9, 1, 9, 1)}
    ),
    "gguf-texts": _gguf("claims 1048576 entries", more={"a": struct.pack("<IIQ", 9, 8, 1 << 20)}),
    "gguf-long-text": _gguf(
        "claims 4611686018427387904 bytes", more={"a": struct.pack("<IQ", 8, 1 << 62)}
    ),
    "gguf-long-key": _gguf("a name of 600 bytes", more={"k" * 600: small.gguf_value(1)}),
    "gguf-layers": _gguf(
        "2000000000, expected 1 to", more={"llama.block_count": small.gguf_value(2_000_000_000)}
    ),
    "params-layers": _json(
        "params.json", small.PARAMS | {"n_layers": 2**30}, "expected 1 to", "consolidated"
    ),
    "params-nested": _raw(
        "params.json", b'{"a":' * 40 + b"1" + b"}" * 40, "nested more than 32", "consolidated"
    ),
    "journal-wrong-types": Case(
        base="safetensors",
        files={"replica.jsonl": b'{"seal": {"a": 1}}\n{"tensor": "a", "part": 0.5}\n[[[\n'},
        file="",
        refused="has not been fetched from another node yet",
    ),
}
"""By name, which is that of the folder."""


def write_corpus(folder: Path = FOLDER) -> None:
    """Write the corpus anew."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, case in CASES.items():
        (folder / name).mkdir(parents=True)
        for file, content in case.files.items():
            (folder / name / file).write_bytes(content)


if __name__ == "__main__":
    write_corpus()
