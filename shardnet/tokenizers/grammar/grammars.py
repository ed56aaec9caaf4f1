"""The grammars of one model's requests: compiled apart first, then here, each once.

Blocks: for threads that may wait. Must not know requests.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardnet.constraints import Constraint
from shardnet.tokenizers.token_table import TokenTable

if TYPE_CHECKING:  # llguidance is imported by the first request that needs it
    from llguidance import LLTokenizer

    from shardnet.tokenizers.grammar.compile_process import CompileProcess
    from shardnet.tokenizers.grammar.matcher import GrammarMatcher

_MOST_KEPT = 8
"""Compiled grammars: programs send the same schema again and again."""


class Grammars:
    """Makes matchers for the tokens of one model. Thread-safe. To be closed: it has a process.

    `n_ids` is the width of the LM head, `eos_ids` are the tokens that may end an output.
    """

    def __init__(self, table: TokenTable, *, n_ids: int, eos_ids: Sequence[int]) -> None:
        self._table = table
        self._n_ids = n_ids
        self._eos_ids = tuple(eos_ids)
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
            kept = self._kept.pop(constraint, None)
            if kept is None:
                kept = self._compile(constraint)
            self._kept[constraint] = kept
            while len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            return kept.copy()

    def close(self) -> None:
        """End the process. Blocks until it has ended."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.close()

    def _compile(self, constraint: Constraint) -> GrammarMatcher:
        from shardnet.tokenizers.grammar.compile_process import CompileProcess
        from shardnet.tokenizers.grammar.matcher import GrammarMatcher
        from shardnet.tokenizers.grammar.vocabulary import Vocabulary

        if self._process is None or self._tokenizer is None:
            vocabulary = Vocabulary.of(self._table, self._n_ids, self._eos_ids)
            self._process = CompileProcess(vocabulary)
            if self._is_closed:
                self._process.close()
            grammar = self._process.grammar(constraint)
            self._tokenizer = vocabulary.tokenizer()
        else:
            grammar = self._process.grammar(constraint)
        return GrammarMatcher.compiled(grammar, self._tokenizer, self._n_ids)
