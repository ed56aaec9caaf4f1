"""The layer behind the last one, which predicts a further token (MTP, arXiv 2412.19437).

Knows its maths by DeepSeek-V3's parameter names. Must not know slots' owners, files or sampling.

At position p it joins the model's output there, after the final norm, with the embedding of the
token at p + 1, and gives the token at p + 2. For one further on it is applied again, to its own
output. Its keys and values are those of one more layer of the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayer:
    """Norms of both inputs, the linear that joins them, a decoder layer, the norm before the head.

    `index` is the layer's number within the stage. `embed` looks tokens [T] up: [T, E]; `project`
    applies the model's LM head: [R, E] to [R, V].
    """

    index: int
    rotary: Rotary
    embed: Callable[[Tensor], Tensor]
    embedding_norm: Norm
    hidden_norm: Norm
    join: Linear
    layer: Layer
    norm: Norm
    project: Callable[[Tensor], Tensor]

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        weights: WeightSource,
        *,
        layer: Layer,
        index: int,
        rotary: Rotary,
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
    ) -> MtpLayer:
        """Take its own parameters; those of the `layer` are taken."""
        prefix = f"model.layers.{config.n_layers}"
        embedding_norm, hidden_norm, norm = (
            weights.norm(f"{prefix}.{name}", config.norm_eps, config.norm_offset)
            for name in ("enorm", "hnorm", "shared_head.norm")
        )
        return cls(
            index=index,
            rotary=rotary,
            embed=embed,
            embedding_norm=embedding_norm,
            hidden_norm=hidden_norm,
            join=weights.linear(f"{prefix}.eh_proj"),
            layer=layer,
            norm=norm,
            project=project,
        )

    def __call__(self, normed: Tensor, step: ForwardStep) -> Tensor:
        """Run rows through it: [T, E] in and out, each after a norm.

        `normed` are the outputs at the step's positions, and the step's token ids those of the
        positions after them.
        """
        embedded = self.embedding_norm(self.embed(step.token_ids))
        joined = self.join(torch.cat((embedded, self.hidden_norm(normed)), -1))
        hidden = self.layer(joined, self.index, self.rotary.at(step.positions), step)
        return self.norm(hidden)
