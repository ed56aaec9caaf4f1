"""Options that several commands share, and how their texts become values."""

from __future__ import annotations

import os
import re
from typing import Annotated, Final

import typer

from shardnet.api.requests import check_request, name_model
from shardnet.errors import UsageError
from shardnet.types import parse_layers
from shardnet.wire.control import Generate, ModelChoice, PlanRequest
from shardnet.wire.schema import StreamLayers as StreamLayersWanted

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?", re.IGNORECASE)
_STREAM_LAYERS: Final = re.compile(r"(auto|off|[0-9]{1,4})?")
_UNITS: Final = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="PATH|ORG/NAME[:GGUF]",
        help="Checkpoint folder, or a model of the Hugging Face Hub. Nodes that lack it fetch from "
        "one that has it; the head downloads what nobody has. Default: the bundled model.",
        envvar="SHARDNET_MODEL",
        show_default=False,
    ),
]
ModelToCheck = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="PATH",
        help="Say also whether the nodes have this checkpoint, and memory and disk for it.",
        show_default=False,
    ),
]
Nodes = Annotated[
    str,
    typer.Option(
        "--nodes",
        metavar="H:P,H:P",
        help="Exactly these nodes, in this order; the first is the head.",
        envvar="SHARDNET_NODES",
        show_default=False,
    ),
]
Local = Annotated[
    int,
    typer.Option(
        "--local",
        metavar="N",
        min=0,
        help="Start N node processes on this machine for this run.",
        envvar="SHARDNET_LOCAL",
        show_default=False,
    ),
]
Layers = Annotated[
    str,
    typer.Option(
        "--layers",
        metavar="0-8,8-12",
        help="Layer ranges of the stages, half-open, in ring order.",
        envvar="SHARDNET_LAYERS",
        show_default=False,
    ),
]
Context = Annotated[
    int,
    typer.Option(
        "--context",
        metavar="N",
        min=0,
        help="Positions of one sequence. Default: the smaller of the model's and 8192.",
        envvar="SHARDNET_CONTEXT",
        show_default=False,
    ),
]
DTypeName = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="auto|bfloat16|float16|float32",
        help="What the ring computes in.",
        envvar="SHARDNET_DTYPE",
    ),
]
WireDTypeName = Annotated[
    str,
    typer.Option(
        "--wire-dtype",
        metavar="bfloat16|float16|int8",
        help="Round activations for slow links; `plan` shows the error. Default: round nothing.",
        envvar="SHARDNET_WIRE_DTYPE",
        show_default=False,
    ),
]
QuantName = Annotated[
    str,
    typer.Option(
        "--quant",
        metavar="none|int8|int4",
        help="Round weights at load: about a half or a quarter of the memory, and faster.",
        envvar="SHARDNET_QUANT",
    ),
]
KvDTypeOption = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        metavar="auto|int8",
        help="Round keys and values: about half the memory of a long context.",
        envvar="SHARDNET_KV_DTYPE",
    ),
]
StreamLayers = Annotated[
    str,
    typer.Option(
        "--stream-layers",
        metavar="auto|N",
        help="Read layers from disk at every step: N of each stage, or as few as make it fit.",
        envvar="SHARDNET_STREAM_LAYERS",
        show_default=False,
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        "--threads",
        metavar="N",
        min=0,
        help="Compute threads per node. Default: its share of the machine's cores.",
        envvar="SHARDNET_THREADS",
        show_default=False,
    ),
]
Optimise = Annotated[
    str,
    typer.Option(
        "--optimise",
        metavar="latency|throughput",
        help="Plan for the speed of one sequence (default), or of many at once.",
        envvar="SHARDNET_OPTIMISE",
        show_default=False,
    ),
]
Peer = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="H:P",
        help="A node on the network to ask or to link to; may be given several times.",
        envvar="SHARDNET_PEER",
        show_default=False,
    ),
]
NoMdns = Annotated[
    bool,
    typer.Option(
        "--no-mdns",
        help="Neither announce nor look for nodes by mDNS.",
        envvar="SHARDNET_NO_MDNS",
    ),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="Download nothing from the Internet. Nodes that run already decide for themselves.",
        envvar="SHARDNET_OFFLINE",
    ),
]
KeyFile = Annotated[
    str,
    typer.Option(
        "--key-file",
        metavar="F",
        help="Where the cluster key is. Default: cluster.key beside the configuration.",
        envvar="SHARDNET_KEY_FILE",
        show_default=False,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Use no cluster key: links are neither encrypted nor authenticated.",
        envvar="SHARDNET_INSECURE",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def keep_offline(wanted: bool) -> None:
    """Have this process, and nodes that it starts, download nothing if that is `wanted`."""
    if wanted:
        os.environ["HF_HUB_OFFLINE"] = "1"


def parse_size(text: str, flag: str) -> int:
    """Read `8GiB`, `500MB` or a number of bytes. Raises typer.BadParameter, which names `flag`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"'{text}' is not a size such as 8GiB", param_hint=flag)
    return int(float(match[1]) * _UNITS[(match[2] or "B").lower()])


def split_nodes(text: str) -> list[str]:
    """Read `H:P,H:P`."""
    return [part.strip() for part in text.split(",") if part.strip()]


def model_choice(
    *,
    model: str,
    nodes: str,
    layers: str,
    context: int,
    dtype: str,
    wire_dtype: str,
    quant: str,
    kv_dtype: str,
    stream_layers: str,
    threads: int,
    optimise: str,
) -> ModelChoice:
    """Put the shared options together. Raises typer.BadParameter for a value that is none."""
    if optimise not in ("", "latency", "throughput"):
        raise typer.BadParameter(
            f"'{optimise}': choose latency or throughput", param_hint="--optimise"
        )
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise typer.BadParameter(
            f"'{dtype}': choose auto, bfloat16, float16 or float32", param_hint="--dtype"
        )
    if wire_dtype not in ("", "bfloat16", "float16", "int8"):
        raise typer.BadParameter(
            f"'{wire_dtype}': choose bfloat16, float16 or int8", param_hint="--wire-dtype"
        )
    if quant not in ("none", "int8", "int4"):
        raise typer.BadParameter(f"'{quant}': choose none, int8 or int4", param_hint="--quant")
    if kv_dtype not in ("auto", "int8"):
        raise typer.BadParameter(f"'{kv_dtype}': choose auto or int8", param_hint="--kv-dtype")
    if not _STREAM_LAYERS.fullmatch(stream_layers):
        raise typer.BadParameter(
            f"'{stream_layers}': choose auto or a number of layers", param_hint="--stream-layers"
        )
    try:
        ranges = parse_layers(layers) if layers else ()
    except UsageError as error:
        raise typer.BadParameter(str(error), param_hint="--layers") from error
    return ModelChoice(
        model=name_model(model),
        nodes=split_nodes(nodes),
        layers=[(part.start, part.end) for part in ranges],
        context=context,
        dtype=dtype,
        wire_dtype=wire_dtype,
        threads=threads,
        optimise=optimise,  # type: ignore[arg-type]  # checked above
        quant="" if quant == "none" else quant,  # type: ignore[arg-type]  # checked above
        kv_dtype=kv_dtype,  # type: ignore[arg-type]  # checked above
        stream_layers=_stream_layers(stream_layers),
    )


def _stream_layers(text: str) -> StreamLayersWanted:
    """Read a text that _STREAM_LAYERS matches."""
    return "auto" if text == "auto" else int(text) if text.isdecimal() else 0


def check_sendable(message: Generate | PlanRequest) -> None:
    """Raise typer.BadParameter for values that the protocol has no room for."""
    try:
        check_request(message)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
