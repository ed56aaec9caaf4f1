"""`shardnet cache`: what lies on this machine's disk: weights from other nodes or quantised,
finished prompts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Annotated

import typer

from shardnet.cluster.machine.folders import PACKS_FOLDER, PREFIXES_FOLDER, cache_dir
from shardnet.cluster.store.model_cache import CachedModel, ModelCache
from shardnet.errors import BusyError, ShortageError, UsageError
from shardnet.files import CacheFolder
from shardnet.stage.packs.pack_cache import packed_models
from shardnet.stage.prefixes.prefix_store import stored_prefixes

from ..flags.config import cached_ids
from ..flags.options import Json, option
from ..output.exit_codes import counted, fail, one_line, say, write_out

MIB = 2**20

cache_app = typer.Typer(
    name="cache", help="List or delete what is cached on disk: weights and long prompts.",
    no_args_is_help=True,
)  # fmt: skip


@cache_app.command("ls")
def list_models(as_json: Json = False) -> None:
    """List models, quantised weights and prompts, each used last first."""
    cache = ModelCache(cache_dir(os.environ))
    models = cache.models()
    packs = packed_models(cache.folder / PACKS_FOLDER)
    prompts = stored_prefixes(cache.folder / PREFIXES_FOLDER)
    if as_json:
        listed = [
            *map(_as_json, models),
            *(_folder_as_json(packed, quant=packed.form) for packed in packs),
            *(_folder_as_json(found, quant=None, prompts=found.form) for found in prompts),
        ]
        write_out(json.dumps(listed))
        return
    for model in models:
        state = "in use" if model.in_use else f"used {_age(time.time() - model.used_s)} ago"
        write_out(
            f"{model.model_id[:12]}  {model.size_bytes / MIB:.1f} of {model.whole_bytes / MIB:.1f} "
            f"MiB  {state}  {one_line(model.name)}"
        )
    for packed in packs:
        age = _age(time.time() - packed.used_s)
        write_out(
            f"{packed.folder.name[:12]}  {packed.size_bytes / MIB:.1f} MiB, {packed.form}  used "
            f"{age} ago  {one_line(packed.model)}"
        )
    for prefixes in prompts:
        age = _age(time.time() - prefixes.used_s)
        write_out(
            f"{prefixes.folder.name[:12]}  {prefixes.size_bytes / MIB:.1f} MiB of prompts  used "
            f"{age} ago  {prefixes.form} of {one_line(prefixes.model)}"
        )
    quantised = f" and {counted(len(packs), 'quantised model')}" if packs else ""
    say(f"{counted(len(models), 'model')}{quantised} in {cache.folder}")


@cache_app.command("rm")
def remove(
    model_id: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_ID",
            help="The model's id, or its first digits.",
            autocompletion=cached_ids,
        ),
    ] = "",
    everything: Annotated[bool, option("--all", "Delete all that no node uses.")] = False,
) -> None:
    """Delete models, quantised weights or prompts. Models that a node uses stay."""
    if everything == bool(model_id):
        raise typer.BadParameter("name one model by the first digits of its id, or give --all")
    cache = ModelCache(cache_dir(os.environ))
    packs = packed_models(cache.folder / PACKS_FOLDER)
    prompts = stored_prefixes(cache.folder / PREFIXES_FOLDER)
    models = cache.models()
    if model_id:
        ids = [model.model_id for model in models]
        ids += [one.folder.name for one in (*packs, *prompts)]
        model_id = _one_id(ids, model_id, cache)
    _delete("quantised weights", packs, model_id)
    _delete("prompts", prompts, model_id)
    for model in models:
        if model.model_id.startswith(model_id):
            _delete_model(cache, model, everything)


def _delete_model(cache: ModelCache, model: CachedModel, everything: bool) -> None:
    """Delete a model. Of `everything` what came to be used, or was deleted, since is passed over.

    Raises BusyError and UsageError for one that was named.
    """
    name = model.model_id[:12]
    try:
        freed = cache.remove(model.model_id)
    except BusyError as error:
        if not everything or isinstance(error, ShortageError):
            raise
        say(f"{name} is in use and stays: `shardnet unload` frees it")
    except UsageError:
        if not everything:
            raise
        say(f"{name} is gone: another process has deleted it meanwhile")
    else:
        say(f"deleted {name} ({freed / MIB:.1f} MiB) {model.name}".rstrip())


def _delete(what: str, stored: Iterable[CacheFolder], prefix: str) -> None:
    """Delete those whose folder's name begins with `prefix`."""
    for one in stored:
        if not one.folder.name.startswith(prefix):
            continue
        if not one.remove():
            fail(f"{one.folder} cannot be deleted; delete it as the user who owns it")
        say(f"deleted {what} of {one.model} ({one.size_bytes / MIB:.1f} MiB)")


def _one_id(ids: Iterable[str], prefix: str, cache: ModelCache) -> str:
    """Return the one of `ids` that begins with `prefix`. Raises UsageError unless it is one."""
    found = [one for one in ids if one.startswith(prefix)]
    if len(found) != 1:
        several = ", ".join(one[:12] for one in found)
        matches = f"the ids of {len(found)} models ({several})" if found else "no model's id"
        raise UsageError(
            f"{prefix} begins {matches} in {cache.folder}",
            remedy="give the first digits of one id that `shardnet cache ls` lists",
        )
    return found[0]


def _as_json(model: CachedModel) -> dict[str, object]:
    return {
        "model_id": model.model_id,
        "name": model.name,
        "bytes": model.size_bytes,
        "whole_bytes": model.whole_bytes,
        "used": model.used_s,
        "in_use": model.in_use,
        "quant": None,
    }


def _folder_as_json(stored: CacheFolder, **more: str | None) -> dict[str, object]:
    return {
        "model_id": stored.folder.name,
        "name": stored.model,
        "bytes": stored.size_bytes,
        "whole_bytes": stored.size_bytes,
        "used": stored.used_s,
        "in_use": False,
        **more,
    }


def _age(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"
