"""Stores of other programs, as they lie on a disk: Ollama's manifests and blobs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

KIND = "application/vnd.ollama.image."


def put_in_ollama(root: Path, gguf: Path, name: str, tag: str = "latest") -> Path:
    """Put a GGUF into the store `root` as REGISTRY/NAMESPACE/NAME:TAG, as `ollama pull` does.

    A model of `registry.ollama.ai/library` needs its NAME only. Returns the blob.
    """
    content = gguf.read_bytes()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    blob = root / "blobs" / digest.replace(":", "-")
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    layers = [
        {"mediaType": f"{KIND}{kind}", "digest": digest, "size": len(content)}
        for kind in ("model", "template", "params", "projector")
    ]
    for layer in layers[1:]:
        layer["digest"] = "sha256:" + "0" * 64  # what is in them is not asked for
    write_manifest(root, {"schemaVersion": 2, "layers": layers}, name, tag)
    return blob


def write_manifest(root: Path, manifest: Any, name: str, tag: str = "latest") -> Path:
    """Write what is to be a manifest: bytes, or what JSON is made of. Returns its path."""
    parts = ["registry.ollama.ai", "library"][: 2 - name.count("/")] + name.split("/")
    path = root.joinpath("manifests", *parts, tag)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_text = isinstance(manifest, bytes)
    path.write_bytes(manifest if is_text else json.dumps(manifest).encode())
    return path
