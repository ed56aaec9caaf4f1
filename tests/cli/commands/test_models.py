"""Models of several nodes in one table."""

from __future__ import annotations

from shardnet.wire.messages.membership import ListedModel, ModelsListed
from shardnet_cli.commands.models import model_lines, models_json, remarks


def listed(node: str, *models: ListedModel, failure: str = "") -> ModelsListed:
    return ModelsListed(
        request=1, node=f"{node}-id", name=node, models=list(models), failure=failure
    )


def model(name: str, size: int = 2**30, held: int | None = None, **more: object) -> ListedModel:
    held_bytes = size if held is None else held
    fields = {"store": "Ollama", "family": "llama", "form": "Q4_K_M", "context": 4096, "fits": True}
    return ListedModel(name=name, size_bytes=size, held_bytes=held_bytes, **(fields | more))  # type: ignore[arg-type]


LISTS = [
    listed("anna", model("b", fits=False), model("a")),
    listed("bert", model("a", held=2**20), model("b", 2**31), model("c", failure="cut\x1b[1m")),
    listed("cleo", failure="no answer"),
]


def test_a_model_is_shown_once_with_all_nodes_that_have_it() -> None:
    rows = [" ".join(line.split()) for line in model_lines(LISTS, None)]
    assert rows[1:] == [
        "a 1.00 GiB llama Q4_K_M 4096 yes anna, bert (1 MiB of it)",
        "b 1.00 GiB llama Q4_K_M 4096 no anna",
        "b 2.00 GiB llama Q4_K_M 4096 yes bert",
    ]
    assert list(remarks(LISTS)) == [
        "c on bert cannot be used: cut\x1b[1m",
        "cleo does not say which models it has: no answer",
    ]


def test_the_keys_of_json() -> None:
    found = models_json(LISTS)
    assert [(one["name"], one["node_name"]) for one in found["models"]] == [
        ("a", "anna"), ("a", "bert"), ("b", "anna"), ("b", "bert"), ("c", "bert")
    ]  # fmt: skip
    assert found["models"][0] == {
        "name": "a",
        "node": "anna-id",
        "node_name": "anna",
        "store": "Ollama",
        "size_bytes": 2**30,
        "held_bytes": 2**30,
        "family": "llama",
        "kind": "generation",
        "form": "Q4_K_M",
        "context": 4096,
        "fits": True,
        "failure": None,
    }
    assert found["models"][-1]["failure"] == "cut\x1b[1m"
    assert found["silent"] == [{"node": "cleo-id", "node_name": "cleo", "why": "no answer"}]
