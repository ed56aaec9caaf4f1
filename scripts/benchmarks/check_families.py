"""Run every causal family of the installed transformers with a tiny random model: what computes it.

A family is native (a record of ours), by transformers (a checkpoint of it, loaded in two stages,
gives the greedy tokens of the whole model), or refused, with the reason. Each runs in a process of
its own, which is forked from one that has imported everything, and has a deadline.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo  # before the processes are forked, as the modules below
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import ShardnetError
from shardnet.model.families.registry import FAMILIES
from shardnet.model.families.wrappers import WRAPPERS
from shardnet.model.modules import cut_model  # noqa: F401
from shardnet.stage.module_stage import ModuleRoom, ModuleStage, load_module_stage
from shardnet.stage.runs import Run
from shardnet.types import Epoch, LayerRange, MicroBatch, RowGroup, SequenceId, SlotId, StepId

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- made by scripts/check_families -->", "<!-- end -->"
VOCABULARY: Final = 211
N_LAYERS: Final = 6
PROMPT: Final = tuple((7 * n + 3) % VOCABULARY for n in range(21))
CHUNK: Final = 13
N_TOKENS: Final = 8
MAX_PARAMETERS: Final = 40_000_000
TIMEOUT_S: Final = 120
POLL_S: Final = 0.05

SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "n_shared_experts": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "use_mamba_kernels": False,
    "routed_scaling_factor": 1.0,
    "vocab_size_per_layer_input": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "d_inner": 96,
    "d_head": 16,
    "hidden_size_per_layer_input": 8,
    "is_decoder": True,
}
"""What a config of any family is given, as far as it has such keys."""
_MAMBA2: Final = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_ssm": 128,
}
_INDEXED: Final = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 64}
_LATENT: Final = {"head_dim": 8, "num_key_value_heads": 4}
OWN_SIZES: Final[Mapping[str, Mapping[str, Any]]] = {
    "axk1": _LATENT,
    "axk2": {**_INDEXED, **_LATENT},
    "bailing_hybrid": _LATENT,
    "bamba": {**_MAMBA2, "attn_layer_indices": [2, 5]},
    "bloom": {"n_layer": N_LAYERS, "n_head": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": N_LAYERS,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "codegen": {
        "n_embd": 64,
        "n_layer": N_LAYERS,
        "n_head": 4,
        "rotary_dim": 8,
        "n_positions": 256,
    },
    "ctrl": {"n_embd": 64, "n_layer": N_LAYERS, "n_head": 4, "dff": 96},
    "deepseek_v32": {**_INDEXED, **_LATENT},
    "dots3_note_text": {
        **_INDEXED,
        **_LATENT,
        "shared_experts_intermediate_size": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 2},
    "dots1": {"layer_types": ["full_attention"] * N_LAYERS},
    "falcon_h1": _MAMBA2,
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * (N_LAYERS // 2),
        "num_kv_shared_layers": 2,
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * (N_LAYERS // 2),
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * N_LAYERS,
    },
    "glm_moe_dsa": {**_INDEXED, **_LATENT},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
    },
    "gpt-sw3": {"n_embd": 64, "n_layer": N_LAYERS, "n_head": 4, "n_positions": 256},
    "gpt_bigcode": {"n_embd": 64, "n_layer": N_LAYERS, "n_head": 4, "n_positions": 256},
    "gpt_neo": {
        "num_layers": N_LAYERS,
        "num_heads": 4,
        "window_size": 8,
        "attention_types": [[["global", "local"], N_LAYERS // 2]],
    },
    "gptj": {"n_embd": 64, "n_layer": N_LAYERS, "n_head": 4, "rotary_dim": 8, "n_positions": 256},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["mamba", "attention"] * (N_LAYERS // 2)},
    "jetmoe": {"kv_channels": 16},
    "kimi_linear": {**_LATENT, "linear_num_heads": 4, "linear_head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"] * (N_LAYERS // 3)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"] * (N_LAYERS // 3)},
    "longcat_flash": {**_LATENT, "num_layers": N_LAYERS // 2, "num_hidden_layers": N_LAYERS},
    "minicpm3": _LATENT,
    "sarvam_mla": _LATENT,
    "youtu": _LATENT,
    "qwen4_exp_text": {
        "ple_layer_ids": [2],
        "hc_lowrank": 8,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 1,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
    "mpt": {"d_model": 64, "n_layers": N_LAYERS, "n_heads": 4, "max_seq_len": 256},
    "openai-gpt": {"n_embd": 64, "n_layer": N_LAYERS, "n_head": 4, "n_positions": 256},
    "xglm": {"d_model": 64, "ffn_dim": 96, "num_layers": N_LAYERS, "attention_heads": 4},
    "xlnet": {"d_model": 64, "n_head": 4, "n_layer": N_LAYERS},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * (N_LAYERS // 2),
        "num_key_value_heads": 4,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * (N_LAYERS // 2)},
    "zaya": {"num_experts_per_tok": 1},
}
"""What some families ask for beside that."""

NOBODY: Final[Mapping[str, str]] = {
    "cpmant": "one model of 10 billion parameters, of 2022, which one machine holds",
    "minimax": "its makers' later ones, M2 and M3, run",
    "openai-gpt": "GPT-1 of 2018, 117 million parameters and 512 positions",
    "prophetnet": "summaries of 2020, by at most 0.4 billion parameters",
    "rwkv": "RWKV-4 of 2023, of at most 14 billion parameters, which one machine holds; later ones "
    "come with code of their own",
    "xlstm": "one model of 7 billion parameters, which one machine holds",
}
"""Why nobody runs some of what is refused by several machines: who made them, and how large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What computes a family, and why not where nothing does."""

    family: str
    how: str
    why: str = ""


def tiny_model(family: str) -> Any:
    """Make a tiny random model of a family, with weights large enough that tokens differ."""
    torch.manual_seed(3)
    kind = CONFIG_MAPPING[family]
    fields = getattr(kind, "__dataclass_fields__", {})
    known = {*inspect.signature(kind.__init__).parameters, *fields}
    known |= set(getattr(kind, "attribute_map", {}))
    sizes = {key: value for key, value in SIZES.items() if key in known}
    config = kind(**(sizes | dict(OWN_SIZES.get(family, {}))))
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    n_parameters = sum(each.numel() for each in empty.parameters())
    if n_parameters > MAX_PARAMETERS:
        raise ValueError(f"it would have {n_parameters / 1e6:.0f} million parameters")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() > 1:
                each.normal_(0, 0.08)
            elif each.float().std() == 0 and each.mean() == 0:
                each.normal_(0, 0.02)
    return model.eval()


@torch.inference_mode()
def whole_tokens(model: Any) -> list[int]:
    """Return the greedy tokens of a whole model, which computes all rows anew for each."""
    token_ids = [*PROMPT]
    for _ in range(N_TOKENS):
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits
        token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(PROMPT) :]


def load_stages(folder: Path) -> list[ModuleStage]:
    """Load a checkpoint as two stages."""
    checkpoint = Checkpoint.open(folder, ignore_unknown_config=True)
    n_layers, outline = checkpoint.config.n_layers, checkpoint.config.outline
    assert outline is not None
    cut = max(1, n_layers // 2) if outline.shared_kv_from is None else outline.shared_kv_from
    looped = outline.together(LayerRange(0, cut))
    cut = cut if looped is None else looped.start
    return [
        load_module_stage(
            checkpoint,
            layers,
            dtype=torch.float32,
            hidden_dtype=None,
            device=torch.device("cpu"),
            room=ModuleRoom(context=256, room_blocks=4),
            progress=lambda done, total: None,
        )
        for layers in (LayerRange(0, cut), LayerRange(cut, n_layers))
    ]


def split_tokens(stages: Sequence[ModuleStage]) -> list[int]:
    """Return the greedy tokens of two stages, which take the prompt in chunks."""
    token_ids, position, slot = [*PROMPT], 0, SlotId(0)
    while len(token_ids) < len(PROMPT) + N_TOKENS:
        rows = token_ids[position : position + CHUNK]
        group = RowGroup(
            sequence_id=SequenceId(1), slot=slot, position=position, n_rows=len(rows), n_sampled=1
        )
        batch = MicroBatch(epoch=Epoch(1), step=StepId(1), groups=(group,), token_ids=rows)
        hidden = None
        for stage in stages:
            hidden = stage.run_alone(Run(batch=batch, hidden=hidden))
        position += len(rows)
        assert hidden is not None
        if position == len(token_ids):
            token_ids.append(int(stages[-1].logits(hidden[-1:])[0].argmax()))
    return token_ids[len(PROMPT) :]


def check(family: str) -> Found:
    """Find out what computes a family."""
    if {family, CONFIG_MAPPING[family].model_type} & {*FAMILIES, *WRAPPERS}:
        return Found(family=family, how="native")
    if {"text_config", "vision_config", "decoder"} & {*CONFIG_MAPPING[family].sub_configs}:
        return Found(family=family, how="refused", why="it is multimodal")
    try:
        model = tiny_model(family)
        wanted = whole_tokens(model)
    except Exception as error:
        return Found(family=family, how="refused", why=f"no tiny model was made: {_words(error)}")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            found = split_tokens(load_stages(Path(folder)))
        except ShardnetError as error:
            why = re.sub(rf"{re.escape(folder)}(/config.json)?(: )?", "", error.message)
            return Found(family=family, how="refused", why=why)
        except Exception as error:
            return Found(family=family, how="refused", why=f"a bug: {_words(error)}")
    if found != wanted:
        return Found(family=family, how="refused", why=f"wrong tokens: {found} for {wanted}")
    return Found(family=family, how="by transformers")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def check_all(families: Sequence[str], at_once: int, timeout_s: float, kept: Path) -> list[Found]:
    """Check families, each in a process of its own for `timeout_s` at most, some at a time.

    What is found is a line of `kept` at once: families that have one are not run again.
    """
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else ()
    found = {one["family"]: Found(**one) for one in map(json.loads, lines)}
    waiting, running = [each for each in families if each not in found], dict[str, _Check]()
    with tempfile.TemporaryDirectory() as name, kept.open("a", encoding="utf-8") as file:
        folder = Path(name)
        while waiting or running:
            while waiting and len(running) < at_once:
                family = waiting.pop(0)
                running[family] = _begin(family, folder / family)
            for one in [each for each in running.values() if each.has_ended(timeout_s)]:
                del running[one.family]
                found[one.family] = one.found(timeout_s)
                if one.told.exists():  # else it is tried again
                    file.write(json.dumps(asdict(found[one.family])) + "\n")
                    file.flush()
                left = f"{len(waiting) + len(running)} left"
                print(f"{one.family}: {found[one.family].how} ({left})", file=sys.stderr)
            time.sleep(POLL_S)
    return [found[family] for family in families]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """A process that checks a family since `began_s`, and the file that it `told` what it found."""

    family: str
    process: int
    began_s: float
    told: Path

    def has_ended(self, timeout_s: float) -> bool:
        """Tell whether it has, by itself or because its time is over."""
        if time.monotonic() - self.began_s > timeout_s:
            os.kill(self.process, signal.SIGKILL)
            return os.waitpid(self.process, 0)[0] == self.process
        return os.waitpid(self.process, os.WNOHANG)[0] == self.process

    def found(self, timeout_s: float) -> Found:
        """Read what it found, if it came to that."""
        if self.told.exists():
            return Found(**json.loads(self.told.read_text(encoding="utf-8")))
        why = f"no answer of the script's process within {timeout_s:g} s"
        return Found(family=self.family, how="refused", why=why)


def _begin(family: str, told: Path) -> _Check:
    """Fork a process that writes what it finds into a file, whole or not at all."""
    process = os.fork()
    if process:
        return _Check(family=family, process=process, began_s=time.monotonic(), told=told)
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        half = told.with_suffix(".half")
        half.write_text(json.dumps(asdict(check(family))), encoding="utf-8")
        half.rename(told)
    finally:
        os._exit(0)


def table(found: Iterable[Found]) -> str:
    """Write what was found as markdown."""
    by_how: dict[str, list[Found]] = {}
    for one in found:
        by_how.setdefault(one.how, []).append(one)
    parts = []
    for how in ("native", "by transformers"):
        names = ", ".join(f"`{one.family}`" for one in by_how.get(how, ()))
        count = len(by_how.get(how, ()))
        parts.append(textwrap.fill(f"**{how}** ({count}): {names}", 120, break_on_hyphens=False))
    refused = by_how.get("refused", [])
    rows = [f"| `{one.family}` | {_cell(_reason(one))} |" for one in refused]
    head = [f"**refused** ({len(refused)}):", "", "| family | why |", "|---|---|"]
    return "\n\n".join([*parts, "\n".join([*head, *rows])])


def _reason(one: Found) -> str:
    """Say why a family is refused, and why nobody misses it, as far as that is known."""
    config = CONFIG_MAPPING[one.family]
    decodes = getattr(config, "is_encoder_decoder", False)
    of_two = ("the decoder of a model that reads with an encoder",) if decodes else ()
    known = (NOBODY[one.family],) if one.family in NOBODY else ()
    return "; ".join((one.why, *of_two, *known))


def _cell(why: str) -> str:
    return re.sub(r"\s+", " ", why).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Check the families that are named, else all; write the table where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true", help="write it into docs/models.md")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="of a family, in s")
    parser.add_argument("--resume", type=Path, help="keep what is found here, and go on with it")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    families = args.families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kept = args.resume or Path(folder) / "found.jsonl"
        found = check_all(families, args.at_once, args.timeout, kept)
    text = f"transformers {transformers.__version__}, {len(found)} families:\n\n{table(found)}"
    print(text)
    print(f"{time.monotonic() - began_s:.0f} s", file=sys.stderr)
    if args.write:
        document = DOCUMENT.read_text(encoding="utf-8")
        before, _, rest = document.partition(BEGIN)
        after = rest.partition(END)[2]
        DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
