"""The grammars of one model's requests: compiled apart first, then here, each once.

Knows the jobs of compile_program.py and their limits. Blocks: for threads that may wait. Must not
know requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from shardnet.constraints import Constraint
from shardnet.errors import UsageError
from shardnet.guard.helper_process import HelperProcess, JobFailedError, JobLimits
from shardnet.tokenizers.token_table import TokenTable
from shardnet.types import remember

if TYPE_CHECKING:  # llguidance is imported by the first request that needs it
    from llguidance import LLTokenizer

    from shardnet.tokenizers.grammar.matcher import GrammarMatcher
    from shardnet.tokenizers.grammar.vocabulary import Vocabulary

_MOST_KEPT = 8
"""Compiled grammars: programs send the same schema again and again."""
LOAD = JobLimits(cpu_s=20, wall_s=120.0, memory_bytes=1 << 30, reply_bytes=1 << 10)
COMPILE = JobLimits(cpu_s=4, wall_s=30.0, memory_bytes=384 << 20, reply_bytes=4 << 20)
"""A schema of 3000 properties takes 1 s and 40 MB. A node takes the same again."""

_MODULE = "shardnet.tokenizers.grammar.compile_program"


class Grammars:
    """Makes matchers for the tokens of one model. Thread-safe. To be closed: it has a process.

    `n_ids` is the width of the LM head, `eos_ids` are the tokens that may end an output, and so are
    those that `turn_ends` finds: it may block.
    """

    def __init__(
        self,
        table: TokenTable,
        *,
        n_ids: int,
        eos_ids: Sequence[int],
        turn_ends: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._table = table
        self._n_ids = n_ids
        self._eos_ids = tuple(eos_ids)
        self._turn_ends = turn_ends
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._process: CompileProcess | None = None
        self._kept: dict[Constraint, GrammarMatcher] = {}
        self._is_closed = False

    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        """Return a matcher at the start of an output.

        The first one makes what all need of the model's tokens. Raises UsageError, with
        llguidance's reason, for a constraint that cannot be compiled or takes more than its limits,
        UnsupportedModelError for a tokenizer whose output cannot be constrained.
        """
        constraint.check()
        with self._lock:
            kept = self._kept.get(constraint) or self._compile(constraint)
            remember(self._kept, constraint, kept, _MOST_KEPT)
            return kept.copy()

    def close(self) -> None:
        """End the process. Blocks until it has ended."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.close()

    def _compile(self, constraint: Constraint) -> GrammarMatcher:
        from shardnet.tokenizers.grammar.matcher import GrammarMatcher
        from shardnet.tokenizers.grammar.vocabulary import Vocabulary

        if self._process is None:
            ends = dict.fromkeys([*self._eos_ids, *sorted(self._turn_ends())])
            vocabulary = Vocabulary.of(self._table, self._n_ids, [*ends])
            self._process = CompileProcess(vocabulary)
            if self._is_closed:
                self._process.close()
        grammar = self._process.grammar(constraint)
        if self._tokenizer is None:
            self._tokenizer = self._process.vocabulary.tokenizer()
        return GrammarMatcher.compiled(grammar, self._tokenizer, self._n_ids)


class CompileProcess:
    """Compiles constraints for the tokens of one model. Starts its process at the first."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
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
                said, block = self.vocabulary.pack()
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
