"""The kernel text compiles for GPUs that are not here, and spills hardly a register.

Their driver is held against functions of the maker that are not here either.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.models.random_panels import FORMS
from support.soak import cases

from shardnet.cluster.machine.profile import find_devices
from shardnet.errors import CapacityError, ConfigurationError
from shardnet.files import made_once
from shardnet.model.config.panel_form import PanelForm
from shardnet.model.devices.device_attention import ATTENTION_PARTS, ENTRIES, attention_macros
from shardnet.model.devices.device_choice import CHOICE_PARTS
from shardnet.model.devices.device_entries import ENTRY_PARTS
from shardnet.model.devices.device_layers import LAYER_PARTS
from shardnet.model.devices.device_recurrence import STATE_PARTS
from shardnet.model.devices.device_streams import STREAM_PARTS
from shardnet.model.devices.products import PRODUCT_PARTS, ROWS, form_macros
from shardnet.model.drivers import gpu, opencl
from shardnet.model.drivers.driver import part_of_text, whole_text
from shardnet.model.drivers.gpu import CUDA, HIP, GpuDriver, Maker, compiled
from shardnet.model.drivers.opencl import OpenClDriver

NVIDIA = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
AMD = ("gfx900", "gfx1030", "gfx1100")
CLANG = next(
    filter(None, (shutil.which(f"clang{n}") for n in ("", "-19", "-17", "-16", "-14"))), ""
)


def texts(dialect: str, forms: list[PanelForm]) -> list[str]:
    """Return the texts of layers and of products with `forms`."""
    macros = [form_macros(form, rows) for form in forms for rows in (0, *ROWS)]
    products = [whole_text(dialect, each, *PRODUCT_PARTS) for each in macros]
    attention = [attention_macros(*each) for each in ((1, 64, 64), (8, 256, 256), (4, 576, 512))]
    attention += [attention_macros(64, 576, 512, 0), attention_macros(8, 256, 256, 0, stride=326)]
    attention += [attention_macros(64, 512, 512, 0) | {"CHOSEN": ENTRIES}]
    looks = [whole_text(dialect, each, *ATTENTION_PARTS) for each in attention]
    layers = [whole_text(dialect, {}, *parts) for parts in (LAYER_PARTS, STATE_PARTS, ENTRY_PARTS)]
    layers += [whole_text(dialect, {"STREAMS": n}, *STREAM_PARTS) for n in (4, 14)]
    layers += [whole_text(dialect, {"SIZE": 128}, *CHOICE_PARTS)]
    return [*layers, *looks, *products]


@pytest.mark.parametrize("architecture", cases(["sm_75"], [*NVIDIA[1:]]))
def test_nvidias_compiler_takes_all_texts(architecture: str) -> None:
    """NVRTC needs no GPU: pip install 'shardnet[nvidia]'."""
    forms = [*cases([form for form in FORMS if form.name in ("Q4_K", "NF4")], FORMS)]
    for text in texts(CUDA.dialect, forms):
        try:
            code, log = compiled(CUDA, text, architecture, ["--ptxas-options=-v"])
        except ConfigurationError as error:
            if "is not installed" in error.message:
                pytest.skip("no NVRTC here")
            raise
        assert code
        spilled = [int(n_bytes) for n_bytes in re.findall(r"(\d+) bytes spill", log)]
        assert max(spilled, default=0) <= 16  # of a thread; some compilers say nothing


@pytest.mark.skipif(not CLANG, reason="no clang here")
@pytest.mark.parametrize("architecture", cases(["gfx1030"], [n for n in AMD if n != "gfx1030"]))
def test_clang_takes_all_texts_for_amd(architecture: str, tmp_path: Path) -> None:
    forms = [*cases([form for form in FORMS if form.name in ("Q4_K", "NF4")], FORMS)]
    command = [CLANG, "-x", "hip", "-std=c++17", "-O3", "-ffp-contract=off", "-w", "-nogpuinc"]
    command += ["-nogpulib", "--cuda-device-only", f"--offload-arch={architecture}"]
    command += ["-S", "-o", "-", "-"]
    for text in texts("hip", forms):
        found = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr[:2000]
        # Scalars that find no register of their own lie in vector registers: memory is what costs.
        spilled = re.findall(
            r"(?:vgpr_spill_count|private_segment_fixed_size): +(\d+)", found.stdout
        )
        assert spilled
        assert set(spilled) == {"0"}


@pytest.mark.parametrize("name", ["nvidia:3", "amd:0", "opencl:7", "metal"])
def test_a_gpu_that_is_not_here_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--device {name.partition(':')[0]}") as raised:
        find_devices(name)
    assert raised.value.remedy


class _Cuda:
    """NVIDIA's functions as far as they tell of a stream that records, with its codes."""

    def __init__(self) -> None:
        self.recording: int | None = None
        self.graphs: set[int] = set()
        self.uploaded: list[int] = []
        self.fails = ""
        self.capability = (8, 9)
        self.version = (13, 0)
        self.loaded: list[bytes] = []
        self.launched: list[str] = []
        self.n_free = 4 << 30

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: int(name == self.fails)  # 1: an invalid value

    def __getitem__(self, name: str) -> Callable[..., int]:
        found: Callable[..., int] = getattr(self, name)
        return found

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def cuStreamBeginCapture_v2(self, *_: object) -> int:
        self.recording = threading.get_ident()
        return 0

    def cuStreamEndCapture(self, _: object, graph: Any) -> int:
        self.recording = None
        graph._obj.value = 1 + len(self.graphs)
        self.graphs.add(graph._obj.value)
        return 0

    def cuGraphDestroy(self, graph: ctypes.c_void_p) -> int:
        self.graphs.remove(graph.value or 0)
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, _: object) -> int:
        value._obj.value = self.capability[number - 75]
        return 0

    def nvrtcVersion(self, *numbers: Any) -> int:
        for number, own in zip(numbers, self.version, strict=True):
            number._obj.value = own
        return 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        self.loaded.append(code)
        return 0

    def cuLaunchKernel(self, *_: object) -> int:
        self.launched.append("alone")
        return 0 if self.recording in (None, threading.get_ident()) else 901

    def cuLaunchKernelEx(self, launch: Any, *_: object) -> int:
        own = launch._obj
        assert [(one.kind, one.value[0]) for one in own.attributes[: own.n_attributes]] == [(6, 1)]
        self.launched.append(f"{[*own.groups]} of {[*own.threads]} threads")
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: object) -> int:
        free._obj.value = self.n_free
        return 0

    def cuMemcpyHtoDAsync_v2(
        self, _: object, source: ctypes.c_void_p, n_bytes: ctypes.c_size_t, stream: object
    ) -> int:
        self.uploaded.append(n_bytes.value)
        return 0 if self.recording is None else 906


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    library = _Cuda()
    monkeypatch.setattr(gpu, "_library", lambda _: library)
    return library


