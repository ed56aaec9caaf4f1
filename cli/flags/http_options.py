"""Who may use an HTTP server, and how it is reached: the flags of `serve` and of `node --http`."""

from __future__ import annotations

import os
from dataclasses import dataclass

import typer

from shardnet.api.chat_formats.choice import MOST_EQUAL_CALLS
from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.settings import Listening, Settings
from shardnet.api.switching.household_file import read_household
from shardnet.api.switching.model_switch import parse_duration
from shardnet.errors import ConfigurationError
from shardnet.files import decode_text, expanded
from shardnet.permissions import others_at, privacy_command
from shardnet.wire.messages.household import HouseholdModel

from ..output.exit_codes import say
from .options import Access, check_choices, env_flag, flag, is_loopback, mdns_interfaces, naming
from .sampling_options import read_speculate

MAX_KEY_FILE_BYTES = 1 << 20
_STORED_KEY = Access()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The flags, in the order in which --help shows them."""

    api_key: list[str] | None = env_flag(
        None,
        "--api-key KEY|NAME:KEY[:LIMIT[:TOKENS]]",
        "A key that programs must send; LIMIT is how many requests it may have at once, "
        "TOKENS how many tokens a minute; 0 is any number. May be given several times.",
    )
    api_key_file: str = env_flag("", "--api-key-file F", "A file with such keys, one a line.")
    cors_origin: list[str] | None = flag(
        None,
        "--cors-origin URL",
        "A web site whose pages may ask this server, * for all; may be given several times.",
    )
    allowed_host: list[str] | None = flag(
        None,
        "--allowed-host NAME",
        "A name of this server, if it is in the public DNS and no --api-key is given; * for "
        "any; may be given several times.",
    )
    alias: list[str] | None = flag(
        None,
        "--alias NAME=MODEL",
        "Another name of a model, for programs that ask for a fixed one; *=MODEL for every "
        "name there is not; may be given several times.",
    )
    root_path: str = flag("", "--root-path /PATH", "Where a proxy has this server on its site.")
    tls_cert: str = flag("", "--tls-cert F", "Serve HTTPS with this certificate (PEM).")
    tls_key: str = flag("", "--tls-key F", "The private key of --tls-cert (PEM).")

    switch: str = env_flag(
        "idle",
        "--switch idle|never",
        "What a request for another model does: idle waits until the ring has nothing to do, "
        "then changes its model; never refuses.",
    )
    idle_unload: str = env_flag(
        "",
        "--idle-unload 30m",
        "Free a model that no request has used for so long. Default: keep it.",
    )
    deputy: str = env_flag(
        "off",
        "--deputy off|auto",
        "auto copies requests and their tokens to a second node, which goes on if the first "
        "one of the ring is lost.",
    )
    tls: bool = flag(
        False,
        "--tls",
        "Serve HTTPS with a certificate of the cluster's authority, which `shardnet key "
        "authority` prints for those who ask.",
    )

    household: str = env_flag(
        "",
        "--household F",
        "Answer for every model of this file (TOML), each on nodes of its own beside the others.",
    )

    fetch_images: bool = flag(
        False,
        "--fetch-images",
        "Fetch pictures that requests name by http(s) URLs, from public addresses only.",
    )
    equal_calls: int = flag(
        MOST_EQUAL_CALLS,
        "--equal-calls N",
        "How many equal tool calls in a row an answer may have; those after them are dropped, "
        "as of a model in a loop. 0 drops none.",
        min=0,
    )

    speculate: str = flag(
        "off",
        "--speculate off|ngram|mtp|auto|NAME[@NODE]",
        "How to draft for requests that do not say; auto: by what the model ships with, and "
        "look-up.",
        env=True,
    )

    reasoning_budget: int = flag(
        -1,
        "--reasoning-budget N",
        "How many tokens a model may think for requests that do not say; then its thought is "
        "closed and the answer begins. -1: any number.",
        min=-1,
    )

    def listening(
        self, host: str, port: int, access: Access = _STORED_KEY, name: str = ""
    ) -> Listening:
        """Say where to listen, and how, and under which `name` mDNS is to tell of it, "" for none.

        A server that anyone may use is not announced.

        Raises ConfigurationError for an address beyond loopback without a key, or a key that is
        none, or --tls without a cluster key, typer.BadParameter for a flag.
        """
        settings = self._settings()
        if not settings.keys and not is_loopback(host):
            raise ConfigurationError(
                f"{host} is not loopback, and without a key everyone who reaches it may use the "
                "model",
                remedy="give --api-key KEY, or listen on 127.0.0.1",
            )
        return Listening(
            host=host,
            port=port,
            certificate=self.tls_cert,
            private_key=self.tls_key,
            cluster_secret=access.key().secret if self.tls else b"",
            name=name if settings.keys else "",
            mdns_interfaces=mdns_interfaces(os.environ),
            settings=settings,
        )

    def household_models(self) -> list[HouseholdModel]:
        """Read --household, none without it. Raises ConfigurationError."""
        return read_household(expanded(self.household)) if self.household else []

    def idle_unload_s(self) -> float | None:
        """Return --idle-unload in seconds, None without it. Raises typer.BadParameter."""
        if not self.idle_unload:
            return None
        with naming("--idle-unload"):
            return parse_duration(self.idle_unload)

    def _settings(self) -> Settings:
        check_choices(self)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise typer.BadParameter("give both or neither", param_hint="--tls-cert, --tls-key")
        if self.tls and self.tls_cert:
            raise typer.BadParameter("choose one of them", param_hint="--tls, --tls-cert")
        root = self.root_path.rstrip("/")
        if root and not root.startswith("/"):
            raise typer.BadParameter(f"'{root}': begin it with /", param_hint="--root-path")
        lines = [*(self.api_key or ()), *self._file_lines()]
        speculate = read_speculate(self.speculate)
        keys = [parse_key(line, number) for number, line in enumerate(lines, 1)]
        return Settings(
            keys=Keyring(keys),
            speculate=speculate,
            cors_origins=tuple(self.cors_origin or ()),
            allowed_hosts=tuple(self.allowed_host or ()),
            root_path=root,
            log=say,
            may_switch=self.switch == "idle",
            idle_unload_s=self.idle_unload_s(),
            has_deputy=self.deputy == "auto",
            fetches_pictures=self.fetch_images,
            most_equal_calls=self.equal_calls,
            thought_budget=None if self.reasoning_budget < 0 else self.reasoning_budget,
            aliases=dict(map(_alias, self.alias or ())),
        )

    def _file_lines(self) -> list[str]:
        """Read the keys of the file, without empty lines and those that begin with #."""
        if not self.api_key_file:
            return []
        path = expanded(self.api_key_file)
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_KEY_FILE_BYTES)
                is_open = others_at(file.fileno()).may_read
        except OSError as error:
            raise ConfigurationError(
                f"{path}: {error.strerror}", remedy="make it a readable file"
            ) from error
        if is_open:
            said = f"others on this machine can read the API keys in {path}"
            say(f"warning: {said}: run `{privacy_command(path)}`")
        lines = [line.strip() for line in decode_text(raw, "replace").splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def _alias(text: str) -> tuple[str, str]:
    """Read NAME=MODEL. Raises typer.BadParameter."""
    name, _, model = text.partition("=")
    if not name or not model:
        raise typer.BadParameter(f"'{text}': give NAME=MODEL", param_hint="--alias")
    return name, model
