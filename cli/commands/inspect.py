"""`shardnet inspect`: what a model computes of a prompt, logits and hidden states, in a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shardnet.api.client import GREEDY
from shardnet.errors import ConfigurationError, ShardnetError
from shardnet.files import expanded, replacing
from shardnet.output_params import ALL_ROWS, OutputParams
from shardnet.types import whole_number
from shardnet.wire.messages.plans import PlanReply

from ..finding.target import open_target
from ..flags.lazy_group import examples
from ..flags.options import Access, Json, flag, naming, option, takes_groups
from ..flags.ring_options import OnlineRingOptions
from ..output.exit_codes import counted, say, write_json, write_out
from ..output.progress import LoadBars
from .generate import parse_ids

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardnet.api.events import GenerationResult

    Arrays = Mapping[str, NDArray[np.float32] | NDArray[np.int64]]

ALL: Final = "all"
LAST: Final = "last"
NONE: Final = "none"
DTYPES: Final = {"<f4": "F32", "<i8": "I64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """What is written: the flags, in the order in which --help shows them."""

    logits: str = flag(
        LAST,
        "--logits none|last|N|all",
        "Of which tokens logits are written: none, the last, the last N, all.",
    )
    hidden: str = flag(
        NONE,
        "--hidden none|last|all|N,N",
        "Which hidden states are written: the last, behind the final norm; all; or those after so "
        "many layers, 0 for the embeddings, and the last.",
    )
    rows: str = flag(ALL, "--rows last|N|all", "Of which tokens hidden states are written.")
    before_norm: bool = flag(
        False, "--before-norm", "Take the last hidden states before the final norm."
    )
    max_tokens: int = flag(0, "--max-tokens N", "Tokens to generate first, greedily.", min=0)


@examples(
    'shardnet inspect "It is a truth" --out truth.safetensors',
    'shardnet inspect "It is a truth" --hidden all --logits all --out truth.safetensors',
    "shardnet inspect --token-ids 1,2,3 --hidden 0,8 --rows 1 --local 2 --out few.safetensors",
)
@takes_groups
async def inspect(
    *,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to compute.", show_default=False)
    ] = None,
    ring: OnlineRingOptions,
    access: Access,
    token_ids: str = flag("", "--token-ids 1,2,3", "The prompt as token ids."),
    out: Annotated[str, option("--out FILE", "The safetensors file to write.")],
    rows: RowOptions,
    as_json: Json = False,
) -> None:
    """Write what the model computes of a prompt to a file: logits and hidden states, in float32.

    A token's rows are those of one forward pass over the prompt and all new tokens but the last, as
    transformers numbers hidden states.
    """
    if (prompt is None) == (not token_ids):
        raise typer.BadParameter("give one of PROMPT and --token-ids")
    path = expanded(out)
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}", param_hint="--out")
    asked = parse_ids(token_ids) if token_ids else prompt or ""
    wanted, outputs = ring.wanted(access).adapted(), _outputs(rows)
    async with open_target(wanted) as target:
        with LoadBars() as bars:
            plan: list[PlanReply] = []

            def on_plan(found: PlanReply) -> None:
                bars.expect(found)
                plan[:] = [found]

            events = target.client.generate(
                asked,
                GREEDY,
                model=target.choice,
                max_tokens=rows.max_tokens,
                ignore_eos=True,
                outputs=outputs,
                on_plan=on_plan,
                on_loading=bars.update,
            )
            async with contextlib.aclosing(events):
                results = [event.result async for event in events if event.result is not None]
    [result] = results
    n_layers = plan[0].stages[-1].layers[1] if plan else 0
    arrays = _arrays(result, outputs, n_layers)
    _write(path, arrays, _metadata(result, outputs))
    shapes = {name: [*array.shape] for name, array in arrays.items()}
    if as_json:
        said = {"file": str(path), "tensors": shapes, "text": result.text}
        write_json({"model": result.model, **said})
        return
    for name, shape in shapes.items():
        write_out(f"{name:<16} {' x '.join(map(str, shape))}")
    say(f"wrote {counted(len(shapes), 'tensor')} to {path}")


def _outputs(of: RowOptions) -> OutputParams:
    """Read what is wanted. Raises typer.BadParameter."""
    numbers: tuple[int, ...] = ()
    if of.hidden not in (NONE, LAST, ALL):
        numbers = tuple(sorted({*parse_ids(of.hidden, "--hidden")}))
    params = OutputParams(
        logit_rows=None if of.logits == NONE else _n_rows(of.logits, "--logits"),
        hidden_rows=None if of.hidden == NONE else _n_rows(of.rows, "--rows"),
        hidden_layers=numbers,
        every_layer=of.hidden == ALL,
        before_norm=of.before_norm,
    )
    if not params.asks:
        raise typer.BadParameter("with --logits none and --hidden none nothing is written")
    with naming("--hidden"):
        params.check()
    return params


def _n_rows(text: str, flag: str) -> int:
    words = {LAST: 1, ALL: ALL_ROWS}
    if text in words:
        return words[text]
    n_rows = whole_number(text)
    if n_rows is not None and 0 < n_rows < 1 << 32:
        return n_rows
    none = "none, " if flag == "--logits" else ""
    raise typer.BadParameter(
        f"'{text:.40}' is not {none}last, all or a number above 0", param_hint=flag
    )


def _arrays(result: GenerationResult, outputs: OutputParams, n_layers: int) -> Arrays:
    """Return what is written, by name: token_ids [T], logits [R, V], hidden.N [R, E]."""
    import numpy as np

    computed = [*result.prompt_token_ids, *result.token_ids[:-1]]
    arrays: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {
        "token_ids": np.array(computed, "<i8")
    }
    if result.logits is not None:
        arrays["logits"] = result.logits.array()
    if result.hidden is not None:
        states = result.hidden.states()
        numbers = range(n_layers) if outputs.every_layer else outputs.hidden_layers
        if len(states) != len(numbers) + 1:
            raise ShardnetError(
                f"{len(states)} hidden states came of each token, {len(numbers) + 1} were asked for"
            )
        names = [*(f"hidden.{number}" for number in numbers), "hidden.last"]
        arrays |= zip(names, states, strict=True)
    return arrays


def _metadata(result: GenerationResult, outputs: OutputParams) -> dict[str, str]:
    """Say what the file has: texts, as the format has them."""
    said = {
        "model": result.model,
        "n_prompt": str(len(result.prompt_token_ids)),
        "new_token_ids": json.dumps(result.token_ids),
        "text": result.text,
    }
    if result.logits is not None:
        said["logits_first_position"] = str(result.logits.position)
    if result.hidden is not None:
        said["hidden_first_position"] = str(result.hidden.position)
        said["hidden_last"] = "before the final norm" if outputs.before_norm else "behind it"
    return said


def _write(path: Path, arrays: Arrays, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file: a JSON header, then the arrays. Raises ConfigurationError."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": DTYPES[array.dtype.str],
            "shape": array.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    try:
        with replacing(path, mode=0o644) as file:
            for part in (len(encoded).to_bytes(8, "little"), encoded, *arrays.values()):
                rest = memoryview(part if isinstance(part, bytes) else part.tobytes())
                while rest:
                    rest = rest[file.write(rest) :]
    except OSError as error:
        raise ConfigurationError(
            f"--out: {path} cannot be written: {error.strerror}", remedy="name another file"
        ) from error
