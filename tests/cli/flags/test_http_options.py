"""Who may use an HTTP server: keys from flags and files, addresses, files for TLS."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from shardnet.errors import ConfigurationError
from shardnet_cli.flags.http_options import HttpOptions


def test_without_a_key_only_loopback_is_listened_on() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert not HttpOptions().listening(host, 0).settings.keys
    for host in ("0.0.0.0", "192.168.1.2", "example.com", ""):
        with pytest.raises(ConfigurationError, match="give --api-key"):
            HttpOptions().listening(host, 0)
        assert HttpOptions(api_key=["one"]).listening(host, 0).host == host


def test_keys_come_from_flags_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the family\n\nann:one:2\nben:two\n", encoding="utf-8")
    file.chmod(0o600)
    keys = HttpOptions(api_key=["three"], api_key_file=str(file)).listening("::", 0).settings.keys
    assert len(keys) == 3
    found = keys.find("one")
    assert found is not None
    assert (found.name, found.most_requests) == ("ann", 2)
    assert capsys.readouterr().err == ""
    file.chmod(0o644)
    HttpOptions(api_key_file=str(file)).listening("::", 0)
    assert "chmod 600" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="make it a readable file"):
        HttpOptions(api_key_file=str(tmp_path / "none")).listening("::", 0)


def test_a_certificate_needs_its_key_and_a_root_path_begins_with_a_slash() -> None:
    with pytest.raises(typer.BadParameter, match="both or neither"):
        HttpOptions(tls_cert="a").listening("::1", 0)


@pytest.mark.parametrize(("given", "most"), [({}, 3), ({"equal_calls": 0}, 0)])
def test_how_many_equal_calls_there_may_be_is_a_setting(given: dict[str, int], most: int) -> None:
    settings = HttpOptions(**given).listening("::1", 0).settings  # type: ignore[arg-type]
    assert settings.most_equal_calls == most
    with pytest.raises(typer.BadParameter, match="begin it with /"):
        HttpOptions(root_path="llm").listening("::1", 0)
    with pytest.raises(typer.BadParameter, match="choose idle or never"):
        HttpOptions(switch="always").listening("::1", 0)
    with pytest.raises(typer.BadParameter, match="'soon' is no duration such as 30m"):
        HttpOptions(idle_unload="soon").listening("::1", 0)
    kept = HttpOptions(switch="never", idle_unload="1h30m").listening("::1", 0).settings
    assert (kept.may_switch, kept.idle_unload_s) == (False, 5400.0)
    assert HttpOptions(root_path="/llm/").listening("::1", 0).settings.root_path == "/llm"


def test_aliases_are_names_of_models() -> None:
    options = HttpOptions(alias=["gpt-4o=org/Tiny", "*=shardnet/default"])
    aliases = options.listening("::1", 0).settings.aliases
    assert aliases == {"gpt-4o": "org/Tiny", "*": "shardnet/default"}
    with pytest.raises(typer.BadParameter, match="give NAME=MODEL"):
        HttpOptions(alias=["gpt-4o"]).listening("::1", 0)
