"""`shardnet pull`: download a model of the Hub into this machine's cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, urlsplit

import msgspec
import typer

from shardnet.checkpoint.hub_cache import HubName, pulled_folder
from shardnet.cluster.machine.folders import cache_dir
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.types import LayerRange, parse_layer_range

from ..flags.options import Json, Offline, keep_offline, naming, option
from ..output.bars import DownloadBars
from ..output.exit_codes import EXIT_INTERRUPTED, picked, say, write_json, write_out

if TYPE_CHECKING:
    from shardnet.cluster.download.hub import PulledModel

MIB = 2**20


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="ORG/NAME",
            help="A model of the Hub; one GGUF of several as ORG/NAME:Q4_K_M.",
        ),
    ],
    revision: Annotated[
        str, option("--revision REV", "A branch, tag or commit of the model.")
    ] = "",
    layers: Annotated[
        str,
        option(
            "--layers A-B",
            "Only these layers, half-open, for a machine that cannot hold all of them.",
        ),
    ] = "",
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Download a model of the Hugging Face Hub to this machine.

    Downloads config, tokenizer and weights, never code, and the weights in one format only:
    safetensors, else PyTorch's, else Meta's or Mistral's own. Of several GGUF files name one, by
    its quantisation (ORG/NAME:Q4_K_M) or its file name. They go to the cache that huggingface_hub
    keeps (HF_HOME), so other programs share them. Nodes then take --model ORG/NAME, and those that
    lack it fetch their layers from here.

    An interrupted download goes on where it stopped when the command is run again, with --layers
    from the tensor on. The last line, on standard output, is the path.
    """
    keep_offline(offline)
    _refuse_paths_and_urls(model)
    text = f"{model}@{revision}" if revision else model
    name = HubName.parse(text)
    if name is None:
        raise typer.BadParameter(f"'{text}' is not ORG/NAME, ORG/NAME:GGUF or NAME")
    here = pulled_folder(name) if offline else None
    if here is not None and as_json:
        write_json({"model": str(name), "folder": str(here), "new_bytes": 0})
    elif here is not None:
        write_out(here)
    elif layers:
        with naming("--layers"):
            wanted = parse_layer_range(layers)
        _pull_layers(name, wanted, as_json=as_json)
    else:
        _pull_model(name, as_json=as_json)


def _refuse_paths_and_urls(model: str) -> None:
    """Raise typer.BadParameter for a path and for a URL.

    A URL may hold a password, so the error does not repeat it.
    """
    is_file = model.lower().startswith("file:")
    if is_file or model.startswith(("/", "./", "../", "~")) or model in (".", ".."):
        path = unquote(urlsplit(model).path) if is_file else model
        raise typer.BadParameter(
            f"'{model}' is a path, and a path needs no download: use --model {path}"
        )
    if "://" in model:
        raise typer.BadParameter(
            "a URL cannot be pulled, only models of the Hub, as ORG/NAME: download the file with "
            "another program and give its path to --model"
        )


@contextlib.contextmanager
def _downloading() -> Iterator[DownloadBars]:
    """Show progress; exit with a message where the download is interrupted."""
    with DownloadBars() as bars:
        try:
            yield bars
        except KeyboardInterrupt:
            bars.stop()
            say("interrupted: run the command again to go on")
            raise typer.Exit(EXIT_INTERRUPTED) from None


def _pull_model(name: HubName, *, as_json: bool) -> None:
    from shardnet.cluster.download import hub

    with _downloading() as bars:
        pulled = hub.pull(name, bars.update)
    if as_json:
        write_json(_as_object(pulled))
        return
    for file in sorted(pulled.files, key=lambda file: -file.size_bytes):
        digest = f"  sha256 {file.sha256}" if file.sha256 else ""
        say(f"  {file.name}  {file.size_bytes / MIB:.1f} MiB{digest}")
    news = _news(pulled.n_new_bytes)
    say(f"{pulled.name} (commit {pulled.commit[:12]}): {news}; use it with --model {pulled.name}")
    write_out(pulled.folder)


def _pull_layers(name: HubName, layers: LayerRange, *, as_json: bool) -> None:
    from shardnet.cluster.download.hub_layers import pull_layers

    with _downloading() as bars:
        pulled = pull_layers(name, layers, bars.update, ModelCache(cache_dir(os.environ)))
    if as_json:
        write_json(
            {
                "model": pulled.name,
                **picked(pulled, "commit", "model_id"),
                "layers": [layers.start, layers.end],
                "folder": str(pulled.folder),
                "new_bytes": pulled.n_new_bytes,
            }
        )
        return
    say(
        f"{layers.words} of {pulled.name} (commit {pulled.commit[:12]}): "
        f"{_news(pulled.n_new_bytes)}; `shardnet cache ls` shows them, a node of this machine "
        f"uses them with --model {pulled.name}"
    )
    write_out(pulled.folder)


def _news(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.1f} MiB downloaded" if n_bytes else "already complete"


def _as_object(pulled: PulledModel) -> dict[str, Any]:
    return {
        "model": pulled.name,
        "commit": pulled.commit,
        "folder": str(pulled.folder),
        "files": [msgspec.to_builtins(file) for file in pulled.files],
        "new_bytes": pulled.n_new_bytes,
    }
