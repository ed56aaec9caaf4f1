"""GPUs of other makes, simulated: Apple's without float64 and CUDA, AMD's as torch shows it.

Stages compute with torch's operators there. That real kernels compute the same is not shown.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.rings.stage_chain import StageChain, even_split, random_prompt
from support.simulated_device import simulated_device
from support.soak import cases

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.panel_form import GGUF_FORMS, NVFP4, Code, PanelForm, Quantization, Scale
from shardnet.model.kernels import panel_linear
from shardnet.model.kernels.linear import Kernel, PlainLinear, linear_of_panels, probe
from shardnet.model.kernels.panels import Panels, unpack_whole
from shardnet.model.sampling.sampler import Sampler, SampleRow
from shardnet.sampling_params import SamplingParams
from shardnet.types import DType, KvDType

MPS, ROCM = torch.device("mps"), torch.device("cuda")
PROMPTS = [random_prompt(length, 300, seed=length) for length in (5, 40)]
FP8 = PanelForm(name="FP8", bits=8, group=128, scale=Scale.FLOAT32, code=Code.E5M2)
USUAL = ["llama4_text", "qwen3_5_text"]


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every function of torch.cuda fail, as most do where torch was built without."""

    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError("a function of torch.cuda was called")

    for name, value in vars(torch.cuda).items():
        if callable(value) and not isinstance(value, type) and not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, refuse)


@pytest.mark.parametrize("case", cases(USUAL, [case for case in CASES if case not in USUAL]))
def test_a_stage_computes_without_cuda_and_float64(
    case: str, tmp_path: Path, no_cuda: None
) -> None:
    folder = make_decoder(tmp_path, case.split("-")[0], **CASES[case])
    n_layers = Checkpoint.open(folder).config.n_layers
    whole = StageChain.load(folder, even_split(n_layers, 1)).generate(PROMPTS, 3)
    with simulated_device(torch.float64):
        choice = probe(MPS, DType.FLOAT32, None)
        assert choice.kernel is Kernel.PLAIN
        chain = StageChain.load(folder, even_split(n_layers, 2), choice, device=MPS)
        found = [logits.cpu() for logits in chain.generate(PROMPTS, 3)]
    for logits, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", [MPS, ROCM], ids=str)
def test_quantised_weights_and_keys_stay_on_the_device(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator takes tensors of the CPU among those of the device."""
    monkeypatch.setenv("SHARDNET_GRAPHS", "off")  # what captures them cannot be simulated
    monkeypatch.setattr(panel_linear, "native_kernels", lambda: None)  # it rounds rows to int8 too
    folder = make_decoder(tmp_path, "llama")
    found = {}
    for place in (torch.device("cpu"), device):
        with simulated_device(torch.float64):
            choice = probe(place, DType.FLOAT32, None, Quantization.INT8)
            layers = even_split(Checkpoint.open(folder).config.n_layers, 2)
            chain = StageChain.load(folder, layers, choice, kv_dtype=KvDType.INT8, device=place)
            found[place] = chain.generate(PROMPTS, 2)[1].cpu()
    torch.testing.assert_close(*found.values(), atol=1e-4, rtol=1e-4)


def test_stored_forms_are_read_without_float8() -> None:
    """Apple's GPUs have none: their values, and those of books, come from tables made once."""
    forms = [NVFP4, GGUF_FORMS["MXFP4"], GGUF_FORMS["IQ4_XS"], GGUF_FORMS["Q4_K"], FP8]
    for form in forms:
        codes = torch.randint(256, form.packed_shape(32, 256), generator=torch.Generator(),
                              dtype=torch.uint8)  # fmt: skip
        panels = Panels(packed=codes, form=form, shape=(32, 256))
        expected = unpack_whole([panels], torch.bfloat16)
        with simulated_device(torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
            choice = probe(MPS, DType.BFLOAT16, None)
            linear = linear_of_panels(choice, [panels.to(MPS)], None)
            assert isinstance(linear, PlainLinear)
            assert torch.equal(linear.weights[0].cpu().nan_to_num(), expected.nan_to_num())


def test_a_device_computes_in_what_it_computes_right() -> None:
    """One without bfloat16 computes in float32, and rounds where the ring does."""
    with simulated_device(torch.float64, torch.bfloat16):
        choice = probe(MPS, DType.BFLOAT16, DType.BFLOAT16)
        assert (choice.dtype, choice.hidden_dtype) == (DType.FLOAT32, DType.BFLOAT16)
        assert probe(MPS, DType.FLOAT16, None).dtype is DType.FLOAT16


def test_tokens_are_drawn_without_float64_on_the_device() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    kinds: list[Callable[[], SamplingParams]] = [
        SamplingParams,
        lambda: SamplingParams(temperature=0.8, top_k=20, top_p=0.9, n_logprobs=3),
        lambda: SamplingParams(temperature=1.5, min_p=0.1, seed=7, repetition_penalty=1.3),
    ]
    rows = [SampleRow(params=kind(), position=9) for kind in kinds]
    expected = Sampler(50).sample(logits, rows)
    with simulated_device(torch.float64):
        assert Sampler(50).sample(logits.to(MPS), rows) == expected


def test_the_simulated_device_refuses_what_a_real_one_does() -> None:
    with simulated_device(torch.float64):
        rows = torch.ones(3, 4, device=MPS)
        with pytest.raises(TypeError, match=r"mps has no torch\.float64"):
            rows.double()
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            rows + torch.ones(3, 4)
