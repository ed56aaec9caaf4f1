"""Stages that grow: what is lacking beside a loaded one, what both are together, and its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.models.checkpoints import make_llama
from support.rings.stage_forms import form_of, with_form

from shardnet.errors import CapacityError
from shardnet.runtime.loading.loaded_stage import LoadedStage, join
from shardnet.runtime.loading.loading import load
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.types import LayerRange


def test_what_a_stage_lacks_is_loaded_beside_it_and_joined(tmp_path: Path) -> None:
    folder = make_llama(tmp_path, num_hidden_layers=3, max_position_embeddings=512)
    whole = StageOrder(
        form=form_of(folder),
        folder=folder,
        layers=LayerRange(0, 3),
        is_tail=True,
    )

    def loaded(order: StageOrder) -> LoadedStage:
        return load(order, 1 << 28, lambda *_: None)

    middle = replace(whole, layers=LayerRange(1, 2), is_tail=False)
    own = loaded(middle)
    first, last = own.lacks(whole)
    assert [(one.layers, one.is_tail) for one in (first, last)] == [
        (LayerRange(0, 1), False),
        (LayerRange(2, 3), True),
    ]
    assert own.lacks(middle) == []
    for other in (
        replace(whole, layers=LayerRange(0, 1), is_tail=False),
        with_form(whole, context=256),
        replace(whole, n_streamed=1),
    ):
        assert own.lacks(other) == []
    stage = join(whole, [own, loaded(last), loaded(first)])
    assert [part.order.layers.start for part in stage.parts] == [0, 1, 2]
    assert stage.weight_bytes == sum(part.weight_bytes for part in stage.parts)
    assert stage.room_blocks == min(part.room_blocks for part in stage.parts) // 3
    assert len({stage, own, own}) == 2
    assert stage.part(whole) is stage
    assert stage.part(middle) is own
    assert stage.part(with_form(middle, context=256)) is None
    small = replace(own, room_blocks=3)
    with pytest.raises(CapacityError, match="layers 0-2 together have room for 1 KV blocks"):
        join(whole, [small, stage.parts[0], stage.parts[2]])
    (folder / "config.json").touch()
    assert own.lacks(whole) == []
    assert stage.part(whole) is None
