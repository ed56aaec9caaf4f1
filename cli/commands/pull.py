"""`shardnet pull`: a model of the Hub into this machine's cache, or a file from anywhere."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import unquote, urlsplit

import msgspec
import typer

from shardnet.checkpoint.hub_cache import HubName, pulled_folder
from shardnet.cluster.machine.cache_dir import cache_dir
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import ShardnetError, UsageError
from shardnet.types import LayerRange, parse_layer_range

from ..flags.options import Json, Offline, keep_offline
from ..output.download_bars import DownloadBars
from ..output.exit_codes import EXIT_INTERRUPTED, fail, say, write_out
from ..output.generation_output import print_json

if TYPE_CHECKING:
    from shardnet.cluster.download.hub import PulledModel

MIB = 2**20
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="ORG/NAME|URL",
            help="A model of the Hub (of GGUFs one: ORG/NAME:Q4_K_M), or the URL of a file.",
        ),
    ],
    revision: Annotated[
        str, typer.Option("--revision", metavar="REV", help="A branch, tag or commit of the model.")
    ] = "",
    layers: Annotated[
        str,
        typer.Option(
            "--layers",
            metavar="A-B",
            help="Only these layers, half-open, for a machine that has no room for all of them.",
            show_default=False,
        ),
    ] = "",
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            metavar="FOLDER",
            help="Where what comes from a URL goes. Default: here.",
            show_default=False,
        ),
    ] = Path(),
    sha256: Annotated[
        str,
        typer.Option("--sha256", metavar="HEX", help="What the file of a URL must be."),
    ] = "",
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Download a model to this machine.

    From the Hugging Face Hub come config, tokenizer and weights, never code, and the weights in
    one format only: safetensors, else PyTorch's, else Meta's or Mistral's own. Of a repository's
    GGUF files the one that is named comes: ORG/NAME:Q4_K_M, or its file name. They lie in the cache
    that huggingface_hub keeps (HF_HOME), so other programs share them. Nodes then take --model
    ORG/NAME, and those that lack it fetch their layers from here.

    From a URL comes one file; a tar file is unpacked to a folder. Use it with --model PATH.

    A download that broke goes on where it stopped. The last line, on standard output, is the path.
    """
    keep_offline(offline)
    _refuse_path(model)
    if "://" in model:
        _refuse(bool(revision), "--revision is for models of the Hub, not for a URL")
        _refuse(bool(layers), "--layers is for models of the Hub, not for a URL")
        _refuse(offline, "--offline: a URL is on the network")
        _refuse(
            not model.startswith(("https://", "http://")),
            "a URL begins with https:// or http://",
        )
        _refuse(
            bool(sha256) and not _SHA256.fullmatch(sha256),
            f"--sha256 {sha256}: a SHA-256 has 64 hexadecimal digits",
        )
        _pull_url(model, to, sha256, as_json=as_json)
        return
    _refuse(bool(sha256), "--sha256 is for a URL: the Hub says itself what its files must be")
    _refuse(to != Path(), "--to is for a URL: models of the Hub go to its cache (HF_HOME)")
    text = f"{model}@{revision}" if revision else model
    name = HubName.parse(text)
    if name is None:
        raise typer.BadParameter(f"'{text}' is not ORG/NAME, ORG/NAME:GGUF or NAME")
    here = pulled_folder(name) if offline else None
    if here is not None:
        write_out(here)
    elif layers:
        _pull_layers(name, _one_range(layers), as_json=as_json)
    else:
        _pull_model(name, as_json=as_json)


def _refuse(is_wrong: bool, why: str) -> None:
    if is_wrong:
        raise typer.BadParameter(why)


def _one_range(layers: str) -> LayerRange:
    try:
        return parse_layer_range(layers)
    except UsageError as error:
        raise typer.BadParameter(str(error), param_hint="--layers") from error


def _refuse_path(model: str) -> None:
    """Refuse what is on this machine: there is nothing to download."""
    is_file = model.lower().startswith("file:")
    if is_file or model.startswith(("/", "./", "../", "~")) or model in (".", ".."):
        path = unquote(urlsplit(model).path) if is_file else model
        raise typer.BadParameter(
            f"'{model}' is a path, and a path needs no download: use --model {path}"
        )


@contextlib.contextmanager
def _downloading() -> Iterator[DownloadBars]:
    """Show bars; end the command where the download fails or is interrupted."""
    with DownloadBars() as bars:
        try:
            yield bars
        except ShardnetError as error:
            bars.stop()
            fail(str(error))
        except KeyboardInterrupt:
            bars.stop()
            say("interrupted: run the command again to go on where it stopped")
            raise typer.Exit(EXIT_INTERRUPTED) from None


def _pull_model(name: HubName, *, as_json: bool) -> None:
    from shardnet.cluster.download import hub

    with _downloading() as bars:
        pulled = hub.pull(name, bars.update)
    if as_json:
        print_json(_as_object(pulled))
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
        print_json(
            {
                "model": pulled.name,
                "commit": pulled.commit,
                "model_id": pulled.model_id,
                "layers": [layers.start, layers.end],
                "folder": str(pulled.folder),
                "new_bytes": pulled.n_new_bytes,
            }
        )
        return
    say(
        f"layers {layers} of {pulled.name} (commit {pulled.commit[:12]}): "
        f"{_news(pulled.n_new_bytes)}; `shardnet cache ls` shows them, a node of this machine "
        f"uses them with --model {pulled.name}"
    )
    write_out(pulled.folder)


def _pull_url(url: str, to: Path, sha256: str, *, as_json: bool) -> None:
    from shardnet.cluster.download.tar_folder import folder_name, unpack
    from shardnet.cluster.download.web_file import download, file_name

    with _downloading() as bars:
        unpacked = folder_name(file_name(url))
        folder = to.absolute() / unpacked if unpacked is not None else None
        _refuse(
            folder is not None and folder.exists(),
            f"{folder} is there already: use it with --model, or delete it to fetch it again",
        )
        if url.startswith("http://") and not sha256:
            say("warning: http is not encrypted: give --sha256 to be sure of what comes")
        file = download(url, to.absolute(), bars.update, sha256=sha256)
        bars.stop()
        path = file.path
        if folder is not None:
            unpack(file.path, folder, lambda member: say(f"  {member}"))
            file.path.unlink()
            path = folder
    if as_json:
        print_json(
            {
                "url": url,
                "path": str(path),
                "size_bytes": file.size_bytes,
                "sha256": file.sha256,
                "new_bytes": file.n_new_bytes,
            }
        )
        return
    came = f"{file.path.name}: {_news(file.n_new_bytes)}, sha256 {file.sha256}"
    say(f"{came}; use it with --model {path}")
    write_out(path)


def _news(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.1f} MiB came" if n_bytes else "nothing is new"


def _as_object(pulled: PulledModel) -> dict[str, Any]:
    return {
        "model": pulled.name,
        "commit": pulled.commit,
        "folder": str(pulled.folder),
        "files": [msgspec.to_builtins(file) for file in pulled.files],
        "new_bytes": pulled.n_new_bytes,
    }
