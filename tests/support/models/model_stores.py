"""Stores of other programs, as they lie on a disk: Ollama's manifests and blobs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

KIND = "application/vnd.ollama.image."


def put_in_ollama(
    root: Path, gguf: Path, name: str, tag: str = "latest", projector: Path | None = None
) -> Path:
    """Put a GGUF into the store `root` as REGISTRY/NAMESPACE/NAME:TAG, as `ollama pull` does.

    A model of `registry.ollama.ai/library` needs its NAME only. Returns the blob.
    """
    blob = _put_blob(root, gguf)
    digests = {"model": blob.name, "template": "sha256-" + "0" * 64, "params": "sha256-" + "0" * 64}
    if projector is not None:
        digests["projector"] = _put_blob(root, projector).name
    layers = [
        {"mediaType": f"{KIND}{kind}", "digest": name.replace("-", ":"), "size": 9}
        for kind, name in digests.items()
    ]
    write_manifest(root, {"schemaVersion": 2, "layers": layers}, name, tag)
    return blob


def _put_blob(root: Path, file: Path) -> Path:
    content = file.read_bytes()
    blob = root / "blobs" / f"sha256-{hashlib.sha256(content).hexdigest()}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    return blob


def write_manifest(root: Path, manifest: Any, name: str, tag: str = "latest") -> Path:
    """Write what is to be a manifest: bytes, or what JSON is made of. Returns its path."""
    parts = ["registry.ollama.ai", "library"][: 2 - name.count("/")] + name.split("/")
    path = root.joinpath("manifests", *parts, tag)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_text = isinstance(manifest, bytes)
    path.write_bytes(manifest if is_text else json.dumps(manifest).encode())
    return path
