"""Parts of the report of a device that computes by the kernel text: its bits, its speed, a ring.

Everything is held against the compiled library on this machine's CPU.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from bench_steps import make_step
from check_cuda import Part
from cuda_device import Gpu

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.models.random_panels import FORMS, random_panels

from shardnet.api.client import connect
from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import Device, MemoryBudget, find_devices, make_node_id
from shardnet.cluster.node.node import listening
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.model.devices.bits import open_device
from shardnet.model.devices.device_layers import Device as TextDevice
from shardnet.model.devices.products import DeviceProduct
from shardnet.model.drivers.driver import Buffer
from shardnet.model.kernels.linear import probe
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.types import PORTABLE_ARITHMETIC, Arith, DType, LayerRange, SlotId
from shardnet.wire.messages.plans import ModelChoice

Cells = Sequence[str]
N_PROMPT = 140
"""More than a block of attention."""
CHUNK, LONG_PROMPT, N_DECODED, TOGETHER = 256, 512, 64, 8
"""Of the speeds that llama.cpp's benchmark has too, and of rows that are decoded together."""


def text_parts(found: Device, gpu: Gpu, model: str, *, is_quick: bool) -> list[Part]:
    """Return the parts for a device that `find_devices` has found, and a `model` of the owner's."""
    device = open_device(found.driver)
    models = [("the bundled model", DEFAULT_MODEL_PATH)]
    models += [("the model that was named", Path(model))] if model else []
    side = 256 if is_quick else 4096
    parts: list[Part] = [
        ("the device", partial(_device, found, device)),
        (
            "products of 64, 8 and 1 rows: bits, speed, share of a copy's",
            partial(_products, device, gpu, side),
        ),
    ]
    parts += [(title, partial(_model, device, gpu, path)) for title, path in models]
    if model and shutil.which("llama-bench"):
        parts.append(("llama.cpp with that model", partial(_llama, model)))
    parts.append(("a ring of this device and the CPU", partial(_ring, found)))
    return parts


def _device(found: Device, device: TextDevice) -> Iterator[Cells]:
    is_same = found.arithmetic == PORTABLE_ARITHMETIC
    yield found.description, f"{device.driver.free_bytes / 2**30:.1f} GiB"
    yield "a layer", "same bits" if is_same else f"WRONG: {found.arithmetic}"


