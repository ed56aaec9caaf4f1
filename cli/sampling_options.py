"""The options of how text is made, for the commands that make some: `generate` and `chat`.

Knows flags and their help. Must not know what is done with them, but for reading --logit-bias.
"""

from __future__ import annotations

from typing import Annotated

import typer

System = Annotated[
    str,
    typer.Option("--system", metavar="TEXT", help="What a chat model is told beforehand."),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens", min=0, help="Make at most so many tokens; 0 only reads the prompt."
    ),
]
MinTokens = Annotated[
    int, typer.Option("--min-tokens", help="Make no stop id before so many tokens.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", help="0 takes the likeliest token every time.")
]
TopK = Annotated[int, typer.Option("--top-k", help="Draw among the K likeliest tokens; 0 is off.")]
TopP = Annotated[
    float, typer.Option("--top-p", help="Draw among the likeliest tokens that sum up to P.")
]
MinP = Annotated[
    float,
    typer.Option("--min-p", help="Draw among tokens at least P times as likely as the best."),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        metavar="X",
        help="Above 1: make tokens of the prompt and the answer less likely; 1 is off.",
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        "--presence-penalty", metavar="X", help="Lower the logit of tokens of the answer by X."
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        metavar="X",
        help="Lower the logit of tokens of the answer by X each time they come.",
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=X",
        help="Add X, from -100 to 100, to a token's logit; may be given several times.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Draw the same way again. Default: a random seed, reported."),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="STR", help="End before this text.")
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option("--stop-token-id", metavar="ID", min=0, help="End after this token."),
]
Speculate = Annotated[
    str,
    typer.Option(
        "--speculate",
        metavar="off|ngram|PATH",
        help="Guess tokens ahead, several verified at once: by look-up in the text, or by the "
        "small model at PATH on the head.",
        envvar="SHARDNET_SPECULATE",
    ),
]
DraftTokens = Annotated[
    int,
    typer.Option(
        "--draft-tokens",
        metavar="N",
        min=0,
        help="Guess at most N tokens at once. Default: as many as pay.",
        show_default=False,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="The same tokens whoever else is served, with speculation or without; slower.",
    ),
]


def parse_bias(entry: str) -> tuple[int, float]:
    """Read ID=X. Raises typer.BadParameter for anything else."""
    token_id, equals, bias = entry.partition("=")
    try:
        if equals:
            return int(token_id), float(bias)
    except ValueError:
        pass
    raise typer.BadParameter(f"'{entry}' is not ID=X, such as 50=-3.5", param_hint="--logit-bias")
