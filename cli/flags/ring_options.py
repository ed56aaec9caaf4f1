"""Which model, on which nodes, how, and whom to ask: the flags of every command that uses a ring.

Knows each flag once, and its field in a message. Must not know what is asked of the ring.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import typer
from msgspec import structs

from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.errors import UsageError
from shardnet.files import expanded
from shardnet.model.shards.cut import MAX_SHARDS
from shardnet.slot_operations import MAX_ADAPTERS
from shardnet.types import parse_layers, parse_wires, whole_number
from shardnet.wire.messages.plans import AdapterScale, ModelChoice, NamedAdapter

from .config import model_names, one_of
from .options import (
    Access,
    IgnoreUnknownConfig,
    ModelFolder,
    Nodes,
    NoMdns,
    Offline,
    Peer,
    Search,
    Tailnet,
    check_addresses,
    check_choices,
    check_model,
    flag,
    keep_model_folders,
    keep_offline,
    split_nodes,
)

_ADAPTER_NAME: Final = re.compile(r"[\w.+-]{1,64}")
_STREAM_LAYERS: Final = re.compile(r"(auto|off|[0-9]{1,4})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The ring that a command asks for, and where to look for a node.

    `local` node processes are started for this run; `search` says how nodes may be looked for.
    Nodes of this run keep `prefix_cache_bytes` of finished prompts on disk.
    """

    choice: ModelChoice
    local: int
    peers: Sequence[str]
    search: Search
    access: Access
    prefix_cache_bytes: int = 0

    def adapted(self) -> Wanted:
        """Let every request have the adapters of --lora, for commands that cannot choose."""
        used = [AdapterScale(adapter.name, 1.0) for adapter in self.choice.adapters]
        return replace(self, choice=structs.replace(self.choice, used_adapters=used))


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOptions:
    """The flags, in the order in which --help shows them. "" and 0 where one was not given."""

    model: str = flag(
        DEFAULT_MODEL_NAME,
        "--model PATH|NAME",
        "Checkpoint folder, GGUF file, name or part of one that `shardnet models` lists, or a "
        "model of the Hugging Face Hub, ORG/NAME[:GGUF]. Nodes without it fetch it from one "
        "that has it, else from the Hub. Default: the bundled model.",
        env=True,
        words=model_names,
        hides_default=True,
    )
    nodes: Nodes = ""
    local: int = flag(
        0,
        "--local N",
        "Start N node processes on this machine for this run.",
        env=True,
        min=0,
        hides_default=True,
    )
    peer: Peer = None
    no_mdns: NoMdns = False
    tailnet: Tailnet = False
    offline: Offline = False
    model_folder: ModelFolder = None
    layers: str = flag(
        "",
        "--layers 0-8,8-12",
        "Layers of each stage in ring order; 0-8 are the layers 0 to 7.",
        env=True,
    )
    context: int = flag(
        0,
        "--context N",
        "Most tokens of one sequence. Default: the smaller of the model's and 8192.",
        env=True,
        min=0,
        hides_default=True,
    )
    dtype: str = flag(
        "auto",
        "--dtype auto|bfloat16|float16|float32",
        "Data type that the ring computes in.",
        env=True,
    )
    wire_dtype: str = flag(
        "",
        "--wire-dtype bfloat16|float16|int8|LINK=…",
        "Quantise activations on every link, or on those named: slow=int8, 0-1=int8, "
        "desk-pi=int8, gather=int8 for parts of layers; `plan` measures the error. Default: "
        "the ring's dtype.",
        env=True,
        words=one_of("bfloat16", "float16", "int8", "slow=int8"),
    )
    arith: str = flag(
        "auto",
        "--arith auto|portable|fast",
        "How CPUs compute: portable gives the same bits on all, fast uses bfloat16 "
        "instructions. Default: portable where the ring's CPUs are unlike.",
        env=True,
    )
    quant: str = flag(
        "none",
        "--quant none|int8|int4",
        "Quantise weights at load: about half the memory with int8, a quarter with int4, which "
        "costs quality; and faster.",
        env=True,
    )
    kv_dtype: str = flag(
        "auto",
        "--kv-dtype auto|int8",
        "Quantise keys and values: about half the memory of a long context.",
        env=True,
    )
    mmproj: str = flag(
        "",
        "--mmproj FILE",
        "GGUF that reads pictures for the model, on the ring's first node. Default: the one "
        "beside the model's.",
        env=True,
    )
    mtp: bool = flag(
        False,
        "--mtp",
        "Load the layer of the model that predicts further tokens, for --speculate mtp, which "
        "asks for it too, and auto.",
        env=True,
    )
    stream_layers: str = flag(
        "",
        "--stream-layers auto|N",
        "Read layers from disk at every step: N of each stage, or as few as make it fit.",
        env=True,
    )
    ignore_unknown_config: IgnoreUnknownConfig = False
    threads: int = flag(
        0,
        "--threads N",
        "Compute threads per node. Default: its share of the machine's cores.",
        env=True,
        min=0,
        hides_default=True,
    )
    optimise: str = flag(
        "",
        "--optimise latency|throughput",
        "Plan for the speed of one sequence (default), or of many at once: then nodes may make "
        "several rings, each with the whole model, behind one head.",
        env=True,
    )
    standby: str = flag(
        "kv",
        "--standby kv|auto|off",
        "Nodes with memory to spare follow a neighbour's KV cache while a long prompt is read and "
        "answered, to load its layers and go on in its place when it is lost; with auto they hold "
        "its layers from the start.",
        env=True,
    )
    nodes_per_stage: str = flag(
        "auto",
        "--nodes-per-stage auto|N",
        "How many nodes share each layer, over a fast network: auto where no nodes are named "
        "and it was measured to pay.",
        env=True,
        words=one_of("auto", "1", "2"),
    )

    lora: list[str] | None = flag(
        None,
        "--lora NAME=PATH",
        "Load a LoRA adapter, a PEFT folder or a GGUF file on the ring's first node, for "
        "requests that name it; can be repeated.",
        env=True,
    )

    def wanted(self, access: Access) -> Wanted:
        """Make the request to open a ring. Raises typer.BadParameter for a wrong value."""
        keep_offline(self.offline)
        keep_model_folders(self.model_folder)
        return Wanted(
            choice=self.choice(),
            local=self.local,
            peers=check_addresses(self.peer),
            search=Search(no_mdns=self.no_mdns, tailnet=self.tailnet),
            access=access,
        )

    def choice(self) -> ModelChoice:
        """Make the choice of model that is sent. Raises typer.BadParameter for a wrong value."""
        check_choices(self)
        _check_wires(self.wire_dtype)
        return ModelChoice(
            model=check_model(self.model, "--model"),
            nodes=split_nodes(self.nodes),
            layers=_ranges(self.layers),
            context=self.context,
            dtype=self.dtype,
            wire_dtype=self.wire_dtype,
            threads=self.threads,
            optimise=self.optimise,  # type: ignore[arg-type]  # checked above
            quant="" if self.quant == "none" else self.quant,  # type: ignore[arg-type]  # checked
            kv_dtype=self.kv_dtype,  # type: ignore[arg-type]  # checked above
            stream_layers=_n_streamed(self.stream_layers),
            ignore_unknown_config=self.ignore_unknown_config,
            arith=self.arith,  # type: ignore[arg-type]  # checked above
            standby="" if self.standby == "off" else self.standby,  # type: ignore[arg-type]  # checked
            mtp=self.mtp,
            nodes_per_stage=_nodes_per_stage(self.nodes_per_stage),
            adapters=_adapters(self.lora or []),
            mmproj=str(expanded(self.mmproj).absolute()) if self.mmproj else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineRingOptions(RingOptions):
    """The flags of a command that has no --offline."""

    offline: bool = False


def _ranges(layers: str) -> list[tuple[int, int]]:
    try:
        return [(part.start, part.end) for part in parse_layers(layers)] if layers else []
    except UsageError as error:
        raise typer.BadParameter(str(error), param_hint="--layers") from error


def _adapters(named: Sequence[str]) -> list[NamedAdapter]:
    """Read the values of --lora; a relative path is made absolute."""
    adapters: list[NamedAdapter] = []
    for text in named:
        name, has_path, path = text.partition("=")
        if not has_path or not path or not _ADAPTER_NAME.fullmatch(name):
            raise typer.BadParameter(
                f"'{text}': give NAME=PATH, the name of letters, digits and . _ + -",
                param_hint="--lora",
            )
        if any(name == known.name for known in adapters):
            raise typer.BadParameter(f"two adapters are called {name}", param_hint="--lora")
        adapters.append(NamedAdapter(name, str(expanded(path).absolute())))
    if len(adapters) > MAX_ADAPTERS:
        raise typer.BadParameter(
            f"{len(adapters)} adapters, a ring has at most {MAX_ADAPTERS}", param_hint="--lora"
        )
    return adapters


def _check_wires(text: str) -> None:
    try:
        parse_wires(text)
    except UsageError as error:
        raise typer.BadParameter(str(error), param_hint="--wire-dtype") from error


def _nodes_per_stage(text: str) -> int:
    if text == "auto":
        return 0
    n_nodes = whole_number(text)
    if n_nodes is None or not 1 <= n_nodes <= MAX_SHARDS:
        raise typer.BadParameter(
            f"'{text:.40}': choose auto or a number from 1 to {MAX_SHARDS}",
            param_hint="--nodes-per-stage",
        )
    return n_nodes


def _n_streamed(text: str) -> int | Literal["auto"]:
    if not _STREAM_LAYERS.fullmatch(text):
        raise typer.BadParameter(
            f"'{text}': choose auto or a number of layers", param_hint="--stream-layers"
        )
    return "auto" if text == "auto" else int(text) if text.isdecimal() else 0
