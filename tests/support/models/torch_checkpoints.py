"""Checkpoints in files of torch, made from tiny ones in safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def to_torch_files(source: Path, folder: Path, n_files: int = 1) -> Path:
    """Write the checkpoint folder `source` with its tensors in torch's files. Return `folder`."""
    folder.mkdir()
    for path in source.iterdir():
        if "safetensors" not in path.name:
            (folder / path.name).write_bytes(path.read_bytes())
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    if n_files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    names = list(tensors)
    index = {}
    for number in range(n_files):
        file = f"pytorch_model-{number + 1:05}-of-{n_files:05}.bin"
        part = {name: tensors[name] for name in names[number::n_files]}
        torch.save(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    return folder
