"""A tiny chat model that sees: Mistral 3 with a tokenizer and a template for its pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image
from support.models.vision_checkpoints import CASES, TOKENS, random_picture

TEMPLATE = """{{ bos_token }}{% for message in messages %}{{ message.role }}:
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{% endfor %}assistant:"""


def make_pictured(folder: Path) -> Path:
    """Write the model with random weights. Return `folder`."""
    CASES["mistral3"].make(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token, token_id in TOKENS.items():
        added = {"id": token_id, "content": token, "special": True, **flags}
        tokenizer["added_tokens"].append(added)
    file.write_text(json.dumps(tokenizer))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return folder


def png(height: int, width: int, seed: int = 0) -> bytes:
    """A picture of blots as a PNG."""
    return saved(Image.fromarray(random_picture(height, width, seed)), "PNG")


def saved(image: Image.Image, kind: str, **how: object) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def grey16(height: int, width: int) -> bytes:
    """A PNG of 16 bits of grey."""
    ramp = np.linspace(0, 65535, height * width).astype(np.uint16).reshape(height, width)
    return saved(Image.fromarray(ramp), "PNG")
