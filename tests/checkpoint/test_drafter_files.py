"""What a folder drafts by, and which drafters are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_decoder
from support.models.drafter_checkpoints import DFLASH, READ, make_dflash, make_eagle3

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.drafters import DrafterFormat, drafter_format, open_drafter
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.stage.drafters import StateDrafterLoader

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    return Checkpoint.open(make_decoder(folder, "qwen3", num_hidden_layers=8, head_dim=8))


def _change(folder: Path, how: Callable[[dict[str, Any], Tensors], None]) -> Path:
    """Change what is in a folder."""
    raw = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    how(raw, tensors)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("maker", ["authors", "specforge", "speculators"])
def test_eagle3_heads_are_told_from_models(maker: str, model: Checkpoint, tmp_path: Path) -> None:
    folder = make_eagle3(tmp_path, maker)
    assert drafter_format(folder) is DrafterFormat.EAGLE3
    assert open_drafter(folder, model).layers == READ[maker]


def test_what_else_a_folder_may_be(model: Checkpoint, tmp_path: Path) -> None:
    assert drafter_format(make_dflash(tmp_path / "dflash")) is DrafterFormat.BLOCK
    assert drafter_format(model.path) is DrafterFormat.MODEL
    assert drafter_format(tmp_path / "model.gguf") is DrafterFormat.MODEL
    with pytest.raises(CheckpointError, match="reads no states"):
        open_drafter(model.path, model)


def test_layers_where_the_config_names_none(model: Checkpoint, tmp_path: Path) -> None:
    """EAGLE-3's authors read what enters layers 2, N / 2 and N - 3; DFlash spreads them evenly."""
    folder = make_eagle3(tmp_path / "eagle", "specforge", eagle_config=None)
    assert open_drafter(folder, model).layers == (2, 4, 5)
    folder = make_dflash(tmp_path / "dflash", dflash_config={"mask_token_id": 3})
    assert open_drafter(folder, model).layers == (2, 6)


def test_any_token_of_the_model_may_stand_for_a_draft(model: Checkpoint, tmp_path: Path) -> None:
    folder = make_dflash(tmp_path / "first", dflash_config={"mask_token_id": 0})
    assert open_drafter(folder, model).mask_id == 0
    folder = make_dflash(tmp_path / "none", dflash_config={"mask_token_id": 10**6})
    with pytest.raises(CheckpointError, match="mask_token_id 1000000 is no token of the model"):
        open_drafter(folder, model)


def _loader(folder: Path, model: Checkpoint) -> StateDrafterLoader:
    return StateDrafterLoader(folder, model, device="cpu", context=256, n_slots=8)


def test_what_a_drafter_takes_in_memory(model: Checkpoint, tmp_path: Path) -> None:
    """Keys and values of all slots too, and the table of the model where it has none."""
    made = [
        make_eagle3(tmp_path / "own", "specforge"),
        make_eagle3(tmp_path / "lent", "specforge", with_embedding=False),
        make_dflash(tmp_path / "both"),
    ]
    for n_lent, folder in enumerate(made):
        loader = _loader(folder, model)
        stored = load_file(folder / "model.safetensors")
        n_weights = sum(each.numel() for each in stored.values() if each.is_floating_point())
        if n_lent == 2:  # keys and values are made of states too, by a copy
            copied = [stored[n] for n in stored if n.endswith(("k_proj.weight", "v_proj.weight"))]
            n_weights += sum(each.numel() for each in copied)
        n_weights += n_lent * model.config.vocab_size * model.config.hidden_size
        assert loader.n_bytes == 4 * n_weights + 8 * 2 * loader.load().kv.block_bytes


def _eagle_1(raw: dict[str, Any], tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.replace("midlayer", "layers.0")] = tensors.pop(name)
    del tensors["d2t"], tensors["lm_head.weight"], tensors["layers.0.hidden_norm.weight"]
    raw |= {"architectures": ["LlamaForCausalLM"], "eagle_config": None}


