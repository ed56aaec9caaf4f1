"""What the outputs of requests must match: compiled and followed on threads of their own.

Knows the two threads. Must not know how a grammar is compiled or a mask made.
"""

from __future__ import annotations

from shardnet.constraints import Constraint
from shardnet.errors import UsageError
from shardnet.runtime.engine.guide import Constrained
from shardnet.runtime.stage.executor import Executor
from shardnet.tokenizers.grammar.grammars import Grammars


class Constraints:
    """Makes what constrains the output of a request.

    A constraint that is slow to compile delays those behind it, and no other request.
    """

    def __init__(self) -> None:
        self._compiler = Executor("constraints")
        self._masks = Executor("masks")

    async def constrained(
        self, constraint: Constraint | None, grammars: Grammars | None
    ) -> Constrained | None:
        """Compile a constraint; None for none. `grammars` are those of the model.

        Raises UsageError where the model has no tokenizer, and what Grammars.matcher raises.
        """
        if constraint is None:
            return None
        if grammars is None:
            raise UsageError(
                "constraint: the model has no tokenizer, so its output has no text to constrain",
                remedy="leave the constraint out, or take another model",
            )
        matcher = await self._compiler.run(lambda: grammars.matcher(constraint))
        return Constrained(matcher=matcher, thread=self._masks)

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()
        self._masks.close()
