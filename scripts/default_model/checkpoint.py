"""The checkpoint folder: writing it, reading it back through transformers, its card.

This module knows files. It must not know how the weights were found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from string import Template

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from default_model.corpus import BOS, BOS_ID, EOS, EOS_ID
from default_model.llama import Llama, Shape

# The text has no roles, so a chat is its messages as paragraphs, and the reply is the next one.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] + '\\n\\n' }}{% endfor %}"
)


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(model: Llama, shape: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model in bfloat16 and its tokenizer as a Hugging Face checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().bfloat16().contiguous() for n, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": shape.vocab,
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.max_positions,
            "rope_theta": shape.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": shape.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
        },
    )
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.95,
        },
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_positions,
            "chat_template": CHAT_TEMPLATE,
        },
    )


class Shipped(nn.Module):
    """The checkpoint in `folder` as transformers reads it, in float32."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.checkpoint = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, vocab] for ids [B, T]."""
        logits: Tensor = self.checkpoint(ids).logits
        return logits

    def sample(self, prompt: str, n_tokens: int, seed: int) -> str:
        """Continue a prompt at temperature 0.7 and top-p 0.95."""
        torch.manual_seed(seed)
        ids = self.checkpoint.generate(
            **self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False),
            max_new_tokens=n_tokens,
            do_sample=True,
            temperature=0.7,
            top_p=0.95,
        )
        return str(self.tokenizer.decode(ids[0], skip_special_tokens=True))


@torch.no_grad()
def check_same(model: Llama, shipped: Shipped, held_out: str, tolerance: float = 1e-3) -> None:
    """Stop unless transformers computes, from the files, the logits that this script computes.

    The model in memory is first rounded to the bfloat16 that the files hold.
    """
    text = held_out[:1000]
    ids = shipped.tokenizer(text)["input_ids"]
    if ids != [BOS_ID, *shipped.tokenizer(text, add_special_tokens=False)["input_ids"]]:
        raise SystemExit("transformers tokenizes a prompt differently: bos is missing or misplaced")
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    batch = torch.tensor([ids])
    worst = float((model(batch) - shipped(batch)).abs().max())
    if not worst <= tolerance:
        raise SystemExit(f"transformers' logits differ by {worst:.2e}, more than {tolerance:.0e}")
    print(f"transformers computes the same logits, largest difference {worst:.1e}")


def write_card(folder: Path, fields: Mapping[str, object]) -> None:
    """Write the model card from its template, with the figures of this run."""
    template = Template(Path(__file__).with_name("card.md").read_text("utf-8"))
    (folder / "README.md").write_text(template.substitute(fields), encoding="utf-8")
