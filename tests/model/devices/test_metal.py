"""The kernel text in Metal's words, read by a C++ compiler that is told what these words are."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from support.models.random_panels import FORMS

from shardnet.model.devices.device_attention import ATTENTION_PARTS, ENTRIES, attention_macros
from shardnet.model.devices.device_choice import CHOICE_PARTS
from shardnet.model.devices.device_entries import ENTRY_PARTS
from shardnet.model.devices.device_layers import LAYER_PARTS
from shardnet.model.devices.device_recurrence import STATE_PARTS
from shardnet.model.devices.device_streams import STREAM_PARTS
from shardnet.model.devices.products import PRODUCT_PARTS, form_macros
from shardnet.model.drivers.driver import whole_text
from shardnet.model.drivers.metal import as_metal

COMPILER = shutil.which("g++") or shutil.which("clang++")
SHIM = """
#include <cmath>
#include <cstdint>
#include <cstring>
#define device
#define constant const
#define threadgroup static
#define kernel
typedef unsigned int uint; typedef unsigned long ulong; typedef unsigned char uchar;
typedef unsigned short ushort; typedef _Float16 half;
struct uint3 { uint x, y, z; };
struct char4 { signed char x, y, z, w; };
template <class T, class S> T as_type(S from) { T to; memcpy(&to, &from, sizeof to); return to; }
namespace precise { using std::sqrt; }
namespace mem_flags { const int mem_threadgroup = 1, mem_device = 2; }
inline void threadgroup_barrier(int) {}
namespace metal {}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_metals_words_make_sense() -> None:
    """Numbers are references, buffers are not; what only Apple's compiler knows is not seen."""
    wanted = ("Q2_K", "Q4_K", "NVFP4", "F16", "NF4")
    macros = [form_macros(form, 8) for form in FORMS if form.name in wanted]
    texts = [whole_text("metal", own, *PRODUCT_PARTS) for own in macros]
    texts += [whole_text("metal", {}, *parts) for parts in (LAYER_PARTS, STATE_PARTS, ENTRY_PARTS)]
    texts += [whole_text("metal", {"STREAMS": 4}, *STREAM_PARTS)]
    texts += [whole_text("metal", {"SIZE": 128}, *CHOICE_PARTS)]
    chosen = attention_macros(8, 128, 128, 0)
    for own in (chosen, chosen | {"CHOSEN": ENTRIES}):
        texts += [whole_text("metal", own, *ATTENTION_PARTS)]
    for text in texts:
        turned = as_metal(text)
        assert re.search(r"constant uint32_t &(n_rows|n_heads|width)", turned)
        assert "constant const" not in turned
        read = SHIM + turned.replace("#include <metal_stdlib>", "")
        found = subprocess.run(
            [str(COMPILER), "-std=c++17", "-fsyntax-only", "-w", "-x", "c++", "-"],
            input=read, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr[:1500]
