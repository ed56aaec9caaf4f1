"""What a ring is asked to compute with: one record, which every order to load a stage holds whole.

An option that is only handed on is a field here and nowhere else between the flag and its use.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from shardnet.types import Digest, DType, KvDTypeName, PathText, Positions, Quant, Strict, WireDType


class StageOptions(Strict, frozen=True, kw_only=True):
    """What a client chooses for all stages, and stays as it was chosen.

    `quant` is what linear weights are quantised to, `kv_dtype` how the KV cache holds keys and
    values. Unknown keys of the model's config are refused unless `ignore_unknown_config`. With
    `mtp` the last stage has the layer that predicts further tokens. Pictures are read by the tower
    in the GGUF `mmproj` of the first node, "" for the model's own.
    """

    model: PathText
    quant: Quant = ""
    kv_dtype: KvDTypeName = "auto"
    ignore_unknown_config: bool = False
    mtp: bool = False
    mmproj: PathText = ""

    def are_met_by(self, had: StageOptions) -> bool:
        """Say whether a ring with the options `had` will do: equal, or more than asked."""
        may_be_more = {
            "mtp": had.mtp or not self.mtp,
            "mmproj": self.mmproj in ("", had.mmproj),
            "ignore_unknown_config": True,  # matters where there are unknown keys only
        }
        return all(
            may_be_more.get(name, getattr(self, name) == getattr(had, name))
            for name in StageOptions.__struct_fields__
        )


class StageForm(StageOptions, frozen=True, kw_only=True):
    """The options of a ring's stages, and what its plan has settled on.

    Parts travel between the nodes of one stage in `gather_dtype`, None for their own dtype.
    """

    model_id: Digest
    dtype: DType
    context: Positions
    gather_dtype: WireDType | None = None

    @classmethod
    def of(cls, options: StageOptions, **settled: Any) -> StageForm:
        """Return the form of a ring for which `options` were chosen."""
        chosen = {name: getattr(options, name) for name in StageOptions.__struct_fields__}
        return cls(**chosen, **settled)

    def of_stage(self, *, is_first: bool, is_cut: bool) -> StageForm:
        """Return what one stage needs of it. Equal forms give equal stages."""
        return structs.replace(
            self,
            mmproj=self.mmproj if is_first else "",
            gather_dtype=self.gather_dtype if is_cut else None,
        )
