from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_gpt2, make_llama
from support.rings.stage_chain import CPU, Rows, StageChain, even_split, probed, random_prompt

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CapacityError, CheckpointError, UsageError
from shardnet.model.families.stage_tensors import canonical_name, stage_tensors
from shardnet.model.kernels.linear import KernelChoice
from shardnet.stage.kept_linears import KeptLinears
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.types import ANY_ROWS, BLOCK_POSITIONS, DType, LayerRange, SlotId

MAKERS: dict[str, Callable[..., Path]] = {
    "llama": make_llama,
    "llama-tied": lambda folder: make_llama(folder, tie_word_embeddings=True),
    "llama-indexed": lambda folder: make_llama(folder, max_shard_size="60KB"),
    "gpt2": make_gpt2,
}
N_LAYERS = 4
RANGES = [LayerRange(0, 4), LayerRange(0, 1), LayerRange(1, 3), LayerRange(2, 4)]


@pytest.fixture(scope="module", params=list(MAKERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def ignore_progress(done: int, total: int) -> None:
    pass


def load(
    folder: Path | Checkpoint,
    layers: LayerRange,
    *,
    choice: KernelChoice | None = None,
    room_blocks: int = 8,
    context: int | None = None,
    progress: Callable[[int, int], None] = ignore_progress,
    kept: KeptLinears | None = None,
) -> StageModel:
    checkpoint = folder if isinstance(folder, Checkpoint) else Checkpoint.open(folder)
    return load_stage(
        checkpoint,
        layers,
        choice=choice or probed(CPU, DType.FLOAT32, None),
        device=CPU,
        room_blocks=room_blocks,
        progress=progress,
        context=context,
        kept=kept,
    )


class TestLoading:
    @pytest.mark.parametrize("layers", RANGES, ids=str)
    def test_exactly_the_bytes_of_the_range_are_read(
        self, folder: Path, layers: LayerRange
    ) -> None:
        """Per file, against the sizes of the tensors as another library reads them."""
        checkpoint = Checkpoint.open(folder)
        wanted = stage_tensors(checkpoint.config, layers).all
        expected = {
            path.name: sum(
                tensor.nbytes
                for name, tensor in load_file(path).items()
                if canonical_name(checkpoint.config, name) in wanted
            )
            for path in folder.glob("*.safetensors")
        }
        load(checkpoint, layers)
        assert checkpoint.bytes_read == expected

    def test_a_layer_of_another_stage_is_not_in_the_table(self, folder: Path) -> None:
        """The table itself: the middle stage wants its layers and nothing else."""
        config = Checkpoint.open(folder).config
        names = stage_tensors(config, LayerRange(1, 3)).all
        prefixes = ("model.layers.1.", "model.layers.2.", "h.1.", "h.2.")
        assert names
        assert all(name.startswith(prefixes) for name in names)

    def test_progress_ends_at_all_bytes(self, folder: Path) -> None:
        seen: list[tuple[int, int]] = []
        checkpoint = Checkpoint.open(folder)
        load(checkpoint, LayerRange(0, 4), progress=lambda done, total: seen.append((done, total)))
        total = sum(checkpoint.bytes_read.values())
        assert seen[-1] == (total, total)
        assert {total_bytes for _, total_bytes in seen} == {total}
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    @pytest.mark.parametrize("end", [3, 4])
    def test_a_stage_that_grows_makes_linears_of_new_layers_only(
        self, folder: Path, end: int
    ) -> None:
        """What it had it takes over, but for a head that is a table too; its bits are the same."""
        kept = load(folder, LayerRange(1, end)).linears
        assert kept is not None
        kept.linears |= {
            replace(key, names=("gone",)): linear for key, linear in [*kept.linears.items()][:1]
        }
        before = dict(kept.linears)
        seen: list[tuple[int, int]] = []
        checkpoint, again = Checkpoint.open(folder), Checkpoint.open(folder)
        grown = LayerRange(0, end)
        stage = load(
            checkpoint, grown, kept=kept, progress=lambda done, total: seen.append((done, total))
        )
        whole = load(again, grown)
        assert stage.linears is not None
        after = stage.linears.linears
        taken = [key for key in before if after.get(key) is before[key]]
        assert len(taken) >= len(before) - 2
        assert [key for key in taken if key.names == ("gone",)] == []
        assert kept.linears == {}  # what it does not take holds no memory while the rest is made
        assert seen[-1][0] == seen[-1][1]
        assert sum(checkpoint.bytes_read.values()) < sum(again.bytes_read.values()) / 1.5
        assert stage.exact_rows == whole.exact_rows
        prompt = random_prompt(12, 300)
        wanted, got = (StageChain([each]).prefill(0, prompt) for each in (whole, stage))
        assert torch.equal(wanted, got)

    def test_cancelling_leaves_nothing(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[weakref.ref[torch.Tensor]] = []
        read = Checkpoint.read

        def watched(checkpoint: Checkpoint, name: str, *rest: Any) -> torch.Tensor:
            tensor = read(checkpoint, name, *rest)
            made.append(weakref.ref(tensor))
            return tensor

        class Cancelled(Exception):
            pass

        def cancel(done: int, total: int) -> None:
            if done > total // 2:
                raise Cancelled

        monkeypatch.setattr(Checkpoint, "read", watched)
        checkpoint = Checkpoint.open(llama)
        with pytest.raises(Cancelled):
            load(checkpoint, LayerRange(0, 4), progress=cancel)
        gc.collect()
        assert made
        assert all(reference() is None for reference in made)
        load(checkpoint, LayerRange(0, 4))

    def test_layers_that_the_model_does_not_have(self, llama: Path) -> None:
        with pytest.raises(UsageError, match="layers 2-5 were asked for, the model has 4"):
            load(llama, LayerRange(2, 5))

    def test_more_context_than_the_model_has(self, llama: Path) -> None:
        with pytest.raises(CapacityError, match=r"context of 513 .* the model has 512"):
            load(llama, LayerRange(0, 4), context=513)


TensorChange = dict[str, torch.Tensor | None]
UP = "model.layers.1.mlp.up_proj.weight"


class TestTensorsThatDoNotFit:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({UP: None}, f"tensor {UP} is missing"),
            ({UP: torch.zeros(80, 47)}, rf"tensor {UP} has shape \[80, 47\].* \[80, 48\]"),
            ({UP: torch.zeros(80, 48, dtype=torch.int8)}, f"tensor {UP} is stored as I8"),
            ({"model.extra.weight": torch.zeros(1)}, "tensor model.extra.weight .* no place"),
        ],
        ids=["missing", "shape", "dtype", "left over"],
    )
    def test_are_named_before_anything_is_read(
        self, llama: Path, tmp_path: Path, change: TensorChange, message: str
    ) -> None:
        copy = shutil.copytree(llama, tmp_path / "copy")
        tensors = load_file(copy / "model.safetensors") | change
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
        checkpoint = Checkpoint.open(copy)
        with pytest.raises(CheckpointError, match=message) as error:
            load(checkpoint, LayerRange(0, 2))
        assert str(copy) in str(error.value)
        assert "\n" not in str(error.value)
        assert sum(checkpoint.bytes_read.values()) == 0

    def test_a_stage_does_not_mind_what_it_does_not_read(self, llama: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(llama, tmp_path / "copy")
        tensors = load_file(copy / "model.safetensors")
        del tensors[UP]
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        load(copy, LayerRange(2, 4))


class TestForward:
    def test_only_sampled_rows_get_logits(self, folder: Path) -> None:
        """Rows of a micro-batch: none, the last, the last three of their groups."""
        chain = StageChain.load(folder, even_split(N_LAYERS, 2))
        ids = [random_prompt(5, 300, seed=slot) for slot in range(3)]
        everything = torch.cat(
            [
                chain.step(Rows(slot=slot, position=0, ids=ids[slot], n_sampled=5))
                for slot in range(3)
            ]
        )
        mixed = chain.step(
            *(
                Rows(slot=slot, position=0, ids=ids[slot], n_sampled=n_sampled)
                for slot, n_sampled in enumerate((0, 1, 3))
            )
        )
        torch.testing.assert_close(mixed, everything[[9, 12, 13, 14]], rtol=0, atol=1e-4)
        nothing = chain.step(Rows(slot=0, position=0, ids=ids[0], n_sampled=0))
        assert nothing.shape == (0, 320)

    def test_no_rows_at_all(self, folder: Path) -> None:
        chain = StageChain.load(folder, even_split(N_LAYERS, 2))
        assert chain.step().shape == (0, 320)

    def test_shapes_and_dtypes(self, folder: Path) -> None:
        choice = probed(CPU, DType.BFLOAT16, None)
        first, last = StageChain.load(folder, even_split(N_LAYERS, 2), choice).stages
        assert (first.first, first.last, last.first, last.last) == (True, False, False, True)
        assert first.layers == LayerRange(0, 2)
        assert (first.width, first.vocab_size) == (48, 320)
        assert first.exact_rows in (*range(1, choice.exact_rows + 1), ANY_ROWS)
        whole = StageChain([first])
        hidden = whole.step(Rows(slot=0, position=0, ids=[1, 2], n_sampled=1))
        assert hidden.shape == (2, 48)
        assert hidden.dtype is first.dtype

    def test_the_rows_that_come_in_are_not_written_to(self, folder: Path) -> None:
        """They share memory with the frame they came in."""
        first, last = StageChain.load(folder, even_split(N_LAYERS, 2)).stages
        rows = Rows(slot=0, position=0, ids=[1, 2], n_sampled=1)
        hidden = StageChain([first]).step(rows).clone()
        before = hidden.clone()
        StageChain([last]).step(rows, hidden=hidden)
        assert torch.equal(hidden, before)

    def test_positions_beyond_the_context(self, folder: Path) -> None:
        stage = load(folder, LayerRange(0, 4), context=100)
        chain = StageChain([stage])
        chain.step(Rows(slot=0, position=99, ids=[1], n_sampled=1))
        with pytest.raises(CapacityError, match="sequence 0: position 100 lies beyond the context"):
            chain.step(Rows(slot=0, position=99, ids=[1, 2], n_sampled=1))

    def test_room_that_is_used_up(self, folder: Path) -> None:
        """The request that found no room fails; the others go on, with the same numbers."""
        stage = load(folder, LayerRange(0, 4), room_blocks=1)
        chain = StageChain([stage])
        row = Rows(slot=0, position=0, ids=[7], n_sampled=1)
        expected = chain.step(row)
        with pytest.raises(CapacityError, match="slot 1 needs 1 more KV blocks"):
            chain.step(Rows(slot=1, position=0, ids=[7], n_sampled=1))
        assert torch.equal(chain.step(row), expected)
        stage.kv.free(SlotId(0))
        assert torch.equal(chain.step(Rows(slot=1, position=0, ids=[7], n_sampled=1)), expected)

    def test_slots_grow_by_blocks_and_keep_their_bits(self, folder: Path) -> None:
        """Across the border of a block a sequence goes on as if its slot had been large at once."""
        prompt = random_prompt(BLOCK_POSITIONS - 1, 300)
        grown, large = (StageChain([load(folder, LayerRange(0, 4))]) for _ in range(2))
        large.stages[0].kv.ensure(SlotId(0), 2 * BLOCK_POSITIONS)
        for chain in (grown, large):
            chain.prefill(0, prompt)
        assert grown.stages[0].kv.blocks_used == 1
        for i, token in enumerate([5, 6, 7]):
            row = Rows(slot=0, position=len(prompt) + i, ids=[token], n_sampled=1)
            assert torch.equal(grown.step(row), large.step(row))
        assert grown.stages[0].kv.blocks_used == 2

    @pytest.mark.parametrize("token_id", [-1, 320, 2**40])
    def test_token_ids_outside_the_vocabulary(self, folder: Path, token_id: int) -> None:
        chain = StageChain.load(folder, even_split(N_LAYERS, 2))
        with pytest.raises(UsageError, match=f"token id {token_id} is outside"):
            chain.step(Rows(slot=0, position=0, ids=[1, token_id], n_sampled=1))
