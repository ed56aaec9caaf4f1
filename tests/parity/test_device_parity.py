"""Whole stages on a device of the kernel text: logits have the bits of the compiled library."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import DEVICE, HAS_VECTORS, HOST, HostOnce, compared, device_of
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.rings import stage_chain
from support.rings.stage_chain import StageChain, even_split, random_prompt
from support.soak import cases

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import ConfigurationError
from shardnet.model.config.panel_form import Quantization
from shardnet.model.devices import bits, device_attention
from shardnet.model.devices.device_layers import Device, DeviceLayers
from shardnet.model.drivers import driver as drivers
from shardnet.model.drivers.driver import Driver
from shardnet.model.kernels.linear import probe
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.native_attention import AttentionKind
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.types import Arith, DType, StateId

pytestmark = compared
PROMPTS = [random_prompt(length, 300, seed=length) for length in (5, 150)]
USUAL = [
    *("qwen3-windows-host", "gemma2-host", "gpt_oss-host", "qwen2_moe-host", "ernie4_5_moe-host"),
    *("glm4_moe-groups-host", f"qwen2-windows-{DEVICE}"),
    *("qwen3_5_moe_text-host", "nemotron_h-host", "falcon_h1-host", f"lfm2-{DEVICE}"),
    *("deepseek_v2-host", "mistral4-host", "youtu-host", "mistral3-ministral3-host"),
    *("hy_v4-host", "deepseek_v32-host", "glm_moe_dsa-host"),
    *("kimi_linear-ranks-host", "bailing_hybrid-host", "glm5_next_text-host"),
    *("qwen4_exp_text-host", "deepseek_v4-host"),
]
SLIDING = "sliding_attention"
CHOSEN, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
ALL = [f"{case}-{kind}" for case in CASES for kind in (HOST, DEVICE)]


@pytest.mark.parametrize("case", cases(USUAL, [case for case in ALL if case not in USUAL]))
def test_a_stage_on_a_device_has_the_librarys_bits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the text does not compute of a family the library does: the words are the same.

    Weights have 4 bits, by OpenCL 8 in the usual form: its compiler takes 2 s for a text.
    """
    name, _, kind = case.rpartition("-")
    folder = make_decoder(tmp_path, name.split("-")[0], **CASES[name])
    n_layers = Checkpoint.open(folder).config.n_layers
    of_4_bits = kind == HOST or case not in USUAL  # those of 8 bits are beside them: texts more
    quantization = Quantization.INT4 if of_4_bits else Quantization.INT8
    choice = probe(torch.device("cpu"), DType.FLOAT32, None, quantization, arith=Arith.PORTABLE)
    whole = StageChain.load(folder, even_split(n_layers, 1), choice).generate(PROMPTS, 3)
    device = device_of(kind)
    monkeypatch.setattr(stage_chain, "load_stage", functools.partial(load_stage, on=device))
    monkeypatch.setattr(device_attention, "_ENOUGH_GROUPS", 64)  # rows of prompts go together
    chain = StageChain.load(folder, even_split(n_layers, 2), choice)
    before, compute = device.driver.n_launches, DeviceLayers.__call__
    left: list[object] = []  # to the host, of a stage that the text computes

    def computed(self: DeviceLayers, *step: Any) -> torch.Tensor | None:
        whole = compute(self, *step)
        left.extend([] if whole is not None else [self])
        return whole

    monkeypatch.setattr(DeviceLayers, "__call__", computed)
    found = chain.generate(PROMPTS, 3)
    assert not left
    for logits, expected in zip(found, whole, strict=True):
        assert torch.equal(logits, expected)
    are_computed = [bool(stage.choice.by_text) for stage in chain.stages]
    assert case not in USUAL or all(are_computed) or not HAS_VECTORS
    assert any(are_computed) == (device.driver.n_launches > before)
    if case in USUAL and are_computed[0]:
        _count(chain.stages[0], device.driver)