@pytest.mark.parametrize(
    ("at", "maker"),
    [
        ("site/nvidia/cuda_nvrtc/bin/nvrtc64_120_0.dll", CUDA),
        ("site/nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll", CUDA),
        ("site/torch/lib/nvrtc64_112_0.dll", CUDA),
        ("kit/bin/x64/nvrtc64_130_0.dll", CUDA),
        ("windows/System32/hiprtc0602.dll", HIP),
        ("kit/bin/hiprtc0701.dll", HIP),
    ],
)
def test_windows_compilers_are_found_with_what_they_load_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, maker: Maker
) -> None:
    """In packages of pip's, beside torch, in a maker's kit and where drivers put them."""
    library = tmp_path / at
    library.parent.mkdir(parents=True)
    builtins = library.parent / library.name.replace("rtc", "rtc-builtins", 1)
    other = library.with_name(f"{library.stem}.alt.dll")
    for path in (library, builtins, other):
        path.touch()
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "kit"))
    monkeypatch.setenv("HIP_PATH", str(tmp_path / "kit"))
    monkeypatch.setenv("SYSTEMROOT", str(tmp_path / "windows"))
    opened: list[str] = []

    def load(place: str) -> str:
        if not Path(place).is_file():
            raise OSError
        opened.append(place)
        return place

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(gpu.torch, "__file__", str(tmp_path / "site" / "torch" / "__init__.py"))
    monkeypatch.setattr(sys, "platform", "win32")
    added: list[str] = []
    monkeypatch.setattr(os, "add_dll_directory", added.append, raising=False)
    assert gpu._library.__wrapped__(maker.compiler) == str(library)
    assert opened == [str(builtins), str(library)]
    assert added == [str(library.parent)]


