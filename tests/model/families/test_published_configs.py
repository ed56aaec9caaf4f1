"""config.json files with the keys and values that the makers of models publish are read.

Keys and values of this year's are from the makers' files as others print and test them. None was
downloaded and the older ones are written from memory, so that single keys and values may differ
from those that are published today.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from shardnet.checkpoint.quantization.registry import take_format
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.config.model_config import (
    Activation,
    Compressed,
    DeltaNet,
    HeadShape,
    Indexer,
    ModelConfig,
    Ngrams,
    NormKind,
    Rope,
    RopeKind,
    ShortConv,
    StreamKind,
    Streams,
    Temperature,
)
from shardnet.model.families.registry import parse_config
from shardnet.model.families.stage_tensors import stage_tensors
from shardnet.types import LayerRange

FOLDER = Path(__file__).parent / "published"
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
DEEPSEEK_V4: dict[str, Any] = {
    "rope": Rope(
        kind=RopeKind.YARN,
        theta=160000.0,
        share=1 / 8,
        factor=16.0,
        magnitude=1.0,
        original_max_positions=65536,
    ),
    "local_rope": Rope(theta=1e4, share=1 / 8),
    "compressed": Compressed(
        window=128,
        rates=(0, 0, *(4, 128) * 20, 4, 0),
        indexer=Indexer(
            n_heads=64,
            head_size=128,
            n_chosen=512,
            interleaved=True,
            rotates_last=True,
            layers=tuple(range(2, 43, 2)),
        ),
        head_size=512,
        rope_size=64,
        query_rank=1024,
        n_groups=8,
        output_rank=1024,
    ),
    "streams": Streams(count=4, kind=StreamKind.BALANCED, eps=1e-6, n_rounds=20, in_mtp=True),
    "sparse_layers": tuple(range(43)),
}
READ: dict[str, dict[str, Any]] = {
    "glm-4.7-flash": {"n_layers": 47, "n_kv_heads": 1, "sparse_layers": tuple(range(1, 47))},
    "gemma-4-26b-a4b": {
        "wrapper": "gemma4",
        "windows": ((1024,) * 5 + (None,)) * 5,
        "full_heads": HeadShape(n_kv_heads=2, key_size=512, value_size=512),
        "rope": Rope(kind=RopeKind.PROPORTIONAL, theta=1e6, share=0.25),
        "is_value_key": True,
    },
    "olmo-3-7b": {"windows": (4096, 4096, 4096, None) * 8, "max_positions": 65536},
    "seed-oss-36b": {"attention_bias": True, "head_size": 128, "n_kv_heads": 8},
    "smollm3-3b": {"nope_layers": tuple(range(3, 36, 4)), "tie_word_embeddings": True},
    "exaone-4.0-32b": {
        "windows": (4096, 4096, 4096, None) * 16,
        "nope_layers": tuple(range(3, 64, 4)),
    },
    "ministral-3-8b": {
        "family": "ministral3",
        "temperature": Temperature(scale=0.1, floor=16384),
        "max_positions": 262144,
    },
    "devstral-2-123b": {"family": "ministral3", "temperature": None, "max_positions": 262144},
    "minimax-m2": {
        "rope": Rope(theta=5e6, share=0.5),
        "sparse_layers": tuple(range(62)),
        "windows": (None,) * 62,
    },
    "olmoe-1b-7b": {"sparse_layers": tuple(range(16)), "n_kv_heads": 16},
    "glm-4-9b-0414": {"rope": Rope(share=0.5), "attention_bias": True, "norm_eps": 1e-5},
    "ernie-4.5-0.3b": {"rope": Rope(theta=5e5), "head_size": 128, "tie_word_embeddings": True},
    "ernie-4.5-21b-a3b": {"sparse_layers": tuple(range(1, 28)), "head_size": 128},
    "hunyuan-7b": {"rope": Rope(theta=1e4 * 1000 ** (128 / 126)), "n_kv_heads": 8},
    "afm-4.5b": {"activation": Activation.RELU_SQUARED, "max_positions": 81920},
    "gemma-2b": {"activation": Activation.GELU_TANH, "tie_word_embeddings": True, "head_size": 256},
    "command-r-35b": {"logit_divisor": 16.0, "has_parallel_mlp": True, "n_kv_heads": 64},
    "command-r7b": {
        "windows": (4096, 4096, 4096, None) * 8,
        "nope_layers": tuple(range(3, 32, 4)),
        "logit_divisor": 4.0,
    },
    "north-mini-code": {
        "windows": (None, *(4096, 4096, 4096, None) * 12),
        "nope_layers": tuple(range(4, 49, 4)),
        "intermediate_size": 3072,
        "norm_kind": NormKind.STORED,
        "sparse_layers": tuple(range(1, 49)),
    },
    "phi-2": {"rope": Rope(share=0.4), "has_head_bias": True, "has_parallel_mlp": True},
    "pythia-1.4b": {"rope": Rope(share=0.25), "n_kv_heads": 16, "has_joined_heads": True},
    "stablelm-2-1.6b": {"attention_bias": True, "has_parallel_mlp": False},
    "olmo-7b": {"norm_kind": NormKind.BARE_CENTRED},
    "exaone-3.5-7.8b": {"n_layers": 32, "norm_eps": 1e-5, "max_positions": 32768},
    "apertus-8b": {"has_head_norms": True, "intermediate_size": 21504},
    "phi-3.5-moe": {"has_head_bias": True, "attention_bias": True, "windows": (131072,) * 32},
    "granite-3.1-3b-a800m": {"logit_divisor": 6.0, "sparse_layers": tuple(range(32))},
    "hunyuan-a13b": {"n_kv_heads": 8, "sparse_layers": tuple(range(32)), "has_head_norms": True},
    "dots.llm1": {"sparse_layers": tuple(range(1, 62)), "windows": (None,) * 62},
    "bamba-9b": {"rope": Rope(share=0.5), "intermediate_size": 14336},
    "granite-3.3-8b": {"logit_divisor": 16.0, "residual_multiplier": 0.22, "rope": Rope(theta=1e7)},
    "granite-swash-2b": {
        "windows": (None, 128, 128, 128) * 6,
        "has_sinks": True,
        "logit_divisor": 10.0,
        "nope_layers": (),
        "tie_word_embeddings": True,
    },
    "sarvam-30b": {
        "rope": Rope(theta=8e6),
        "has_head_norms": True,
        "sparse_layers": tuple(range(1, 19)),
    },
    "sarvam-105b": {
        "attention_scale": 192**-0.5 * (0.1 * math.log(40) + 1) ** 2,
        "head_size": 64,
        "sparse_layers": tuple(range(1, 32)),
    },
    "minicpm3-4b": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / 62**0.5,
        "logit_divisor": 10.0,
        "max_positions": 32768,
    },
    "olmo-2-7b": {"rope": Rope(theta=5e5), "n_kv_heads": 32, "norm_eps": 1e-6},
    "glm-4.5-air": {"sparse_layers": tuple(range(1, 46)), "rope": Rope(theta=1e6, share=0.5)},
    "glm-4-9b-chat": {"rope": Rope(share=0.5), "norm_eps": 1.5625e-07, "attention_bias": True},
    "helium-1-2b": {"head_size": 128, "norm_eps": 1e-8, "rope": Rope(theta=1e5)},
    "deepseek-v4-flash": DEEPSEEK_V4,
    "deepseek-v4-flash-0731": DEEPSEEK_V4,
    "deepseek-v4.1-flash": {
        "rope": DEEPSEEK_V4["rope"],
        "local_rope": DEEPSEEK_V4["local_rope"],
        "norm_eps": 1e-20,
        "tie_word_embeddings": False,
        "compressed": Compressed(
            window=128,
            rates=(0, 0, *(2,) * 18, *(1,) * 20, 0),
            sources=(0, 1, *(2,) * 6, *(8,) * 6, *(14,) * 6, *(20,) * 20),
            blocks_from=20,
            n_blocks=2048,
            block_size=8,
            indexer=Indexer(
                n_heads=32,
                head_size=128,
                n_chosen=512,
                interleaved=True,
                rotates_last=True,
                layers=(2, 8, 14, 20, 24, 28, 32, 36),
            ),
            head_size=512,
            rope_size=64,
            query_rank=1280,
            n_groups=8,
            output_rank=1024,
        ),
        "streams": Streams(
            count=4,
            kind=StreamKind.BALANCED,
            eps=1e-6,
            n_rounds=20,
            has_head=False,
            in_mtp=True,
            is_lagged=True,
        ),
        "ngrams": Ngrams(
            width=24 * 256,
            longest=4,
            heads_each=8,
            least_rows=16_000_000,
            divisor=1,
            n_parts=1,
            seed=0,
            end_id=2,
            n_taps=0,
            layers=(1, 14),
            n_classes=99092,
        ),
        "row_width": 4 * 5120 + 3 * 4 + 512 + 128,
    },
    "deepseek-v3.2": {
        "max_positions": 163840,
        "indexer": Indexer(
            n_heads=64, head_size=128, n_chosen=2048, interleaved=False, layers=tuple(range(62))
        ),
        "sparse_layers": tuple(range(3, 61)),
    },
    "glm-5.3-flash": {
        "wrapper": "glm5_next",
        "indexer": Indexer(
            n_heads=32,
            head_size=128,
            n_chosen=2048,
            interleaved=False,
            n_pooled=4,
            layers=(*range(3, 45, 4), 45),
        ),
        "delta_net": DeltaNet(
            n_key_heads=64,
            n_value_heads=64,
            key_size=128,
            value_size=128,
            n_taps=4,
            layers=tuple(n for n in range(45) if n % 4 != 3),
            has_key_decays=True,
            decay_floor=-5.0,
        ),
        "sparse_layers": tuple(range(3, 45)),
        "mlp_limit": 10.0,
    },
    "hy4-preview": {
        "indexer": Indexer(
            n_heads=32,
            head_size=128,
            n_chosen=2048,
            interleaved=False,
            rotates_last=True,
            norm_eps=1e-5,
            layers=(0, *range(1, 78, 4), 78),
        ),
        "streams": Streams(count=4, kind=StreamKind.APART, eps=1e-6, magnitude=2.0),
        "rope": Rope(theta=1e7),
        "attention_scale": 1 / 16,
        "sparse_layers": tuple(range(1, 78)),
    },
    "qwen3.8-flash-next": {
        "wrapper": "qwen4_exp",
        "rope": Rope(theta=1e7, share=0.25, axes=(*(0, 1, 2) * 10, 0, 1)),
        "indexer": Indexer(
            n_heads=4,
            head_size=128,
            n_chosen=2048,
            interleaved=False,
            n_pooled=4,
            n_axes=3,
            layers=(*range(3, 48, 4), 48),
        ),
        "streams": Streams(count=4, kind=StreamKind.GATED, eps=1e-6, rank=320, in_mtp=True),
        "ngrams": Ngrams(
            width=2560,
            longest=3,
            heads_each=8,
            least_rows=20_000_000,
            divisor=128,
            n_parts=128,
            seed=1234,
            end_id=248044,
            n_taps=4,
            layers=(1,),
        ),
    },
    "kimi-k2.5": {
        "wrapper": "kimi_k25",
        "rope": Rope(kind=RopeKind.YARN, theta=5e4, factor=64.0, original_max_positions=4096),
        "max_positions": 262144,
        "sparse_layers": tuple(range(1, 61)),
    },
    "llama-4-scout": {
        "windows": ((8192,) * 3 + (None,)) * 12,
        "max_positions": 10485760,
        "temperature": Temperature(scale=0.1, floor=8192, shift=1),
        "has_unit_heads": True,
        "eos_token_ids": (200001, 200007, 200008),
        "sparse_layers": tuple(range(48)),
    },
    "llama-4-maverick": {
        "nope_layers": tuple(range(3, 48, 4)),
        "has_unit_heads": False,
        "intermediate_size": 16384,
        "sparse_layers": tuple(range(1, 48, 2)),
    },
    "falcon-h1-0.5b": {
        "rope": Rope(theta=1e11),
        "head_size": 64,
        "logit_divisor": 25.6,
        "delta_net": DeltaNet(
            n_key_heads=1,
            n_value_heads=24,
            key_size=128,
            value_size=64,
            n_taps=4,
            layers=tuple(range(36)),
            is_mamba=True,
            is_beside_attention=True,
            has_norm=False,
        ),
    },
    "granite-4.0-h-tiny": {"nope_layers": tuple(range(40)), "sparse_layers": tuple(range(40))},
    "nemotron-3-nano": {
        "n_layers": 52,
        "mixerless_layers": tuple(n for n, kind in enumerate(NANO) if kind == "E"),
        "sparse_layers": tuple(n for n, kind in enumerate(NANO) if kind == "E"),
        "delta_net": DeltaNet(
            n_key_heads=8,
            n_value_heads=64,
            key_size=128,
            value_size=64,
            n_taps=4,
            is_mamba=True,
            layers=tuple(n for n, kind in enumerate(NANO) if kind == "M"),
        ),
    },
    "mobilellm-r1-950m": {"experts": None, "intermediate_size": 6144, "nope_layers": ()},
    "lfm2-1.2b": {
        "intermediate_size": 8192,
        "short_conv": ShortConv(
            width=2048, n_taps=3, has_bias=False, layers=(0, 1, 3, 4, 6, 7, 9, 11, 13, 15)
        ),
    },
    "lfm2-8b-a1b": {"sparse_layers": tuple(range(2, 24)), "head_size": 64},
    "step-3.7-flash": {
        "wrapper": "step3p7",
        "windows": ((None, 512, 512, 512) * 12)[:45],
        "query_heads": ((64, 96, 96, 96) * 12)[:45],
        "sparse_layers": tuple(range(3, 45)),
        "late_limits": ((0, 0),) * 43 + ((7, 0), (7, 16)),
        "local_rope": Rope(theta=1e4),
    },
    "minitron-4b": {
        "rope": Rope(share=0.5),
        "activation": Activation.RELU_SQUARED,
        "norm_offset": 1.0,
    },
    "mimo-v2-flash": {
        "windows": (None, *(129,) * 4, None, *((129,) * 5 + (None,)) * 7),
        "full_heads": HeadShape(n_kv_heads=4, key_size=192, value_size=128),
        "n_kv_heads": 8,
        "rope": Rope(theta=5e6, share=0.334),
        "local_rope": Rope(theta=1e4, share=0.334),
        "sparse_layers": tuple(range(1, 48)),
    },
    "gemma-2-9b": {"windows": (4096, None) * 21, "attention_scale": 1 / 16},
    "qwen3-coder-30b-a3b": {"sparse_layers": tuple(range(48)), "rope": Rope(theta=1e7)},
    "kimi-k2": {"family": "deepseek_v3", "sparse_layers": tuple(range(1, 61))},
    "kimi-linear-48b-a3b": {
        "max_positions": 1048576,
        "n_kv_heads": 1,
        "nope_layers": tuple(range(27)),
        "sparse_layers": tuple(range(1, 27)),
        "delta_net": DeltaNet(
            n_key_heads=32,
            n_value_heads=32,
            key_size=128,
            value_size=128,
            n_taps=4,
            layers=tuple(n for n in range(26) if (n + 1) % 4),
            has_key_decays=True,
        ),
    },
    "trinity-mini": {
        "windows": (2048, 2048, 2048, None) * 8,
        "nope_layers": tuple(range(3, 32, 4)),
        "embedding_multiplier": 2048**0.5,
        "sparse_layers": tuple(range(2, 32)),
    },
    "hy3-preview": {
        "rope": Rope(theta=11158840.0),
        "has_head_norms": True,
        "sparse_layers": tuple(range(1, 80)),
    },
    "starcoder2-3b": {"windows": (4096,) * 30, "mlp_bias": True, "tie_word_embeddings": True},
}
"""What some of the keys mean."""
BY_MODULES: dict[str, dict[str, Any]] = {
    "longcat-flash-chat": {"model_type": "longcat_flash", "zero_expert_num": 256, "num_layers": 28},
    "minimax-m3": {
        "model_type": "minimax_m3_vl_text",
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
        "index_topk_blocks": 16,
        "swiglu_limit": 7.0,
        "eos_token_id": 200020,
    },
}
"""What the config that transformers' modules are made of has of some."""
BILLIONS = {
    "deepseek-v3.2": 671,
    "deepseek-v4-flash": 284,
    "glm-5.3-flash": 320,
    "hy3-preview": 295,
    "hy4-preview": 770,
    "kimi-k2.5": 1026,
    "llama-4-maverick": 400,
    "llama-4-scout": 109,
    "longcat-flash-chat": 560,
    "minimax-m3": 428,
    "qwen3.8-flash-next": 125 + 51,
    "step-3.7-flash": 196,
}
"""How many parameters some have in their makers' words, of whom some count what sees or drafts."""
REFUSED = {"deepseek-v4.1-flash"}
"""Those of whose classes transformers has none, which is said by their names."""


