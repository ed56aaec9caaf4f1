"""Ollama's store: names, manifests, blobs; what strangers may have written into one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.hostile.small_files import GOOD
from support.models.model_stores import KIND, put_in_ollama, write_manifest

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.program_stores import (
    MAX_MANIFEST_BYTES,
    OllamaName,
    find_ollama,
    ollama_models,
    ollama_roots,
    projectors_of,
)
from shardnet.errors import CheckpointError
from shardnet.runtime.loading.model_facts import find_folder, identify, stamp

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(GOOD["gguf"]()["model.gguf"])
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def listed(root: Path) -> dict[str, str]:
    return {model.name: model.failure for model in ollama_models(root)}


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("ollama:llama3.2:3b", "ollama:llama3.2:3b"),
        ("ollama:llama3.2", "ollama:llama3.2:latest"),
        ("ollama:library/llama3.2", "ollama:llama3.2:latest"),
        ("ollama:anna/x:q4_K_M", "ollama:anna/x:q4_K_M"),
        ("ollama:hf.co/lab/x-GGUF:Q4", "ollama:hf.co/lab/x-GGUF:Q4"),
        *((text, None) for text in ("llama3.2:3b", "ollama:", "ollama:x:", "ollama:a/b/c/d")),
        *((f"ollama:{bad}", None) for bad in ("../x", "x:../y", "x:a/b", "/x", "x:..", "a//b")),
        *((f"ollama:{bad}", None) for bad in ("nul", "x:con", "a\\b", "C:/x", "x.", "x:y.")),
        *((f"ollama:{bad}", None) for bad in ("x\0", "x\n", ".x", "x:.y", "é", "x" * 200)),
    ],
)
def test_what_can_be_a_name(text: str, written: str | None) -> None:
    name = OllamaName.parse(text)
    assert (str(name) if name else None) == written


def test_a_model_is_found_by_its_name_and_opened(
    root: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = put_in_ollama(root, gguf, "tiny", "3b")
    put_in_ollama(root, gguf, "anna/tiny")
    put_in_ollama(root, gguf, "hf.co/lab/tiny-GGUF", "Q4_K_M")
    names = ["ollama:tiny:3b", "ollama:anna/tiny:latest", "ollama:hf.co/lab/tiny-GGUF:Q4_K_M"]
    assert listed(root) == dict.fromkeys(names, "")
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    assert ollama_roots()[0] == root
    assert [find_folder(name) for name in names] == [blob] * 3
    assert find_folder("ollama:other") is None
    facts, plain = identify(blob), identify(gguf)
    assert (facts.config, facts.form) == (plain.config, plain.form)
    assert facts.size_bytes == blob.stat().st_size
    assert [name for name, *_ in stamp(blob)] == [blob.name]


def test_projectors_are_those_of_manifests_with_the_model(root: Path, gguf: Path) -> None:
    files = [gguf.with_name(f"{number}.gguf") for number in range(3)]
    for number, file in enumerate(files):
        file.write_bytes(b"GGUF%d" % number)
    blob = put_in_ollama(root, gguf, "tiny", "3b", projector=files[0])
    put_in_ollama(root, gguf, "tiny", "same", projector=files[0])
    put_in_ollama(root, gguf, "tiny", "blind")
    other = put_in_ollama(root, files[1], "other", projector=files[2])
    write_manifest(root, b"[", "damaged")
    assert [path.read_bytes() for path in projectors_of(blob)] == [b"GGUF0"]
    assert [path.read_bytes() for path in projectors_of(other)] == [b"GGUF2"]
    put_in_ollama(root, gguf, "tiny", "2", projector=files[2])
    assert {path.read_bytes() for path in projectors_of(blob)} == {b"GGUF0", b"GGUF2"}


def test_a_file_without_a_suffix_is_a_gguf_by_its_first_bytes(tmp_path: Path, gguf: Path) -> None:
    other = gguf.rename(tmp_path / "any name")
    named = tmp_path / "link"
    named.symlink_to(other)
    assert {Checkpoint.open(path).folder for path in (other, named)} == {tmp_path}
    other.write_bytes(b"GGUF"[:3])
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        Checkpoint.open(other)
    os.mkfifo(tmp_path / "pipe")
    assert find_folder(str(tmp_path / "pipe")) is None


def layers(*given: Any) -> dict[str, Any]:
    return {"layers": list(given)}


def layer(kind: str = "model", digest: object = DIGEST) -> dict[str, object]:
    return {"mediaType": f"{KIND}{kind}", "digest": digest}


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (b"{", "not readable as JSON"),
        (b"[]", "expected a JSON object"),
        (b" " * (MAX_MANIFEST_BYTES + 1), f"at most {MAX_MANIFEST_BYTES} are read"),
        ({}, "names no GGUF"),
        ({"layers": 7}, "names no GGUF"),
        (layers(7, [], None, {}), "names no GGUF"),
        (layers(layer("tensor")), "safetensors in Ollama's own form"),
        (layers(layer(), layer("adapter")), "an adapter"),
        (layers(layer(), layer()), "names 2 GGUF files"),
        (layers(layer(digest=None)), "digest is None, expected sha256: and 64 hex digits"),
        (layers(layer(digest="sha256:../../../../etc/passwd")), "digest is 'sha256:../.."),
        (layers(layer(digest="sha256:" + "A" * 64)), "digest is"),
        (layers(layer(digest=DIGEST + "\n")), "digest is"),
        (layers(layer(digest="md5:" + "a" * 32)), "digest is"),
        (layers(layer()), f"{DIGEST.replace(':', '-')}: missing; `ollama pull`"),
    ],
)
def test_a_manifest_that_names_nothing_to_use_is_listed_with_the_reason(
    manifest: Any, words: str, root: Path, gguf: Path
) -> None:
    put_in_ollama(root, gguf, "good")
    write_manifest(root, manifest, "bad")
    found = listed(root)
    assert found.pop("ollama:good:latest") == ""
    [failure] = found.values()
    assert words in failure
    assert "\n" not in failure
    name = OllamaName.parse("ollama:bad")
    assert name is not None
    assert find_ollama(name, [root]) is None, "a peer may have it"


def test_links_and_special_files_are_refused(root: Path, gguf: Path, tmp_path: Path) -> None:
    blob = put_in_ollama(root, gguf, "tiny")
    blob.rename(tmp_path / "outside")
    blob.symlink_to(tmp_path / "outside")
    assert "is a link that leaves" in listed(root)["ollama:tiny:latest"]
    blob.unlink()
    os.mkfifo(blob)
    assert "is a FIFO" in listed(root)["ollama:tiny:latest"]
    blob.unlink()
    put_in_ollama(root, gguf, "tiny")
    path = write_manifest(root, b"{}", "tiny")
    path.rename(tmp_path / "manifest")
    path.symlink_to(tmp_path / "manifest")
    assert "is a link that leaves" in listed(root)["ollama:tiny:latest"]


def test_too_many_models(root: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardnet.checkpoint.program_stores.MAX_MODELS", 1)
    for name in ("a", "b"):
        put_in_ollama(root, gguf, name)
    with pytest.raises(CheckpointError, match="holds more than 1 models"):
        listed(root)
