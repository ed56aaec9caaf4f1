"""Constraints compiled in a helper process first, which a hostile one may end, but not the node.

Knows the jobs of compile_program.py and their limits. Blocks: for threads that may wait.
"""

from __future__ import annotations

from shardnet.constraints import Constraint
from shardnet.errors import UsageError
from shardnet.guard.helper_process import HelperProcess, JobFailedError, JobLimits
from shardnet.tokenizers.grammar.vocabulary import Vocabulary

LOAD = JobLimits(cpu_s=20, wall_s=120.0, memory_bytes=1 << 30, reply_bytes=1 << 10)
COMPILE = JobLimits(cpu_s=4, wall_s=30.0, memory_bytes=384 << 20, reply_bytes=4 << 20)
"""A schema of 3000 properties takes 1 s and 40 MB. A node takes the same again."""

_MODULE = "shardnet.tokenizers.grammar.compile_program"


class CompileProcess:
    """Compiles constraints for the tokens of one model. Starts its process at the first."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process = HelperProcess(_MODULE)
        self._loaded_in = 0
        """Which of its processes has the tokens: the first is number 1."""

    @property
    def pid(self) -> int | None:
        """The id of the process, None if none runs."""
        return self._process.pid

    def grammar(self, constraint: Constraint) -> str:
        """Return a constraint's grammar for llguidance.

        Raises UsageError with the reason if it cannot be compiled, or not within its limits.
        """
        process = self._process
        try:
            if process.pid is None or self._loaded_in != process.n_started:
                said, block = self._vocabulary.pack()
                process.call("load", {"vocabulary": said}, LOAD, block)
                self._loaded_in = process.n_started
            arguments = {"kind": constraint.kind, "text": constraint.text}
            _, grammar = process.call("compile", arguments, COMPILE)
        except JobFailedError as error:
            raise UsageError(
                f"constraint: the {constraint.kind} cannot be compiled within limits: {error}",
                remedy="make the constraint smaller, or leave it out",
            ) from None
        return grammar.decode()

    def close(self) -> None:
        """End the process."""
        self._process.close()
