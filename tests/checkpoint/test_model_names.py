"""What people type for the models that were found."""

from __future__ import annotations

import pytest

from shardnet.api.requests import name_model
from shardnet.checkpoint.model_names import match, nearest_name, short_name
from shardnet.errors import UsageError

LAMA_3B, LAMA_1B = "ollama:llama3.2:3b", "ollama:llama3.2:1b"
FANCY, OTHERS = "ollama:anna/fancy:latest", "ollama:hf.co/lab/Crow-GGUF:Q4_K_M"
STUDIO = "lmstudio:community/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf"
Q4, Q8, WHOLE = "lab/Qwen3-8B-GGUF:Q4_K_M", "lab/Qwen3-8B-GGUF:Q8_0", "Qwen/Qwen3-0.6B"
FILE, PARTS = "/home/a/models/Smol-135M.Q4_1.gguf", "/m/Big/big-IQ4_XS-00001-of-00003.gguf"
FOLDER, OLD = "/home/a/models/TinyLlama", "lab/parrot@v1"
WINDOWS, SHARE = "C:\\Users\\Jörg Müller\\Tiny-1M.Q8_0.gguf", "\\\\nas\\models\\Mid"
NAMES = (
    WINDOWS,
    SHARE,
    LAMA_3B,
    LAMA_1B,
    FANCY,
    OTHERS,
    STUDIO,
    Q4,
    Q8,
    WHOLE,
    FILE,
    PARTS,
    FOLDER,
    OLD,
)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *((name, name) for name in NAMES),
        *((name.upper(), name) for name in NAMES),
        ("llama3.2:3b", LAMA_3B),
        ("fancy", FANCY),
        ("anna/fancy", FANCY),
        ("crow:q4_k_m", OTHERS),
        ("qwen3-0.6b-gguf", STUDIO),
        ("community/Qwen3-0.6B-GGUF", STUDIO),
        ("Qwen3-0.6B-Q8_0", STUDIO),
        ("Qwen3-0.6B:q8_0", STUDIO),
        ("qwen3-8b:q8_0", Q8),
        ("Qwen3-8B-GGUF:Q4_K_M", Q4),
        ("smol-135m", FILE),
        ("Smol-135M.Q4_1.gguf", FILE),
        ("big:iq4_xs", PARTS),
        ("tinyllama", FOLDER),
        ("ollama:fancy", FANCY),
        ("tiny-1m", WINDOWS),
        ("Tiny-1M:q8_0", WINDOWS),
        ("mid", SHARE),
        ("lmstudio:qwen3-0.6b", STUDIO),
        ("ollama:tinyllama", None),
        ("models", None),
        ("community/Qwen3-0.6B", None),
        ("lab/parrot", None),
        ("parrot", None),
        ("llama", None),
    ],
)
def test_what_a_part_of_a_name_means(model: str, name: str | None) -> None:
    """Who names ORG/NAME means no other kind of weights, and who names a revision that one."""
    assert match(model, NAMES) == name


@pytest.mark.parametrize(
    ("model", "several"),
    [
        ("llama3.2", f"{LAMA_1B}, {LAMA_3B}"),
        ("qwen3-0.6b", f"{WHOLE}, {STUDIO}"),
        ("Qwen3-8B", f"{Q4}, {Q8}"),
    ],
)
def test_what_may_be_several_is_listed(model: str, several: str) -> None:
    with pytest.raises(UsageError, match="may be any of 2 models: ") as caught:
        match(model, NAMES)
    assert f": {several}; give more of the name" in str(caught.value)


def test_a_long_list_is_cut() -> None:
    with pytest.raises(UsageError, match=r"of 30 models: ollama:x:t0, .* and 22 more"):
        match("x", [f"ollama:x:t{n}" for n in range(30)])


def test_the_nearest_name_is_known() -> None:
    assert nearest_name("lama3.2:3b", NAMES) == LAMA_3B
    assert nearest_name("Qwen/Qwen3-0.5B", NAMES) == WHOLE
    assert nearest_name("zzzz", NAMES) == ""


@pytest.mark.parametrize(
    "model", ["ollama:x", "lmstudio:a/b", "llama3.2:3b", "lab/x:Q4", "x.gguf", "a/b/c"]
)
def test_what_may_be_a_name_goes_to_the_nodes_as_it_is(model: str) -> None:
    assert name_model(model) == model


@pytest.mark.parametrize("model", ["./x", "../x", "/x", "~/x", "a/../b", "C:/x", "a\\b"])
def test_what_must_be_a_path_becomes_absolute(model: str) -> None:
    assert name_model(model).startswith("/")


@pytest.mark.parametrize(
    ("model", "short"),
    [
        ("/home/a/b.gguf", "b.gguf"),
        ("C:\\Users\\Jörg Müller\\b.gguf", "b.gguf"),
        ("D:/models/b", "b"),
        ("\\\\nas\\models\\b", "b"),
        ("org/name:Q4", "org/name:Q4"),
        ("ollama:x:3b", "ollama:x:3b"),
    ],
)
def test_a_path_of_any_system_has_a_short_name(model: str, short: str) -> None:
    """A ring may span machines of several systems."""
    assert short_name(model) == short