def _count(first: StageModel, driver: Driver) -> None:
    """Hold a decode step to 12 launches a layer, 22 with experts, and to one wait."""
    first.kv.clear()
    before = driver.n_launches, driver.n_waits
    for position in range(2):
        rows = stage_chain.Rows(slot=1, position=position, ids=[7], n_sampled=0)
        first.forward(stage_chain.batch_of([rows]), None)
    most = 22 if first.routing else 12
    most += 6 if first.config.family == "falcon_h1" else 0  # two mixers in a layer
    most += 8 if first.config.latent or first.config.compressed else 0
    most += 4 if first.config.indexer else 0
    most += 10 if first.config.streams else 0
    most += 3 if first.config.ngrams else 0  # in half of the layers
    most = most * len(first.layers) + 1  # a norm before them
    assert driver.n_launches - before[0] <= 2 * most
    assert driver.n_waits - before[1] == 2


@pytest.mark.parametrize("each", [1, 2], ids=["all stages", "every other stage"])
@pytest.mark.parametrize("name", ["hy_v4", "glm_moe_dsa", "glm5_next_text", "qwen4_exp_text-plain"])
def test_streams_and_choices_have_the_same_bits_at_every_split(
    name: str, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers take the choice of a layer before, of another stage, which may be the host's."""
    streams = {"hc_count": 4} if name.startswith("qwen4") else {}
    folder = make_decoder(tmp_path, name.split("-")[0], **CASES[name] | streams)
    choice = probe(torch.device("cpu"), DType.FLOAT32, None, arith=Arith.PORTABLE)
    n_layers = Checkpoint.open(folder).config.n_layers
    expected = StageChain.load(folder, even_split(n_layers, 1), choice).generate(PROMPTS, 3)
    on, turn = device_of(HOST), itertools.count()

    def load(*args: Any, **more: Any) -> StageModel:
        return load_stage(*args, **more, on=None if next(turn) % each else on)

    monkeypatch.setattr(stage_chain, "load_stage", load)
    for n_stages in (n_layers, 1):
        chain = StageChain.load(folder, even_split(n_layers, n_stages), choice)
        found = chain.generate(PROMPTS, 3)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert n_stages == 1 or chain.stages[0].choice.by_text or not HAS_VECTORS


@pytest.mark.parametrize("kind", [DEVICE, "(THREADS - 1 - (i))"])
def test_blocks_and_n_grams_have_the_same_bits_in_any_order(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are turned by other numbers on each axis, as behind pictures."""
    on = functools.partial(load_stage, on=device_of(kind))
    sizes = {"num_hidden_layers": 2, "ple_layer_ids": [1]}
    folder = make_decoder(tmp_path, "qwen4_exp_text", **CASES["qwen4_exp_text"] | sizes)

    def turned(step: ForwardStep) -> torch.Tensor:
        return torch.stack([step.positions, step.positions // 3, step.positions + 40])

    choice = probe(torch.device("cpu"), DType.FLOAT32, None, arith=Arith.PORTABLE)
    plain = StageChain.load(folder, even_split(2, 1), choice).generate(PROMPTS, 3)
    monkeypatch.setattr(ForwardStep, "rotary_positions", property(turned))
    expected = StageChain.load(folder, even_split(2, 1), choice).generate(PROMPTS, 3)
    assert not torch.equal(plain[1], expected[1])
    monkeypatch.setattr(stage_chain, "load_stage", on)
    chain = StageChain.load(folder, even_split(2, 1), choice)
    found = chain.generate(PROMPTS, 3)
    assert chain.stages[0].choice.by_text or not HAS_VECTORS
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("length", [60, 64])
def test_chunks_of_attention_have_the_librarys_bits(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Llama 4's chunks, in a model that the text computes whole: those of 2^n positions."""
    folder = make_decoder(tmp_path, "qwen3", **CASES["qwen3-windows"] | {"sliding_window": length})
    plain = AttentionKind.of
    chunks = classmethod(lambda _, *of: replace(plain(*of), are_chunks=True))
    choice = probe(torch.device("cpu"), DType.FLOAT32, None, arith=Arith.PORTABLE)
    windows = StageChain.load(folder, even_split(4, 1), choice).generate(PROMPTS, 3)
    monkeypatch.setattr(AttentionKind, "of", chunks)
    expected = StageChain.load(folder, even_split(4, 1), choice).generate(PROMPTS, 3)
    monkeypatch.setattr(
        stage_chain, "load_stage", functools.partial(load_stage, on=device_of(HOST))
    )
    chain = StageChain.load(folder, even_split(4, 1), choice)
    found = chain.generate(PROMPTS, 3)
    assert bool(chain.stages[0].choice.by_text) == (length == 64 and HAS_VECTORS)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(expected[1], windows[1])


@pytest.mark.parametrize("name", ["qwen3", "hy_v4"])
def test_the_host_may_compute_any_step_in_between(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values go to and fro, those of slots that are copied, rewound and adopted too.

    Beside latents values are what positions are chosen by.
    """
    folder = make_decoder(tmp_path, name, **CASES[name] | {"hidden_size": 36})
    choice = probe(torch.device("cpu"), DType.FLOAT32, None, arith=Arith.PORTABLE)
    n_layers = Checkpoint.open(folder).config.n_layers
    expected = _script(StageChain.load(folder, even_split(n_layers, 1), choice), lambda _: None)
    monkeypatch.setattr(
        stage_chain, "load_stage", functools.partial(load_stage, on=device_of(HOST))
    )
    chain = StageChain.load(folder, even_split(n_layers, 1), choice)
    [stage] = chain.stages
    family: Any = stage.family
    layers = family._on_device

    def leave_to_host(step: int) -> None:
        family._on_device = None if step % 3 == 1 else layers

    found = _script(chain, leave_to_host)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _script(chain: StageChain, before: Any) -> list[torch.Tensor]:
    """Run steps of two slots, between which slots are copied, rewound, adopted and freed."""
    [stage] = chain.stages
    kv, found = stage.kv, []

    def run(step: int, slot: int, position: int, ids: list[int]) -> None:
        before(step)
        rows = stage_chain.Rows(slot=slot, position=position, ids=ids, n_sampled=1)
        found.append(stage.forward(stage_chain.batch_of([rows]), None))

    prompt = random_prompt(280, 300, seed=7)
    run(0, 1, 0, prompt[:270])
    run(1, 1, 270, prompt[270:275])
    run(2, 1, 275, prompt[275:])
    kv.copy(stage_chain.SlotId(1), stage_chain.SlotId(2), 272)
    run(3, 2, 272, [5])
    run(4, 2, 273, [6, 7])
    kv.trim(stage_chain.SlotId(1), 100)
    run(5, 1, 100, prompt[100:140])
    contents = kv.contents(stage_chain.SlotId(2))
    layers = range(len(contents.keys))
    spans = [(layer, contents.first(layer), contents.end(layer)) for layer in layers]
    copied = type(contents)(
        keys=[contents.rows(*span).clone() for span in spans],
        values=[contents.rows(*span, values=True).clone() for span in spans],
        firsts=[first for _, first, _ in spans],
        states={},
    )
    kv.free(stage_chain.SlotId(2))
    kv.adopt(stage_chain.SlotId(3), copied, 2)
    for step in range(6, 10):
        run(step, 3, 269 + step, [step])
    kv.clear()
    run(10, 1, 0, prompt[:3])
    assert isinstance(stage, StageModel)
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_5_text", "lfm2", "kimi_linear-ranks", "glm5_next_text", "qwen4_exp_text"),
        "deepseek_v4",
    ],
)
def test_states_go_to_and_fro(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host computes any step; states are copied, kept, and moved."""
    folder = make_decoder(tmp_path, name.split("-")[0], **CASES[name])
    choice = probe(torch.device("cpu"), DType.FLOAT32, None, arith=Arith.PORTABLE)
    n_layers = Checkpoint.open(folder).config.n_layers
    expected = _states(StageChain.load(folder, even_split(n_layers, 1), choice), lambda _: None)
    monkeypatch.setattr(
        stage_chain, "load_stage", functools.partial(load_stage, on=device_of(HOST))
    )
    for turns in (1, 3):
        chain = StageChain.load(folder, even_split(n_layers, 1), choice)
        family: Any = chain.stages[0].family
        assert family._on_device is not None or not HAS_VECTORS
        found = _states(chain, functools.partial(_leave_to_host, family, family._on_device, turns))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


GAPS = {"sliding_window": 150, "index_head_dim": 14, "index_topk": 40}
"""Entries do not fill the columns of their positions, and windows are more than a block."""
SMALL = {"sliding_window": 3, "head_dim": 24, "compress_rates": {CHOSEN: 2, HEAVY: 64}}


@pytest.mark.parametrize(
    ("sizes", "kind"), [(GAPS, HOST), (GAPS, DEVICE), (SMALL, "(THREADS - 1 - (i))")]
)
def test_entries_have_the_librarys_bits(
    sizes: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of threads and by OpenCL, with rows of windows in this step and before it."""
    kinds = {"layer_types": [SLIDING, CHOSEN, HEAVY], "mlp_layer_types": ["moe", "hash_moe", "moe"]}
    rates = {"num_hidden_layers": 3, "compress_rates": {CHOSEN: 4, HEAVY: 128}}
    own: dict[str, Any] = {**rates, **kinds, **sizes}
    folder = make_decoder(tmp_path, "deepseek_v4", **own)
    choice = probe(torch.device("cpu"), DType.FLOAT32, None, arith=Arith.PORTABLE)
    expected = _states(StageChain.load(folder, even_split(3, 1), choice), lambda _: None)
    on = functools.partial(load_stage, on=device_of(kind))
    monkeypatch.setattr(stage_chain, "load_stage", on)
    chain = StageChain.load(folder, even_split(3, 1), choice)
    assert chain.stages[0].choice.by_text or not HAS_VECTORS
    found = _states(chain, lambda _: None)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _leave_to_host(family: Any, layers: Any, turns: int, step: int) -> None:
    """Have the host compute one of so many steps."""
    family._on_device = None if turns > 1 and step % turns == 1 else layers


def _states(chain: StageChain, before: Any) -> list[torch.Tensor]:
    """Run steps of slots that are copied, begun with kept states, rewound, and moved."""
    [stage] = chain.stages
    kv, found, slots = stage.kv, [], [stage_chain.SlotId(n) for n in range(4)]

    def run(step: int, *groups: tuple[int, int, list[int]], n_drafts: int = 0) -> None:
        before(step)
        rows = [
            stage_chain.Rows(
                slot=slot, position=position, ids=ids, n_sampled=len(ids), n_drafts=n_drafts
            )
            for slot, position, ids in groups
        ]
        found.append(stage.forward(stage_chain.batch_of(rows), None))

    prompt = random_prompt(300, 300, seed=7)
    run(0, (1, 0, prompt[:260]))
    kv.keep_state(slots[1], 260, StateId(0))
    run(1, (1, 260, prompt[260:280]), (2, 0, prompt[:3]))
    kv.copy(slots[1], slots[3], 260, StateId(0))
    run(2, (3, 260, prompt[:9]), (1, 280, [5]))
    run(3, (1, 281, [6, 7, 8]), (2, 3, [4, 5, 6]), n_drafts=2)
    run(4, (1, 282, [9]), (2, 5, [1]), (3, 269, [2]))
    flights = [list(range(n, n + 10)) for n in (10, 40, 70, 100)]
    run(5, (1, 283, flights[0]), (3, 270, [3]), n_drafts=9)
    for step, n_drafts in ((1, 19), (2, 29), (3, 25)):  # the first rows are known to be right then
        run(5 + step, (1, 283 + 10 * step, flights[step]), n_drafts=n_drafts)
    kv.copy(slots[1], slots[2], 310)  # among drafts in flight
    run(9, (1, 301, [4, 5]), (2, 310, [4, 5]), n_drafts=1)
    kv.trim(slots[2], 311)
    run(10, (1, 303, [6]), (2, 311, [6]))
    contents, moved = kv.contents(slots[1]), kv.new_contents(2)
    for layer, state in contents.states.items():
        flat = torch.empty(state.n_bytes, dtype=torch.uint8)
        state.read(flat)
        moved.states[layer].write(flat)
        moved.states[layer].end = state.end
    for layer in range(len(contents.keys)):
        rows = (layer, contents.first(layer), contents.end(layer))
        keys, values = contents.rows(*rows), contents.rows(*rows, values=True)
        moved.keys[layer][:, : keys.shape[1]] = keys
        moved.values[layer][:, : keys.shape[1]] = values
    kv.free(slots[1])
    kv.adopt(slots[0], moved, 2)
    for step in range(11, 15):
        run(step, (0, 293 + step, [step]), (3, 260 + step, [step]))
    run(15, (3, 0, prompt[:4]))
    return found


def test_latents_wider_than_a_group_of_threads_holds_are_left_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"q_lora_rank": 4097, "num_hidden_layers": 1}
    folder = make_decoder(tmp_path, "deepseek_v2", **CASES["deepseek_v2-groups"] | sizes)
    choice = probe(torch.device("cpu"), DType.FLOAT32, None, arith=Arith.PORTABLE)
    on = functools.partial(load_stage, on=device_of(HOST))
    monkeypatch.setattr(stage_chain, "load_stage", on)
    [stage] = StageChain.load(folder, even_split(1, 1), choice).stages
    assert not stage.choice.by_text


@pytest.mark.parametrize(
    ("name", "sizes", "whys"),
    [
        ("deepseek_v4", {"q_lora_rank": 4097}, ["queries of 4097 columns"]),
        ("glm5_next_text-shared", {}, ["entries of 3 positions"]),
        ("qwen4_exp_text-plain", {}, ["3 gated streams"]),
    ],
)
def test_what_a_device_leaves_to_the_host_is_named(
    name: str,
    sizes: dict[str, Any],
    whys: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_decoder(tmp_path, name.split("-")[0], **CASES[name] | sizes)
    choice = probe(torch.device("cpu"), DType.FLOAT32, None, arith=Arith.PORTABLE)
    on = functools.partial(load_stage, on=device_of(HOST))
    monkeypatch.setattr(stage_chain, "load_stage", on)
    n_layers = Checkpoint.open(folder).config.n_layers
    StageChain.load(folder, even_split(n_layers, n_layers), choice)
    said = capsys.readouterr().err
    for why in whys if HAS_VECTORS else []:
        assert f"the kernel text does not compute {why}" in said


def test_blocks_that_take_too_much_are_not_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_decoder(tmp_path, "qwen3", **CASES["qwen3"] | {"hidden_size": 36})
    choice = probe(torch.device("cpu"), DType.FLOAT32, None, arith=Arith.PORTABLE)
    device = Device(HostOnce())
    monkeypatch.setattr(stage_chain, "load_stage", functools.partial(load_stage, on=device))
    layers = even_split(Checkpoint.open(folder).config.n_layers, 1)
    spread = StageChain.load(folder, layers, choice).generate(PROMPTS, 2)
    assert device.scratch.buffers.pop("blocks") is not None
    monkeypatch.setattr(device_attention, "_MOST_BLOCK_BYTES", 0)
    whole = StageChain.load(folder, layers, choice).generate(PROMPTS, 2)
    assert "blocks" not in device.scratch.buffers
    assert all(torch.equal(one, other) for one, other in zip(whole, spread, strict=True))


@pytest.mark.parametrize("fails", ["the head", "a layer"])
def test_a_stage_whose_form_is_refused_stays_on_the_host(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers, the head, and the cache too."""
    folder = make_decoder(tmp_path, "qwen3", **CASES["qwen3"] | {"hidden_size": 36})
    choice = probe(torch.device("cpu"), DType.FLOAT32, None, arith=Arith.PORTABLE)
    layers = even_split(Checkpoint.open(folder).config.n_layers, 1)
    expected = StageChain.load(folder, layers, choice).generate(PROMPTS, 2)
    device, n_head = Device(HostOnce()), Checkpoint.open(folder).config.vocab_size
    product = device.product

    def refused(*linears: Any, **more: Any) -> Any:
        if (linears[0].shape[0] == n_head) == (fails == "the head"):
            raise ConfigurationError("other bits")
        return product(*linears, **more)

    monkeypatch.setattr(device, "product", refused)
    monkeypatch.setattr(stage_chain, "load_stage", functools.partial(load_stage, on=device))
    chain = StageChain.load(folder, layers, choice)
    [stage] = chain.stages
    kv: Any = stage.kv
    assert kv._driver is None
    assert not stage.choice.by_text
    found = chain.generate(PROMPTS, 2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_device_with_other_bits_is_a_class_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bits.error_of(Device(HostOnce())) == 0
    own = drivers.part_of_text
    exact = "exponential(ADD(SCORE(i, q), -most[q]))"
    assert exact in own("attention")
    monkeypatch.setattr(
        drivers,
        "part_of_text",
        lambda name: own(name).replace(exact, exact.replace("ADD(", "MUL(1.00001f, ADD(") + ")"),
    )
    assert 0 < bits.error_of(Device(HostOnce())) < 1e-2
