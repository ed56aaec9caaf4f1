"""Groups of flags: what typer sees of them, and what the command gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from shardnet.model.shards.cut import MAX_SHARDS
from shardnet_cli.flags.options import takes_groups
from shardnet_cli.flags.ring_options import RingOptions
from shardnet_cli.main import app


@dataclass(frozen=True, slots=True, kw_only=True)
class Paint:
    colour: Annotated[str, typer.Option("--colour", envvar="TEST_COLOUR")] = "red"
    coats: Annotated[int, typer.Option("--coats", min=1)] = 1
    drying_h: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickPaint(Paint):
    coats: int = 1


def painting() -> tuple[typer.Typer, list[object]]:
    """An app with two commands, and what they were called with."""
    calls: list[object] = []
    painter = typer.Typer()

    @painter.command("wall")
    @takes_groups
    def wall(*, size: Annotated[int, typer.Option("--size")] = 3, paint: Paint) -> None:
        """Paint a wall."""
        calls.extend([size, paint])

    @painter.command("door")
    @takes_groups
    def door(*, paint: QuickPaint, both: Annotated[bool, typer.Option("--both")] = False) -> None:
        calls.extend([paint, both])

    return painter, calls


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        (["wall"], [3, Paint()]),
        (
            ["wall", "--coats", "2", "--size", "5", "--colour", "blue"],
            [5, Paint(colour="blue", coats=2)],
        ),
        (["door", "--both", "--colour", "green"], [QuickPaint(colour="green"), True]),
    ],
)
def test_a_command_gets_its_groups(arguments: list[str], called: list[object]) -> None:
    painter, calls = painting()
    result = CliRunner().invoke(painter, arguments)
    assert result.exit_code == 0, result.output
    assert calls == called


def test_the_environment_and_bounds_hold_as_for_any_flag() -> None:
    painter, calls = painting()
    assert CliRunner().invoke(painter, ["wall"], env={"TEST_COLOUR": "grey"}).exit_code == 0
    assert calls == [3, Paint(colour="grey")]
    assert CliRunner().invoke(painter, ["wall", "--coats", "0"]).exit_code == 2


@pytest.mark.parametrize("arguments", [["door", "--coats", "2"], ["wall", "--drying-h", "2"]])
def test_a_field_of_plain_type_is_no_flag(arguments: list[str]) -> None:
    painter, calls = painting()
    result = CliRunner().invoke(painter, arguments)
    assert result.exit_code == 2
    assert "No such option" in result.output
    assert calls == []


def flags(command: str) -> list[str]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return [str(parameter.name) for parameter in group.commands[command].params]


@pytest.mark.parametrize(
    ("command", "without"),
    [
        ("generate", set[str]()),
        ("plan", {"offline"}),
        ("bench", {"offline"}),
        ("chat", {"optimise"}),
    ],
)
def test_every_command_of_a_ring_has_the_flags_of_the_model(
    command: str, without: set[str]
) -> None:
    wanted = [name for name in RingOptions.__dataclass_fields__ if name not in without]
    assert [name for name in flags(command) if name in RingOptions.__dataclass_fields__] == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimise": "speed"}, "'speed': choose latency or throughput"),
        ({"dtype": "int8"}, "'int8': choose auto, bfloat16, float16 or float32"),
        ({"wire_dtype": "float32"}, "'float32': choose bfloat16, float16 or int8"),
        ({"quant": ""}, "'': choose none, int8 or int4"),
        ({"kv_dtype": "int4"}, "'int4': choose auto or int8"),
        ({"stream_layers": "-1"}, "'-1': choose auto or a number of layers"),
        ({"layers": "8-4"}, "8-4"),
        ({"layers": "0-²"}, "'0-²' is not START-END"),
        ({"layers": "0-" + "9" * 5000}, "9' is not START-END"),
        ({"nodes_per_stage": "0"}, f"'0': choose auto or a number from 1 to {MAX_SHARDS}"),
        ({"nodes_per_stage": f"{MAX_SHARDS + 1}"}, "choose auto or a number from 1"),
        ({"nodes_per_stage": "9" * 5000}, "9': choose auto or a number from 1"),
    ],
)
def test_a_wrong_value_is_refused_by_name(changes: dict[str, str], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message) as refused:
        RingOptions(**changes).choice()  # type: ignore[arg-type]
    assert refused.value.param_hint == "--" + next(iter(changes)).replace("_", "-")


def test_what_is_not_given_is_left_to_the_nodes() -> None:
    choice = RingOptions(quant="none", stream_layers="off", nodes=" a:1, b:2 ").choice()
    assert (choice.quant, choice.stream_layers, choice.nodes) == ("", 0, ["a:1", "b:2"])
    assert (choice.layers, choice.context, choice.dtype) == ([], 0, "auto")
