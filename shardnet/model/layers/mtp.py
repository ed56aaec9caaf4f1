"""The layer behind the last one, which predicts a further token (MTP, arXiv 2412.19437).

Knows its maths by DeepSeek-V3's parameter names. Must not know slots' owners, files or sampling.

At position p it joins the model's output there, after the final norm, with the embedding of the
token at p + 1, and gives the token at p + 2. For one further on it is applied again, to its own
output. Its keys and values are those of one more layer of the stage.

With several residual streams it may take each of them as the last layer gives it, join it with the
embedding, and give streams itself, which a mixer of its own joins before the head (DeepSeek-V4).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.streams import StreamHead
from shardnet.model.layers.weight_source import WeightSource


class MtpLayer:
    """Norms of both inputs, what joins them, a decoder layer, the norm before the head.

    Both are joined by one linear, or with a `head` of streams by one for the embedding and one for
    each stream. `index` is the layer's number within the stage. `embed` looks tokens [T] up: [T,
    E]; `project` applies the model's LM head: [R, E] to [R, V].
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        layer: Layer,
        index: int,
        rotary: Rotary,
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
    ) -> None:
        """Take its own parameters; those of the `layer` are taken."""
        prefix = f"model.layers.{config.n_layers}"
        has_streams = config.layer_streams(config.n_layers) is not None

        def norm(name: str) -> Norm:
            return weights.norm(f"{prefix}.{name}", config.norm_eps, config.norm_offset)

        self.index = index
        self.rotary = rotary
        self.embed = embed
        self.embedding_norm = norm("enorm")
        self.hidden_norm = norm("hnorm")
        self.joins = tuple(
            weights.linear(f"{prefix}.{name}")
            for name in (("e_proj", "h_proj") if has_streams else ("eh_proj",))
        )
        self.layer = layer
        head = StreamHead(config, weights, f"{prefix}.hc_head") if has_streams else None
        self.head = head
        self.norm = None if head is not None and head.norms else norm("shared_head.norm")
        self.project = project

    def __call__(self, rows: Tensor, step: ForwardStep) -> Tensor:
        """Run rows through it: [T, E] in and out, each after a norm, or [T, N x E] of N streams.

        `rows` are the outputs at the step's positions, and the step's token ids those of the
        positions after them.
        """
        embedded = self.embedding_norm(self.embed(step.token_ids))
        normed = self.hidden_norm(rows.view(-1, self.hidden_norm.weight.shape[0])).view_as(rows)
        if self.head is None:
            [join] = self.joins
            joined = join(torch.cat((embedded, normed), -1))
        else:
            of_token, of_stream = self.joins
            streams = of_stream(normed.view(-1, embedded.shape[1])).view(len(rows), -1)
            joined = streams + of_token(embedded).repeat(1, self.head.count)
        hidden = self.layer(joined, self.index, self.rotary.at(step.positions), step)
        return self.norm(hidden) if self.head is None and self.norm is not None else hidden

    def logits(self, rows: Tensor) -> Tensor:
        """Apply the LM head to rows that it has given: [R, E] to [R, V]."""
        if self.head is not None:
            rows = self.head(rows)
            rows = rows if self.norm is None else self.norm(rows)
        return self.project(rows)