def read(raw: dict[str, Any]) -> ModelConfig:
    """Read a config as one of a folder is read: what quantises goes first, which is not changed."""
    rest = copy.deepcopy(raw)
    take_format(rest, "config.json")
    return parse_config(rest, "config.json")


def published(name: str) -> dict[str, Any]:
    """Return what a file says."""
    said: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return said


def test_every_file_is_read() -> None:
    assert {
        path.stem for path in FOLDER.glob("*.json")
    } == READ.keys() | BY_MODULES.keys() | REFUSED


@pytest.mark.parametrize("name", sorted(READ))
def test_no_key_of_the_makers_refuses_a_model(name: str) -> None:
    config = read(published(name))
    assert {key: getattr(config, key) for key in READ[name]} == READ[name]


OF_FILES: dict[str, Any] = {"eos_token_ids": (), "tie_word_embeddings": False} | dict.fromkeys(
    ("bos_token_id", "checkpoint_dtype")
)
"""What is taken from other files where a config does not say it."""


@pytest.mark.parametrize("name", sorted(BY_MODULES))
def test_transformers_reads_what_its_modules_are_made_of(name: str) -> None:
    outline = read(published(name)).outline
    assert outline is not None
    made = json.loads(outline.config_text)
    assert {key: made[key] for key in BY_MODULES[name]} == BY_MODULES[name]


