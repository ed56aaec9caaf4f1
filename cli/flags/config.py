"""The configuration file, defaults for flags; and what TAB completes.

Keys are flag names with underscores, and `peers` for a list of --peer, `model_folders` for one of
--model-folder. At the top they hold for every command that has the flag, in a table named like a
command for that command alone. A flag or SHARDNET_* variable comes before.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup, TyperOption

from shardnet.errors import ConfigurationError, ShardnetError, shown
from shardnet.files import check_own, decode_text


def read_config(path: Path, group: TyperGroup) -> dict[str, Any]:
    """Read the file into a default map for the commands of `group`; {} when there is no file.

    Raises ConfigurationError for a file that cannot be read, that another user may write or that is
    not TOML, and for an unknown key,
    with the nearest known one.
    """
    try:
        with path.open("rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # /dev/null will do as well
                check_own(file.fileno(), path)
            values = tomllib.loads(decode_text(file.read()))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror}", remedy="make it a readable file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path}: not valid TOML ({error})", remedy="correct it"
        ) from error
    defaults: dict[str, Any] = {name: {} for name in group.commands}
    places = {name: _places(command, defaults[name]) for name, command in group.commands.items()}
    everywhere = [place for several in places.values() for place in several]
    for key, value in values.items():
        if key not in places:
            _put(key, value, everywhere, str(path))
    for name, several in places.items():
        table = values.get(name, {})
        if not isinstance(table, dict):
            raise ConfigurationError(
                f"{path}: '{name}' should be a table",
                remedy=f"write [{name}]; a flag of that name goes into the table of the command "
                "that has it",
            )
        for key, value in table.items():
            _put(key, value, several, f"{path} [{name}]")
    return defaults


_LISTS: Final = MappingProxyType({"peers": "peer", "model_folders": "model_folder"})
"""The keys of flags that may be given several times, and these flags."""

_Place = tuple[dict[str, TyperOption], dict[str, Any]]
"""A command's flags by their names in the file, and where their values go."""


def _places(command: object, default_map: dict[str, Any]) -> list[_Place]:
    """List a command, or the commands of a group such as `key`."""
    if isinstance(command, TyperGroup):
        return [
            place
            for name, nested in command.commands.items()
            for place in _places(nested, default_map.setdefault(name, {}))
        ]
    assert isinstance(command, TyperCommand)
    return [(_flags(command.params), default_map)]


def _put(key: str, value: object, places: Sequence[_Place], where: str) -> None:
    """Set a key for every command that has the flag. Raises ConfigurationError if none has."""
    _check(key, {flag for known, _ in places for flag in known}, where)
    is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
    if key in _LISTS and not is_list:
        raise ConfigurationError(
            f"{where}: {key} should be a list of texts, not {shown(value)}",
            remedy=f'write {key} = ["…"]',
        )
    for known, default_map in places:
        if key in known:
            is_one = known[key].multiple and not isinstance(value, list)
            default_map[str(known[key].name)] = [value] if is_one else value


def _flags(parameters: Sequence[object]) -> dict[str, TyperOption]:
    """Map each flag's name in the file to its parameter."""
    flags = {
        option.lstrip("-").replace("-", "_"): parameter
        for parameter in parameters
        if isinstance(parameter, TyperOption)
        for option in parameter.opts
        if option.startswith("--") and option not in ("--help", "--until-stdin-closes")
    }
    return flags | {several: flags[one] for several, one in _LISTS.items() if one in flags}


def _check(key: str, known: set[str], where: str) -> None:
    if key not in known:
        from shardnet.api.validation import nearest

        raise ConfigurationError(f"{where}: unknown key '{key}'{nearest(key, sorted(known))}")


Complete = Callable[[str], list[str]]
"""From what is typed so far to answers: a value, or value, tab, and a word about it."""

ASKS_VARIABLE: Final = "_SHARDNET_COMPLETE"
"""Set by the scripts: this call completes a line."""
_PLAIN: Final = re.compile(r"[\w./:@+,~=-]+")
"""Values that no shell takes for more than text; others are not offered."""

