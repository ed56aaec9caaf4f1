"""What decides the bits of a stage's keys and values beside the model and its inputs.

Knows kernels, instruction sets, devices and versions. Two stages of equal arithmetic that are given
the same rows hold the same bits, so that what one has kept on disk does for the other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import torch

from shardnet import __version__
from shardnet.model.kernels.library import KERNELS_VERSION, native_kernels
from shardnet.stage.stage_model import StageModel


def arithmetic_of(model: StageModel) -> str:
    """Return a digest of a stage's arithmetic, 64 hexadecimal digits."""
    choice, device = model.choice, model.device
    native = native_kernels() if device.type == "cpu" else None
    facts = [
        __version__,
        torch.__version__,
        choice.kernel.value,
        replace(choice, by_text="").name,  # whose bits are those of the library
        choice.dtype.value,
        choice.native_dtype.value,
        choice.exact_rows,
        choice.min_rows,
        native.isa.name if native is not None else "torch",
        KERNELS_VERSION,
        native.has_pairs if native is not None else False,
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