@pytest.mark.parametrize("name", sorted(BILLIONS))
def test_a_model_is_as_large_as_its_makers_say(name: str) -> None:
    config = read(published(name))
    shapes = stage_tensors(config, LayerRange(0, config.n_layers)).all.values()
    billions = sum(math.prod(shape) for shape in shapes) / 1e9
    assert billions == pytest.approx(BILLIONS[name], rel=0.025)


@pytest.mark.filterwarnings("ignore:.*rope_scaling.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "name", sorted(READ.keys() - {"kimi-k2", "llama-4-maverick", "deepseek-v4.1-flash"})
)
def test_a_config_that_transformers_saved_again_means_the_same(name: str, tmp_path: Path) -> None:
    """It does not read a name of Kimi's, a number that Llama 4's first files have for true, nor
    DeepSeek-V4.1."""
    raw = published(name)
    plain = {key: value for key, value in raw.items() if key != "auto_map"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    both = (read(one) for one in (raw, again))
    ours, theirs = (replace(config, **OF_FILES) for config in both)
    assert ours == theirs


def test_command_r7b_saved_again_by_transformers_4() -> None:
    raw = published("command-r7b")
    windows = [*["sliding_attention"] * 3, "full_attention"] * 8
    again = raw | {"_sliding_window_pattern": 4, "layer_types": windows}
    assert parse_config(again, "config.json") == parse_config(raw, "config.json")


def test_nemotron_h_says_the_same_in_other_words() -> None:
    """Layers as a list, and what its larger and older models say besides."""
    raw = published("nemotron-3-nano")
    config = parse_config(raw, "config.json")
    pattern = raw.pop("hybrid_override_pattern")
    names = {"M": "mamba", "E": "moe", "*": "attention"}
    listed = raw | {"layers_block_type": [names[letter] for letter in pattern]}
    assert parse_config(listed, "config.json") == config
    more = listed | {"attention_head_dim": raw.pop("head_dim"), "rms_norm_eps": 1e-5}
    assert parse_config(more, "config.json") == config
    for change in ({"attention_head_dim": 64}, {"rms_norm_eps": 1e-6}):
        with pytest.raises(UnsupportedModelError, match=next(iter(change))):
            parse_config(more | {"head_dim": 128} | change, "config.json")


CHOSEN = "compressed_sparse_attention"


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("deepseek-v4-flash", {"o_groups": 2**31 - 1}, "o_groups is 2147483647, expected 1 to 256"),
        ("deepseek-v4-flash", {"o_groups": 3}, "o_groups 3 do not divide"),
        ("deepseek-v4-flash", {"hc_sinkhorn_iters": 10**9}, "hc_sinkhorn_iters is 1000000000"),
        ("deepseek-v4.1-flash", {"kv_source_layer_ids": [2, 8]}, r"\[2, 8\] do not make"),
        ("deepseek-v4.1-flash", {"kv_source_layer_ids": [8, 2, 20]}, "do not make the entries"),
        ("deepseek-v4.1-flash", {"index_source_layer_ids": [2]}, "do not make the entries"),
        ("deepseek-v4.1-flash", {"compress_ratios": [0] * 39}, "not those of 40 layers"),
        ("deepseek-v4.1-flash", {"compress_ratios": [0] * 20 + [3] * 20}, "do not divide a block"),
        ("deepseek-v4.1-flash", {"candidate_topk_blocks": 3}, "3 of 8 entries do not hold 512"),
        ("deepseek-v4-flash", {"compress_rates": {CHOSEN: "x"}}, "compress_rates .* do not divide"),
        ("deepseek-v4-flash", {"compress_rates": {CHOSEN: -4}}, "compress_rates .* do not divide"),
        ("deepseek-v4-flash", {"compress_rates": {CHOSEN: 0}}, "compress_rates .* do not divide"),
        ("hy4-preview", {"indexer_types": 5}, "indexer_types is 5, expected list or str"),
        ("hy4-preview", {"q_lora_rank": None}, "q_lora_rank = None is not supported"),
    ],
)
def test_a_damaged_config_is_refused_by_the_key(
    name: str, change: dict[str, Any], named: str
) -> None:
    raw = published(name)
    of_text = raw.get("text_config")
    with pytest.raises(CheckpointError, match=named):
        read(raw | ({"text_config": of_text | change} if of_text else change))


def test_a_language_model_whose_type_is_no_text_is_refused() -> None:
    raw = published("glm-5.3-flash")
    with pytest.raises(CheckpointError):
        read(raw | {"text_config": raw["text_config"] | {"model_type": []}})