_ANSWERS: Final = (
    f"env {ASKS_VARIABLE}=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args _TYPER_COMPLETE_ARGS="
)
# Each answer is a line: the value, a tab, a word about it. bash completes only what stands behind
# the last colon or equals sign, which names and addresses contain.
SCRIPTS: Final = MappingProxyType(
    {
        "bash": """\
_shardnet_completion() {
    local line=${COMP_LINE:0:COMP_POINT} word before found
    word=${line##*[[:space:]]}
    [[ $word == -*=* ]] && word=${word#*=}
    before=${word%"${word##*[:=]}"}
    COMPREPLY=()
    while IFS=$'\\t' read -r found _; do
        [[ -n $found ]] && COMPREPLY+=("${found#"$before"}")
    done < <(%ANSWERS%"$line" "$1" 2>/dev/null)
}
complete -o default -F _shardnet_completion shardnet
""",
        "zsh": """\
#compdef shardnet
_shardnet_completion() {
    local line word
    local -a found
    for line in "${(@f)$(%ANSWERS%"${(j: :)words[1,CURRENT]}" $words[1] 2>/dev/null)}"; do
        word=${line%%$'\\t'*}
        [[ -n $word ]] && found+=("${word//:/\\\\:}${${line#$word}/$'\\t'/:}")
    done
    if (( $#found )); then
        _describe shardnet found
    else
        _files
    fi
}
compdef _shardnet_completion shardnet
""",
        "fish": """\
function __shardnet_completion
    set -l found (%ANSWERS%(commandline -cp) (commandline -opc)[1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command shardnet --no-files --arguments '(__shardnet_completion)'
""",
        "powershell": """\
Register-ArgumentCompleter -Native -CommandName shardnet -ScriptBlock {
    param($word, $line, $cursor)
    $typed = "$line".PadRight($cursor - $line.Extent.StartOffset)
    $set = @{ %ASKS% = 'complete_fish'; _TYPER_COMPLETE_FISH_ACTION = 'get-args'
        _TYPER_COMPLETE_ARGS = $typed.Substring(0, $cursor - $line.Extent.StartOffset) }
    $set.GetEnumerator() | ForEach-Object { Set-Item "Env:$($_.Key)" $_.Value }
    try {
        & $line.CommandElements[0].Value 2>$null | ForEach-Object {
            $found, $about = $_ -split "`t", 2
            if (-not $about) { $about = $found }
            $result = 'System.Management.Automation.CompletionResult'
            New-Object $result $found, $found, 'ParameterValue', $about
        }
    } finally { $set.Keys | ForEach-Object { Remove-Item "Env:$_" } }
}
""",
    }
)

SHELLS: Final = tuple(SCRIPTS)


def script(shell: str) -> str:
    """Return the script that makes TAB complete in `shell`."""
    return SCRIPTS[shell].replace("%ANSWERS%", _ANSWERS).replace("%ASKS%", ASKS_VARIABLE)


def install(shell: str, home: Path) -> tuple[Path, Path | None]:
    """Write the script below `home` and have the shell read it.

    Returns the script's file, and the shell's own file if a line was added to it. Raises
    ConfigurationError where one cannot be written.
    """
    file = (
        home
        / {
            "bash": ".local/share/shardnet/completion.bash",
            "zsh": ".local/share/shardnet/completion.zsh",
            "fish": ".config/fish/completions/shardnet.fish",
            "powershell": ".local/share/shardnet/completion.ps1",
        }[shell]
    )
    reads = {"bash": home / ".bashrc", "zsh": home / ".zshrc"}.get(shell)
    line = f'[ -r "{file}" ] && . "{file}"'
    if shell == "powershell":
        reads, line = _powershell_profile(), f". '{file}'"
    if shell == "zsh":
        line = f"(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}; {line}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script(shell), encoding="utf-8")
        if reads is None:
            return file, None
        before = reads.read_text(encoding="utf-8") if reads.exists() else ""
        if line in before:
            return file, None
        reads.parent.mkdir(parents=True, exist_ok=True)
        with reads.open("a", encoding="utf-8") as rc:
            rc.write(f"{'' if before.endswith(chr(10)) or not before else chr(10)}{line}\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"completion cannot be installed: {error}",
            remedy=f"put what `shardnet --show-completion {shell}` prints where {shell} reads it",
        ) from error
    return file, reads