@torch.inference_mode()
def _products(device: TextDevice, gpu: Gpu, side: int) -> Iterator[Cells]:
    """Multiply 64 rows, eight and one with every form."""
    driver, last = device.driver, torch.empty(1)
    size = gpu.scale.read_bytes // 16  # so much is read between two waits: no cache holds it
    one, other = driver.empty(size), driver.empty(size)

    def copy() -> None:
        driver.copy(one, other, size)
        driver.download(other, last.numpy())

    copy()
    rate = 2 * size / gpu.seconds(copy)
    yield "a copy", f"{rate / 1e9:.0f} GB/s read and written"
    for form in FORMS:
        panels = random_panels(form, side, side)
        n_copies = max(2, min(64, size // panels.packed.nbytes))
        products = [
            DeviceProduct(device.kernels, driver, device.scratch, [[panels]], None)
            for _ in range(n_copies)
        ]
        linear, cells = PanelLinear([panels], None), [form.name]
        for n_rows in (64, 8, 1):
            rows = torch.randn(n_rows, side, generator=torch.Generator().manual_seed(1))
            given, out = device.put(rows.numpy()), torch.empty(n_rows, side)
            taken = driver.empty(out.nbytes)
            products[0](given, n_rows, taken)
            driver.download(taken, out.numpy())
            expected = linear(rows)
            error = float((out - expected).abs().max() / expected.abs().max())
            cells += ["same bits" if torch.equal(out, expected) else f"WRONG by {error:.1g}"]

            again = driver.record(partial(_multiply, products, n_rows, given, taken))

            def whole(again: Callable[[], None] = again, out: Buffer = taken) -> None:
                again()
                driver.download(out, last.numpy())

            whole()
            reads = n_copies * panels.packed.nbytes / gpu.seconds(whole)
            cells += [f"{reads / 1e9:.0f} GB/s {reads / rate:.0%}"]
        yield cells


def _multiply(products: Sequence[DeviceProduct], n_rows: int, rows: Buffer, out: Buffer) -> None:
    for product in products:
        product(rows, n_rows, out)


@torch.inference_mode()
def _model(device: TextDevice, gpu: Gpu, path: Path) -> Iterator[Cells]:
    """Compute a model on the device and on the CPU: logits and speed."""
    logits = {}
    for name, on in (("CPU", None), ("device", device)):
        stage = _load(path, on)
        vocab = stage.vocab_size
        prompt = [7919 * place % vocab for place in range(1, N_PROMPT + 1)]
        logits[name] = [stage.forward(make_step([(0, 0, prompt)]), None)]
        logits[name].append(stage.forward(make_step([(0, N_PROMPT, [5])]), None))
        yield (
            name,
            stage.choice.name,
            *(_speeds(gpu, stage, prompt) if on else _rough(gpu, stage, prompt)),
        )
        del stage
    pairs = zip(logits["CPU"], logits["device"], strict=True)
    errors = [float((a - b).abs().max()) for a, b in pairs if not torch.equal(a, b)]
    yield "logits", f"WRONG by {max(errors):.1g}" if errors else "same bits"


def _rough(gpu: Gpu, stage: StageModel, prompt: list[int]) -> Iterator[str]:
    """Time a short prompt and a step, of a CPU that may be slow."""

    def prefill() -> None:
        stage.forward(make_step([(1, 0, prompt)]), None)
        stage.kv.free(SlotId(1))

    step = make_step([(0, len(prompt), [5])])
    yield f"prefill {len(prompt) / gpu.seconds(prefill):.0f} tokens/s"
    yield f"decode {1 / gpu.seconds(partial(stage.forward, step, None)):.1f} tokens/s"


def _speeds(gpu: Gpu, stage: StageModel, prompt: list[int]) -> Iterator[str]:
    """Time a prompt by chunks, tokens behind a short prompt, and rows together."""
    long = [prompt[place % len(prompt)] for place in range(LONG_PROMPT)]

    def prefill() -> None:
        for place in range(0, LONG_PROMPT, CHUNK):
            stage.forward(make_step([(1, place, long[place : place + CHUNK])]), None)
        stage.kv.free(SlotId(1))

    def decode() -> None:
        for place in range(16, 16 + N_DECODED):
            stage.forward(make_step([(0, place, [5])]), None)

    stage.kv.free(SlotId(0))
    prefill()
    yield f"prefill {LONG_PROMPT / gpu.seconds(prefill):.0f} tokens/s"
    stage.forward(make_step([(0, 0, prompt[:16])]), None)
    decode()
    yield f"decode {N_DECODED / gpu.seconds(decode):.1f} tokens/s"
    together = make_step((slot, 16 * (slot == 0), [slot]) for slot in range(TOGETHER))
    for _ in range(2):
        stage.forward(together, None)
    took_s = gpu.seconds(partial(stage.forward, together, None))
    yield f"{TOGETHER} at once {TOGETHER / took_s:.0f} tokens/s"


def _load(path: Path, on: TextDevice | None) -> StageModel:
    checkpoint = Checkpoint.open(path)
    device, own = torch.device("cpu"), checkpoint.config.checkpoint_dtype
    choice = probe(device, own or DType.FLOAT32, own, arith=Arith.PORTABLE)
    hidden = own if own is DType.BFLOAT16 else None
    return load_stage(
        checkpoint,
        LayerRange(0, checkpoint.config.n_layers),
        choice=replace(choice, hidden_dtype=hidden),
        device=device,
        room_blocks=2 * TOGETHER,
        context=1024,
        progress=lambda done, total: None,
        on=on,
    )


def _llama(model: str) -> Iterator[Cells]:
    command = ["llama-bench", "-m", model, "-p", str(LONG_PROMPT), "-n", str(N_DECODED)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    for line in told.stdout.splitlines():
        if "t/s" in line or "±" in line:
            yield tuple(cell.strip() for cell in line.split("|") if cell.strip())


def _ring(found: Device) -> Iterator[Cells]:
    """Have two nodes of this process say a text: the CPU alone, then a ring with the device."""
    texts = asyncio.run(_texts(found))
    is_same = texts[0] == texts[1]
    yield "the same words", "yes" if is_same else "WRONG: no", repr(texts[1][:40])


async def _texts(found: Device) -> list[str]:
    [cpu], texts = find_devices("cpu"), []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)

        def settings(device: Device) -> NodeSettings:
            return NodeSettings(
                node=make_node_id(),
                name=device.kind,
                budget=MemoryBudget(device=device, asked_bytes=2 << 30),
                threads=1,
                peers=(),
                local_nodes=LocalNodes(place),
                cache=place,
                models=ModelCache(place),
                log=lambda line: None,
            )

        async with (
            asyncio.timeout(120),
            listening(settings(cpu), "127.0.0.1", 0) as one,
            listening(settings(found), "127.0.0.1", 0) as other,
            connect(one.address) as client,
        ):
            for nodes in ([one.address], [one.address, other.address]):
                choice = ModelChoice(
                    model=str(DEFAULT_MODEL_PATH), nodes=nodes, arith="portable", threads=1
                )
                [answer] = await client.complete(["It is a truth"], model=choice, max_tokens=40)
                texts.append(answer.text)
    return texts
