"""LoRA adapters beside the same model with the adapter merged into its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from support.models.adapters import ALL, as_gguf, make_peft, merge
from support.models.checkpoints import make_decoder
from support.models.gguf_files import pack_as, write_gguf
from support.needs import needs_library
from support.rings.stage_chain import (
    CPU,
    Rows,
    StageChain,
    batch_of,
    even_split,
    probed,
    random_prompt,
)
from torch import Tensor

from shardnet.checkpoint.adapters.layer_files import layer_file, open_adapter, read_layer_file
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.linear import KernelChoice
from shardnet.slot_operations import AdapterUse
from shardnet.stage.adapters.adapted_linear import LoadedAdapter
from shardnet.stage.load import load_stage
from shardnet.stage.runs import Run, sampled_rows
from shardnet.stage.stage_model import StageModel
from shardnet.types import DType, LayerRange

Uses = Mapping[int, tuple[AdapterUse, ...]]
PROMPTS = [random_prompt(n, 300, seed=n) for n in (9, 5, 33)]


def loaded(name: str, path: Path, base: Path, scratch: Path) -> LoadedAdapter:
    """An adapter as a stage gets it: through the files of its layers."""
    config = Checkpoint.open(base).config
    adapter = open_adapter(path, config)
    layers = {}
    for layer in adapter.pairs:
        file = scratch / f"{name}-{layer}.safetensors"
        file.write_bytes(layer_file(adapter.read(layer))[0])
        layers[layer] = read_layer_file(file)
    return LoadedAdapter(adapter_id=name, layers=layers)


class AdaptedChain(StageChain):
    """The stages of a model with adapters; `uses` says which slot has which."""

    def __init__(self, stages: Sequence[StageModel]) -> None:
        super().__init__(stages)
        self.uses: Uses = {}

    @classmethod
    def of(
        cls,
        base: Path,
        ranges: Sequence[LayerRange],
        adapters: Sequence[LoadedAdapter],
        choice: KernelChoice | None = None,
    ) -> AdaptedChain:
        return cls(
            [
                load_stage(
                    Checkpoint.open(base),
                    layers,
                    choice=choice or probed(CPU, DType.FLOAT32, None),
                    device=CPU,
                    room_blocks=64,
                    progress=lambda done, total: None,
                    adapters=[
                        LoadedAdapter(
                            adapter_id=each.adapter_id,
                            layers={n: each.layers[n] for n in layers if n in each.layers},
                        )
                        for each in adapters
                    ],
                )
                for layers in ranges
            ]
        )

    def step(self, *groups: Rows, hidden: Tensor | None = None) -> Tensor:
        batch = batch_of(groups)
        uses = tuple(self.uses.get(rows.slot, ()) for rows in groups)
        for stage in self.stages:
            hidden = stage.run_alone(Run(batch=batch, hidden=hidden, adapters=uses))
            assert stage.adapters.rows == ()  # what is computed without a step has none
        assert hidden is not None
        return self.stages[-1].logits(sampled_rows(hidden, batch))


def one_by_one(chain: AdaptedChain, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """What each prompt gives when no other sequence is there."""
    results, uses = [], chain.uses
    for slot, prompt in enumerate(prompts):
        chain.uses = {0: uses.get(slot, ())}
        results += chain.generate([prompt], 6)
    return results


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_an_adapter_gives_what_the_merged_model_gives(
    family: str, n_stages: int, tmp_path: Path
) -> None:
    base = make_decoder(tmp_path / "base", family, seed=1)
    targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if family == "phi3" else ALL
    patterns = {"down_proj": 3, targets[0]: 7}
    adapter = make_peft(
        tmp_path / "adapter",
        base,
        targets=targets,
        ranks=patterns,
        use_rslora=n_stages == 2,
        alpha_pattern={"o_proj": 5.0},
    )
    merged = merge(base, adapter, tmp_path / "merged")
    ranges = even_split(4, n_stages)
    ours = AdaptedChain.of(base, ranges, [loaded("a", adapter, base, tmp_path)])
    ours.uses = dict.fromkeys(range(3), (AdapterUse(adapter_id="a", scale=1.0),))
    expected = StageChain.load(merged, ranges).generate(PROMPTS, 6)
    plain = StageChain.load(base, ranges).generate(PROMPTS, 6)
    for logits, want, without in zip(ours.generate(PROMPTS, 6), expected, plain, strict=True):
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-3)
        assert (logits.argmax(-1) == want.argmax(-1)).all()
        assert (logits - without).abs().max() > 0.01, "the adapter changes nothing"


@pytest.mark.parametrize(
    ("dtype", "quant"),
    [
        (DType.FLOAT32, None),
        (DType.BFLOAT16, None),
        pytest.param(DType.FLOAT32, Quantization.INT8, marks=needs_library),
    ],
    ids=["float32", "bfloat16", "int8"],
)
def test_in_one_batch_each_is_as_alone(
    dtype: DType, quant: Quantization | None, tmp_path: Path
) -> None:
    base = make_decoder(tmp_path / "base", "llama", seed=2, dtype=torch.bfloat16)
    adapters = [
        loaded("a", make_peft(tmp_path / "a", base, seed=1), base, tmp_path),
        loaded("b", make_peft(tmp_path / "b", base, seed=2, targets=ALL[:2]), base, tmp_path),
    ]
    choice = probed(CPU, dtype, DType.BFLOAT16, quant)
    ranges = even_split(4, 2)
    together = AdaptedChain.of(base, ranges, adapters, choice)
    a, b = AdapterUse(adapter_id="a", scale=1.0), AdapterUse(adapter_id="b", scale=0.5)
    together.uses = {0: (a,), 2: (b,), 3: (a, b)}
    prompts = [*PROMPTS, random_prompt(7, 300, seed=70)]
    logits = together.generate(prompts, 6)
    for got, alone in zip(logits, one_by_one(together, prompts), strict=True):
        assert torch.equal(got, alone)
    [without] = StageChain.load(base, ranges, choice).generate([prompts[1]], 6)
    assert torch.equal(logits[1], without)


@needs_library
def test_an_adapter_beside_a_quantised_model(tmp_path: Path) -> None:
    """It adds what it adds to the dequantised model; rows have the same bits in any batch."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    base = make_decoder(tmp_path / "base", "llama", seed=4, **sizes)
    adapter = make_peft(tmp_path / "adapter", base)
    pack = pack_as(GGMLQuantizationType.Q8_0)
    quantised = write_gguf(base, tmp_path / "q8.gguf", pack=pack)
    ranges = even_split(4, 2)
    ours = AdaptedChain.of(quantised, ranges, [loaded("a", adapter, base, tmp_path)])
    [without, *plain] = ours.generate(PROMPTS, 6)
    ours.uses = {0: (AdapterUse(adapter_id="a", scale=1.0),)}
    [adapted, *rest] = ours.generate(PROMPTS, 6)
    assert torch.equal(adapted, one_by_one(ours, PROMPTS[:1])[0])
    assert all(torch.equal(got, want) for got, want in zip(rest, plain, strict=True))
    merged = StageChain.load(merge(base, adapter, tmp_path / "merged"), ranges)
    n_prompt = len(PROMPTS[0])
    want = merged.prefill(0, PROMPTS[0])
    error, effect = adapted[:n_prompt] - want, without[:n_prompt] - want
    assert error.square().mean() < 0.01 * effect.square().mean()


def test_a_gguf_adapter_is_the_same_one(tmp_path: Path) -> None:
    base = make_decoder(tmp_path / "base", "llama", seed=3)
    adapter = make_peft(tmp_path / "adapter", base, rank=8)
    config = Checkpoint.open(base).config
    peft, gguf = (
        open_adapter(path, config)
        for path in (adapter, as_gguf(adapter, base, tmp_path / "adapter.gguf"))
    )
    for layer in range(4):
        assert layer_file(peft.read(layer)) == layer_file(gguf.read(layer))
