"""The kernel text compiles for GPUs that are not here, without spilling registers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.models.random_panels import FORMS
from support.soak import cases

from shardnet.cluster.machine.profile import find_devices
from shardnet.errors import ConfigurationError
from shardnet.model.config.panel_form import PanelForm
from shardnet.model.devices.device_attention import ATTENTION_PARTS, attention_macros
from shardnet.model.devices.device_layers import LAYER_PARTS
from shardnet.model.devices.device_recurrence import STATE_PARTS
from shardnet.model.devices.driver import whole_text
from shardnet.model.devices.gpu import CUDA, compiled
from shardnet.model.devices.products import PRODUCT_PARTS, ROWS, form_macros

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
    looks = [whole_text(dialect, each, *ATTENTION_PARTS) for each in attention]
    layers = [whole_text(dialect, {}, *parts) for parts in (LAYER_PARTS, STATE_PARTS)]
    return [*layers, *looks, *products]


@pytest.mark.parametrize("architecture", cases(["sm_75"], [*NVIDIA[1:]]))
def test_nvidias_compiler_takes_all_texts(architecture: str) -> None:
    """NVRTC needs no GPU: pip install nvidia-cuda-nvrtc."""
    forms = [*cases([form for form in FORMS if form.name in ("Q4_K", "NF4")], FORMS)]
    for text in texts(CUDA.dialect, forms):
        try:
            code, log = compiled(CUDA, text, architecture, ["--ptxas-options=-v"])
        except ConfigurationError as error:
            if "is not installed" in error.message:
                pytest.skip("no NVRTC here")
            raise
        assert code
        assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}


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
