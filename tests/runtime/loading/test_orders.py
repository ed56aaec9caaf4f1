"""Orders to load a stage that its model does not fit: refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.rings.stage_forms import form_of

from shardnet.errors import UsageError
from shardnet.runtime.loading.loading import load
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.types import LayerRange


@pytest.mark.parametrize("n_streams", [1, 3])
def test_rows_of_another_width_between_stages_are_refused_by_name(
    n_streams: int, tmp_path: Path
) -> None:
    """As the head's of another release: it is said before anything is loaded."""
    family = "hy_v4" if n_streams == 3 else "llama"
    streams = {"hc_mult": n_streams} if n_streams == 3 else {}
    sizes = CASES.get(family, {}) | streams
    folder = make_decoder(tmp_path, family, with_tokenizer=False, **sizes)
    progress = Mock()

    def order(width: int) -> StageOrder:
        return StageOrder(
            form=form_of(folder),
            folder=folder,
            layers=LayerRange(0, 1),
            is_tail=False,
            border_width=width,
        )

    own = 48 * n_streams
    with pytest.raises(UsageError, match=rf"of 50 columns were ordered .* have {own};"):
        load(order(50), 1 << 28, progress)
    assert not progress.called
    for agreed in (0, own):
        assert load(order(agreed), 1 << 28, progress).order.border_width == agreed