def _set(**config: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda raw, _: raw.update(config)


def _without(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    def change(_: dict[str, Any], tensors: Tensors) -> None:
        del tensors[name]

    return change


def _more(raw: dict[str, Any], tensors: Tensors) -> None:
    tensors["confidence.weight"] = torch.ones(4)


def _scalar(raw: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"] = torch.tensor(3)
    del raw["draft_vocab_size"]


def _beyond(raw: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"] += 1000


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (_eagle_1, "a head of EAGLE-1, EAGLE-2 or HASS"),
        (_set(architectures=["MedusaModel"]), "MedusaModel: such drafters"),
        (_set(architectures=["PEagleDraftModel"]), "PEagleDraftModel"),
        (_set(architectures=["Eagle3DeepseekV2ForCausalLM"]), "Eagle3DeepseekV2ForCausalLM"),
        (_set(num_hidden_layers=2), "num_hidden_layers = 2"),
        (_set(norm_output=False), "norm_output"),
        (_set(logit_scale=0.5), "logit_scale = 0.5 is not known"),
        (_set(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
        (_set(dflash_config={"mask_token_id": 3}), "dflash_config"),
        (_set(model_type="deepseek_v3"), "config.json"),
    ],
)
def test_what_is_not_implemented_is_named(
    how: Callable[[dict[str, Any], Tensors], None], why: str, model: Checkpoint, tmp_path: Path
) -> None:
    folder = _change(make_eagle3(tmp_path, "specforge"), how)
    with pytest.raises(CheckpointError, match=why):
        open_drafter(folder, model)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (_set(vocab_size=400), "made for a model of 400 token ids, this one has 320"),
        (_set(target_hidden_size=64), "made for a model of 64 columns, this one has 48"),
        (
            _set(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 16, 31]}),
            r"reads states after \[2, 17, 32\] layers, of this model those after 0 to 8",
        ),
        (
            _set(eagle_config={"eagle_aux_hidden_state_layer_ids": [*range(7)] * 3}),
            "layers read = 21 is not supported; supported: at most 16",
        ),
        (_without("d2t"), "d2t is missing"),
        (_scalar, "draft_vocab_size is missing"),
        (_without("lm_head.weight"), "lm_head.weight is missing"),
        (_without("midlayer.hidden_norm.weight"), "hidden_norm.weight is missing"),
        (_set(intermediate_size=96), "has shape"),
        (_more, "tensor model.confidence.weight has no place in EAGLE-3"),
        (_beyond, "d2t names tokens"),
    ],
)
def test_a_drafter_for_another_model_is_refused(
    how: Callable[[dict[str, Any], Tensors], None], why: str, model: Checkpoint, tmp_path: Path
) -> None:
    folder = _change(make_eagle3(tmp_path, "specforge"), how)
    with pytest.raises(CheckpointError, match=why):
        _loader(folder, model).load()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"num_target_layers": 36}, "made for a model of 36 layers, this one has 8"),
        ({"hidden_size": 64}, "made for a model of 64 columns, this one has 48"),
        ({"architectures": ["DominoDraftModel"]}, "DominoDraftModel"),
        ({"architectures": ["DSparkDraftModel"]}, "DSparkDraftModel"),
        ({"dflash_config": {"target_layer_ids": [1, 5]}}, "mask_token_id is missing"),
        ({"dflash_config": DFLASH["dflash_config"] | {"causal": True}}, "dflash_config.causal"),
        ({"dflash_config": DFLASH["dflash_config"] | {"target_layer_ids": [1, 7]}}, "after 0 to 7"),
        ({"block_size": 500}, "block_size is 500, expected 1 to 256"),
        ({"block_size": 1}, "block_size = 1 is not supported; supported: 2 to 256"),
        ({"fc_norm": True}, "fc_norm"),
    ],
)
def test_what_dflash_is_refused_for(
    config: dict[str, Any], why: str, model: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=why):
        open_drafter(make_dflash(tmp_path, **config), model)


def test_the_class_of_the_error_says_what_to_do(model: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        drafter_format(make_dflash(tmp_path, architectures=["HydraModel"]))
    assert "use EAGLE-3 or DFlash" in str(caught.value)