@pytest.mark.parametrize("maker", [CUDA, HIP])
@pytest.mark.parametrize(("platform", "ending"), [("win32", ".dll"), ("linux", ".so")])
def test_errors_name_the_library_of_this_system(
    monkeypatch: pytest.MonkeyPatch, maker: Maker, platform: str, ending: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(gpu, "_library", lambda _: None)
    with pytest.raises(ConfigurationError, match=ending) as raised:
        compiled(maker, "", "")
    assert raised.value.remedy == maker.compiler_remedy
    with pytest.raises(ConfigurationError, match=f"{ending}.* finds no GPU") as raised:
        GpuDriver(maker, 0)
    assert raised.value.remedy == maker.driver_remedy


def test_on_windows_the_desktop_keeps_some_memory(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = GpuDriver(CUDA, 0)
    assert driver.free_bytes == cuda.n_free
    monkeypatch.setattr(sys, "platform", "win32")
    assert driver.free_bytes == cuda.n_free - (512 << 20)
    cuda.n_free = 1000
    assert driver.free_bytes == 0


def test_what_other_threads_launch_and_upload_is_in_no_graph(cuda: _Cuda) -> None:
    driver, failed = GpuDriver(CUDA, 0), []
    buffer, numbers = driver.empty(64), np.zeros(16, np.float32)
    begun = threading.Event()

    def load() -> None:
        begun.wait(10)
        try:
            driver.launch(None, (1, 1), [])
            driver.upload(buffer, numbers)
        except ConfigurationError as error:
            failed.append(error.message)

    def run() -> None:
        begun.set()
        loading.join(0.1)  # it waits meanwhile
        driver.launch(None, (1, 1), [])

    loading = threading.Thread(target=load)
    loading.start()
    again = driver.record(run)
    loading.join(10)
    assert not failed
    assert driver.n_launches == 1
    again()
    assert driver.n_launches == 2


@pytest.mark.parametrize(
    ("capability", "launched"),
    [((8, 9), "alone"), ((9, 0), "[7, 3, 1] of [256, 1, 1] threads"), ((12, 0), "[7, 3, 1] of ")],
)
def test_launches_overlap_where_kernels_wait_for_each_other(
    cuda: _Cuda, capability: tuple[int, int], launched: str
) -> None:
    cuda.capability = capability
    GpuDriver(CUDA, 0).launch(None, (7, 3), [])
    [found] = cuda.launched
    assert found.startswith(launched)


def test_what_was_compiled_is_kept_for_the_next_process(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled_texts: list[str] = []

    def compile_text(maker: object, text: str, architecture: str) -> tuple[bytes, str]:
        compiled_texts.append(f"{text} for {architecture}")
        return f"code of {text}".encode(), ""

    monkeypatch.setattr(gpu, "compiled", compile_text)
    folder = tmp_path / "new" / "kernels"
    keep = partial(made_once, folder)
    for text in ("one", "two", "one"):
        GpuDriver(CUDA, 0, keep).compile(text, ["kernel"])
    assert compiled_texts == ["one for sm_89", "two for sm_89"]
    assert cuda.loaded == [b"code of one", b"code of two", b"code of one"]
    cuda.version = (13, 1)
    GpuDriver(CUDA, 0, keep).compile("one", [])
    assert len(compiled_texts) == 3
    for path in folder.iterdir():  # half a file
        path.write_bytes(path.read_bytes()[:-1])
    GpuDriver(CUDA, 0, keep).compile("one", [])
    assert len(compiled_texts) == 4
    assert cuda.loaded[-1] == b"code of one"
    GpuDriver(CUDA, 0).compile("one", [])
    assert len(compiled_texts) == 5


def test_every_kernel_waits_for_the_launch_before() -> None:
    for name in ("attention", "experts", "linear", "many", "rows", "states", "streams", "choice"):
        text = part_of_text(name)
        kernels = re.split(r"^(?:    )?(?:KERNEL|MULTIPLY) ", text, flags=re.MULTILINE)[1:]
        assert kernels, name
        for kernel in kernels:
            assert "AWAIT" in kernel or kernel.startswith("multiply("), kernel[:60]


def test_a_recording_that_fails_leaves_no_graph(cuda: _Cuda) -> None:
    driver = GpuDriver(CUDA, 0)

    def run() -> None:
        driver.launch(None, (1, 1), [])
        raise ValueError("of a kernel")

    with pytest.raises(ValueError, match="of a kernel"):
        driver.record(run)
    assert (cuda.recording, cuda.graphs, driver.n_launches) == (None, set(), 0)
    cuda.fails = "cuGraphInstantiateWithFlags"
    with pytest.raises(ConfigurationError, match="make failed"):
        driver.record(lambda: driver.launch(None, (1, 1), []))
    assert (cuda.graphs, driver.n_launches) == (set(), 0)


def test_uploads_are_cut_so_that_others_may_launch_meanwhile(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_PIECE_BYTES", 24)
    driver = GpuDriver(CUDA, 0)
    driver.upload(driver.empty(64), np.zeros(16, np.float32))
    assert cuda.uploaded == [24, 24, 16]


class _OpenCl(ModuleType):
    """pyopencl with one device, which takes memory when it is used."""

    class Error(Exception):
        """The root of what it raises."""

    class MemoryError(Error):
        """Memory is taken and not there."""

    class Buffer:
        def __init__(self, context: object, flags: object, size: int) -> None:
            if size > 600:
                raise _OpenCl.Error("INVALID_BUFFER_SIZE")

    def __init__(self) -> None:
        super().__init__("pyopencl")
        self.device = SimpleNamespace(
            name="card",
            max_work_group_size=256,
            max_mem_alloc_size=600,
            global_mem_size=1000,
            platform=SimpleNamespace(version="OpenCL 3.0"),
        )
        self.Context = self.CommandQueue = lambda _: SimpleNamespace(finish=lambda: None)
        self.mem_flags = SimpleNamespace(READ_WRITE=1)
        self.n_left = 1

    def enqueue_fill_buffer(self, *_: object) -> None:
        if not self.n_left:
            raise self.MemoryError("MEM_OBJECT_ALLOCATION_FAILURE")
        self.n_left -= 1


def test_memory_of_opencl_is_taken_at_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _OpenCl()
    monkeypatch.setitem(sys.modules, "pyopencl", fake)
    monkeypatch.setattr(opencl, "opencl_devices", lambda: [fake.device])
    driver = OpenClDriver(0)
    assert driver.free_bytes == 1000
    taken = driver.empty(400)
    assert driver.free_bytes == 600
    with pytest.raises(CapacityError, match="no memory for 100 bytes;"):
        driver.empty(100)
    with pytest.raises(CapacityError, match=r"at most 600 at once \(CL_DEVICE_MAX_MEM_ALLOC_SIZE"):
        driver.empty(800)
    del taken
    assert driver.free_bytes == 1000
