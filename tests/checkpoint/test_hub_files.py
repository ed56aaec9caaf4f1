"""Which files of a repository are fetched: one format of the weights, and what belongs to it."""

from __future__ import annotations

import pytest

from shardnet.checkpoint.hub_cache import CheckpointFiles, choose_files
from shardnet.errors import CheckpointError

HF = ["config.json", "tokenizer.json", "tokenizer.model", "README.md", "modeling.py"]
SAFE = ["model.safetensors"]
SAFE_PARTS = ["model.safetensors.index.json", "model-00001-of-00002.safetensors"]
BIN = ["pytorch_model.bin", "training_args.bin", "rng_state.pth"]
OWN = ["params.json", "consolidated.safetensors", "tekken.json", "tokenizer.model.v3"]
META = ["params.json", "consolidated.00.pth", "consolidated.01.pth", "tokenizer.model"]
GGUFS = [
    *("tiny-Q4_K_M.gguf", "tiny.q8_0.gguf", "tiny-UD-Q4_K_XL.gguf", "mmproj-F16.gguf"),
    *("BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"),
    "tiny-imatrix.gguf",
]


def tensors_of(names: list[str], choice: str = "") -> tuple[str, ...]:
    files = choose_files(names, choice, "lab/tiny")
    return files.tensors or (files.index,)


@pytest.mark.parametrize(
    ("names", "tensors"),
    [
        (HF + SAFE + BIN + OWN + GGUFS, ("model.safetensors",)),
        (HF + SAFE_PARTS + BIN, ("model.safetensors.index.json",)),
        (HF + SAFE + SAFE_PARTS, ("model.safetensors",)),
        (HF + BIN + OWN, ("pytorch_model.bin",)),
        ([*HF, "pytorch_model.bin.index.json"], ("pytorch_model.bin.index.json",)),
        (HF + OWN + GGUFS, ("consolidated.safetensors",)),
        (META, ("consolidated.00.pth", "consolidated.01.pth")),
        ([*META, "consolidated.00.safetensors"], ("consolidated.00.safetensors",)),
        (["model.safetensors", *META], ("consolidated.00.pth", "consolidated.01.pth")),
    ],
)
def test_one_format_is_taken(names: list[str], tensors: tuple[str, ...]) -> None:
    assert tensors_of(names) == tensors


def test_only_what_belongs_to_the_format_comes_along() -> None:
    names = HF + SAFE + OWN
    assert set(choose_files(names, "", "m").whole) == {
        *("config.json", "tokenizer.json", "tokenizer.model", "tekken.json", "tokenizer.model.v3")
    }
    own = choose_files([*OWN, "config.json", "tokenizer.json"], "", "m").whole
    assert set(own) == {"params.json", "tekken.json", "tokenizer.model.v3", "tokenizer.json"}
    assert choose_files(GGUFS + HF, "q8_0", "m").whole == ("mmproj-F16.gguf",)


@pytest.mark.parametrize(
    ("choice", "files"),
    [
        ("Q4_K_M", ("tiny-Q4_K_M.gguf",)),
        ("q4_k_m", ("tiny-Q4_K_M.gguf",)),
        ("Q8_0", ("tiny.q8_0.gguf",)),
        ("UD-Q4_K_XL", ("tiny-UD-Q4_K_XL.gguf",)),
        ("tiny-q4_k_m.gguf", ("tiny-Q4_K_M.gguf",)),
        ("bf16", tuple(f"BF16/tiny-BF16-0000{n}-of-00002.gguf" for n in (1, 2))),
        (
            "BF16/tiny-BF16-00001-of-00002.gguf",
            tuple(f"BF16/tiny-BF16-0000{n}-of-00002.gguf" for n in (1, 2)),
        ),
    ],
)
def test_a_gguf_is_chosen_with_all_its_parts(choice: str, files: tuple[str, ...]) -> None:
    found = choose_files(GGUFS, choice, "lab/tiny")
    beside = () if "/" in files[0] else ("mmproj-F16.gguf",)
    assert found == CheckpointFiles(whole=beside, tensors=files, path=files[0])


@pytest.mark.parametrize(
    ("projectors", "fetched"),
    [
        (["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "mmproj-F16.gguf"),
        (["mmproj-F32.gguf", "tiny-mmproj-bf16.gguf"], "tiny-mmproj-bf16.gguf"),
        (["mmproj-b.gguf", "mmproj-a.gguf", "mmproj.md"], "mmproj-a.gguf"),
        (["other/mmproj-F16.gguf"], None),
    ],
)
def test_one_projector_comes_with_a_gguf(projectors: list[str], fetched: str | None) -> None:
    found = choose_files(["tiny-Q8_0.gguf", *projectors], "Q8_0", "lab/tiny")
    assert found.whole == ((fetched,) if fetched else ())


@pytest.mark.parametrize(
    ("parts", "ahead"),
    [
        (["tiny-Q8_0.gguf"], "mtp-tiny-Q8_0.gguf"),
        ([f"a/tiny-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)], "a/mtp-tiny-Q8_0.gguf"),
    ],
)
def test_layers_that_predict_further_tokens_come_with_their_gguf(
    parts: list[str], ahead: str
) -> None:
    others = ["mtp-tiny-BF16.gguf", "b/mtp-tiny-Q8_0.gguf"]
    found = choose_files([*parts, ahead, *others], "Q8_0", "lab/tiny")
    assert (found.tensors, found.path) == ((*parts, ahead), parts[0])
    assert choose_files([*parts, *others], "Q8_0", "lab/tiny").tensors == (*parts,)


@pytest.mark.parametrize(
    ("names", "choice", "words"),
    [
        (
            GGUFS,
            "",
            "lab/tiny has GGUF files only; there are BF16, .*; choose one as lab/tiny:BF16",
        ),
        (GGUFS, "Q4_K", "no GGUF of the name Q4_K; there are BF16, Q4_K_M, Q4_K_XL, q8_0"),
        (GGUFS, "F16", "no GGUF of the name F16"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "more than one GGUF .* a-Q4_0.gguf, b-Q4_0.gguf"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "", "choose one as lab/tiny:a-Q4_0.gguf"),
        (["a-Q8_0-00002-of-00002.gguf"], "Q8_0", "lacks the part a-Q8_0-00001-of-00002.gguf"),
        (HF + SAFE, "Q4_0", "lab/tiny has no GGUF files; leave out :Q4_0"),
        (HF, "", "no weights that are read here .its files: README.md, config.json,"),
        ([], "", "its files: none at all"),
        (["../a-Q8_0.gguf", "/b-Q8_0.gguf", "..\\c-Q8_0.gguf"], "Q8_0", "has no GGUF files"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_what_there_is(
    names: list[str], choice: str, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        choose_files(names, choice, "lab/tiny")