def _powershell_profile() -> Path:
    """Ask PowerShell, 7 or else Windows' own, where its profile is. Raises ConfigurationError."""
    import asyncio  # --help has no use for it

    from shardnet.cluster.machine.programs import ask

    command = "[Console]::OutputEncoding = [Text.Encoding]::UTF8; $PROFILE"
    for program in ("pwsh", "powershell"):
        with contextlib.suppress(ConfigurationError):
            asked = [program, "-NoProfile", "-Command", command]
            said = asyncio.run(ask(asked, os.environ, answer_s=30.0))
            if profile := said.decode("utf-8-sig", "replace").strip():
                return Path(profile)
    raise ConfigurationError(
        "no PowerShell says where its profile is",
        remedy="put what `shardnet --show-completion powershell` prints into it",
    )


def completes_here() -> None:
    """Have typer answer the scripts, if this call is one of theirs."""
    if ASKS_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()


def one_of(*words: str) -> Complete:
    """Complete one of a flag's words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Complete names of models in the stores of this machine."""
    return list(_plain(_models(), incomplete))


def node_addresses(incomplete: str) -> list[str]:
    """Complete the last of some addresses, divided by commas, from the nodes of this machine."""
    named = incomplete.rpartition(",")[0]
    before = f"{named}," if named else ""
    nodes = [(f"{before}{address}", name) for address, name in _nodes() if address not in named]
    return list(_plain(nodes, incomplete))


def cached_ids(incomplete: str) -> list[str]:
    """Complete ids of cached models, as `shardnet cache ls` shows them."""
    return list(_plain(_cached(), incomplete))


def with_words(items: list[Any]) -> list[Any]:
    """Write the help of completion items behind their values, as the scripts read it.

    typer would import rich to do so, which takes longer than all the rest.
    """
    for item in items:
        if item.help:
            item.value, item.help = f"{item.value}\t{' '.join(item.help.split())}", None
    return items


def _plain(found: Iterable[tuple[str, str]], incomplete: str) -> Iterator[str]:
    for value, word in found:
        if value.startswith(incomplete) and _PLAIN.fullmatch(value):
            yield f"{value}\t{''.join(c if c.isprintable() else ' ' for c in word)}"


def _models() -> Iterator[tuple[str, str]]:
    """List the models as `shardnet models` does, unopened."""
    from shardnet.assets import DEFAULT_MODEL_NAME
    from shardnet.checkpoint import program_stores
    from shardnet.checkpoint.hub_cache import cache_root, pulled_models

    yield DEFAULT_MODEL_NAME, "bundled"
    scans = [
        (cache_root(), pulled_models),
        *((root, program_stores.ollama_models) for root in program_stores.ollama_roots()),
        *((root, program_stores.lm_studio_models) for root in program_stores.lm_studio_roots()),
        *((folder, program_stores.models_below) for folder in program_stores.named_folders()),
    ]
    for root, scan in scans:
        try:
            yield from ((found.name, found.store) for found in scan(root) if not found.failure)
        except (OSError, ShardnetError):
            continue  # `shardnet models` says why


def _nodes() -> list[tuple[str, str]]:
    from shardnet.cluster.machine.folders import runtime_dir
    from shardnet.cluster.machine.local_nodes import LocalNodes

    try:
        return [(node.address, node.name) for node in LocalNodes(runtime_dir(os.environ)).list()]
    except ShardnetError:
        return []


def _cached() -> list[tuple[str, str]]:
    from shardnet.cluster.machine.folders import PACKS_FOLDER, cache_dir
    from shardnet.cluster.store.model_cache import ModelCache
    from shardnet.stage.packs.pack_cache import packed_models

    cache = ModelCache(cache_dir(os.environ))
    packs = [(p.folder.name[:12], p.model) for p in packed_models(cache.folder / PACKS_FOLDER)]
    try:
        return [(model.model_id[:12], model.name) for model in cache.models()] + packs
    except ShardnetError:
        return packs
