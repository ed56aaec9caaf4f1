"""Sentencepiece tokenizers: scored pieces, spaces written as ▁, unknown text as bytes.

Knows how sentencepiece processes text (its normalizer.cc, bpe_model.cc and unigram_model.cc) and
builds a backend with the same ids. Must not know files: sentencepiece_file.py and gguf_tokenizer.py
read pieces from theirs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.added_tokens import MAX_ID, NamedToken, add_tokens
from shardnet.tokenizers.backends.byte_level import check_merges, merges_of

MAX_PIECE_CHARACTERS = 256
"""Limit of a piece; training limits them to 16 by default."""

SPACE = "▁"


class PieceKind(IntEnum):
    """The kind of a piece; numbers as in sentencepiece_model.proto and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The pieces of a tokenizer and the settings that split text into them. Ids index `texts`.

    `where` names file and field in errors. `charsmap` is a compiled normalization, b"" for none.
    `prefix_each_part`: whether a space is prepended to every part of a text between special tokens,
    or to the first only. `merges` are those of a file that has them, the best first; None where
    they follow from the scores. Of texts that occur twice beside them the last one counts.
    """

    where: str
    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    is_unigram: bool = False
    add_dummy_prefix: bool = True
    prefix_each_part: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""
    merges: Sequence[tuple[str, str]] | None = None

    def of_kind(self, *kinds: PieceKind) -> list[str]:
        """List the texts of pieces of the given kinds, by id."""
        return [text for text, kind in zip(self.texts, self.kinds, strict=True) if kind in kinds]


def build_backend(pieces: Pieces, added: Mapping[int, NamedToken]) -> tokenizers.Tokenizer:
    """Make the backend from `pieces` and from added tokens by id.

    Raises CheckpointError, which names the piece, for invalid pieces or settings.
    """
    _check(pieces)
    named = _named_tokens(pieces, added)
    vocabulary = _vocabulary(pieces, named)
    backend = tokenizers.Tokenizer(
        _unigram(pieces, vocabulary) if pieces.is_unigram else _bpe(pieces, vocabulary)
    )
    whitespace = _Whitespace(pieces)
    backend.normalizer = normalizers.Sequence(
        [*_charsmap(pieces), normalizers.Normalizer.custom(whitespace)]
    )
    cutters = [*_first_prefix(pieces), *(_cutter(named, pieces) if pieces.is_unigram else [])]
    if cutters:
        backend.pre_tokenizer = pre_tokenizers.Sequence(cutters)
    backend.decoder = _decoder(pieces)
    add_tokens(backend, named.values())
    whitespace.is_on = True
    return backend


class _Whitespace:
    """A normalizer: spaces become ▁; optionally one is prepended, and duplicates are removed.

    Off, it only writes spaces as ▁: the library normalizes the texts of added tokens with it while
    they are added, and those are not the start of a text.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._collapses = pieces.remove_extra_whitespaces
        self._prefixes = pieces.add_dummy_prefix and pieces.prefix_each_part
        self.is_on = False

    def normalize(self, text: tokenizers.NormalizedString) -> None:
        """Normalize the text in place."""
        if self.is_on and self._collapses:
            text.replace(tokenizers.Regex(r"\A +"), "")
            text.replace(tokenizers.Regex(" {2,}"), " ")
        if self.is_on and self._prefixes and text.normalized:
            text.prepend(SPACE)
        text.replace(" ", SPACE)
        if self.is_on and self._collapses:
            text.replace(tokenizers.Regex(SPACE + r"+\z"), "")


def _check(pieces: Pieces) -> None:
    where = pieces.where
    n_pieces = len(pieces.texts)
    if not 0 < n_pieces <= MAX_ID:
        raise CheckpointError(f"{where}: {n_pieces} pieces; expected 1 to {MAX_ID}")
    for name, values in (("scores", pieces.scores), ("types", pieces.kinds)):
        if len(values) != n_pieces:
            raise CheckpointError(f"{where}: {n_pieces} pieces have {len(values)} {name}")
    for token_id, text in enumerate(pieces.texts):
        if not 0 < len(text) <= MAX_PIECE_CHARACTERS:
            raise CheckpointError(
                f"{where}: piece {token_id} has {len(text)} characters; expected 1 to "
                f"{MAX_PIECE_CHARACTERS}"
            )
        if not math.isfinite(pieces.scores[token_id]):
            raise CheckpointError(
                f"{where}: piece {token_id} {text!r:.80} has the score {pieces.scores[token_id]}"
            )
        if pieces.kinds[token_id] not in PieceKind.__members__.values():
            raise CheckpointError(
                f"{where}: piece {token_id} {text!r:.80} has type {pieces.kinds[token_id]}; known: "
                + ", ".join(f"{kind.value} {kind.name}" for kind in PieceKind)
            )
    used = [t for t, kind in zip(pieces.texts, pieces.kinds, strict=True) if kind != 5]
    if pieces.merges is None and len(set(used)) < len(used):
        text, count = Counter(used).most_common(1)[0]
        raise CheckpointError(f"{where}: the piece {text!r:.80} occurs {count} times")
    n_unknown = len(pieces.of_kind(PieceKind.UNKNOWN))
    if n_unknown > 1 or (pieces.is_unigram and not n_unknown):
        raise CheckpointError(f"{where}: {n_unknown} pieces are the unknown one; expected one")
    _check_bytes(pieces)


def _check_bytes(pieces: Pieces) -> None:
    found = pieces.of_kind(PieceKind.BYTE)
    wanted = {f"<0x{byte:02X}>" for byte in range(256)}
    if found and set(found) != wanted:
        odd = next((text for text in found if text not in wanted), None)
        what = f"{odd!r:.80} is none of <0x00> to <0xFF>" if odd else f"only {len(found)} of 256"
        raise CheckpointError(f"{pieces.where}: byte pieces: {what}")


def _named_tokens(pieces: Pieces, added: Mapping[int, NamedToken]) -> dict[int, NamedToken]:
    """List the tokens to match as a whole: control and user-defined pieces, and added tokens.

    A file may rename a control piece, and change the flags of any. A user-defined piece is matched
    in the normalized text, as in sentencepiece; in a unigram model it is an ordinary piece.
    """
    named = {}
    for token_id, (text, kind) in enumerate(zip(pieces.texts, pieces.kinds, strict=True)):
        if kind in (PieceKind.CONTROL, PieceKind.UNKNOWN):
            named[token_id] = NamedToken(text=text, token_id=token_id, special=True)
        elif kind == PieceKind.USER_DEFINED and not pieces.is_unigram:
            named[token_id] = NamedToken(text=text, token_id=token_id, normalized=True)
    for token_id, token in added.items():
        kind = pieces.kinds[token_id] if token_id < len(pieces.kinds) else PieceKind.UNUSED
        renames = token_id < len(pieces.texts) and token.text != pieces.texts[token_id]
        if renames and kind not in (PieceKind.CONTROL, PieceKind.UNUSED):
            raise CheckpointError(
                f"{pieces.where}: id {token_id} is the piece {pieces.texts[token_id]!r:.80}, and "
                f"{token.text!r:.80} in the files beside it",
                remedy="take both from one checkpoint",
            )
        if kind != PieceKind.USER_DEFINED:
            named[token_id] = token
        elif token.special or not pieces.is_unigram:
            named[token_id] = replace(token, normalized=not pieces.is_unigram)
    return named


def _vocabulary(pieces: Pieces, named: Mapping[int, NamedToken]) -> dict[str, int]:
    """Map texts to ids, without unused pieces."""
    vocabulary = {
        text: token_id
        for token_id, (text, kind) in enumerate(zip(pieces.texts, pieces.kinds, strict=True))
        if kind != PieceKind.UNUSED and token_id not in named
    }
    for token_id, token in named.items():
        if vocabulary.setdefault(token.text, token_id) != token_id:
            raise CheckpointError(
                f"{pieces.where}: {token.text!r:.80} is the piece {vocabulary[token.text]}, and "
                f"has id {token_id} in the files beside it",
                remedy="take both from one checkpoint",
            )
    return vocabulary


def _bpe(pieces: Pieces, vocabulary: dict[str, int]) -> models.BPE:
    scored = zip(pieces.texts, pieces.scores, pieces.kinds, strict=True)
    normal = [(text, score) for text, score, kind in scored if kind == PieceKind.NORMAL]
    if pieces.merges is None:
        ranked = [text for text, _ in sorted(normal, key=lambda piece: -piece[1])]
        merges = merges_of(ranked, set(ranked))
    else:
        merges = list(pieces.merges)
        check_merges(merges, vocabulary, pieces.where)
    unknown = pieces.of_kind(PieceKind.UNKNOWN)
    return models.BPE(
        vocab=vocabulary,
        merges=merges,
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=_falls_back_to_bytes(pieces),
    )


def _unigram(pieces: Pieces, vocabulary: dict[str, int]) -> models.Unigram:
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    if len(texts) != vocabulary[texts[-1]] + 1:
        gap = next(n for n, text in enumerate(texts) if vocabulary[text] != n)
        raise CheckpointError(
            f"{pieces.where}: no piece has id {gap}, which a unigram vocabulary cannot leave out"
        )
    scores = [*_unigram_scores(pieces)[: len(texts)], *(0.0 for _ in texts[len(pieces.texts) :])]
    return models.Unigram(
        vocab=list(zip(texts, scores, strict=True)),
        unk_id=vocabulary[pieces.of_kind(PieceKind.UNKNOWN)[0]],
        byte_fallback=_falls_back_to_bytes(pieces),
    )


def _unigram_scores(pieces: Pieces) -> list[float]:
    """Give user-defined pieces a score above all others (unigram_model.cc, EncodeOptimized).

    There the best score of a piece is at least zero.
    """
    scored = list(zip(pieces.texts, pieces.scores, pieces.kinds, strict=True))
    best = max((score for _, score, kind in scored if kind == PieceKind.NORMAL), default=0.0)
    best = max(best, 0.0)
    return [
        len(text.encode()) * best - 0.1 if kind == PieceKind.USER_DEFINED else score
        for text, score, kind in scored
    ]


def _falls_back_to_bytes(pieces: Pieces) -> bool:
    return PieceKind.BYTE in pieces.kinds


def _charsmap(pieces: Pieces) -> list[normalizers.Normalizer]:
    if not pieces.charsmap:
        return []
    try:
        charsmap = normalizers.Precompiled(pieces.charsmap)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{pieces.where}: precompiled_charsmap: {error}") from error
    for text in pieces.of_kind(PieceKind.USER_DEFINED):
        if charsmap.normalize_str(text) != text:
            raise CheckpointError(
                f"{pieces.where}: the user-defined piece {text!r:.80} is changed by the "
                "normalization, which is not supported"
            )
    return [charsmap]


def _first_prefix(pieces: Pieces) -> list[pre_tokenizers.PreTokenizer]:
    if not pieces.add_dummy_prefix or pieces.prefix_each_part:
        return []
    return [pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)]


def _cutter(named: Mapping[int, NamedToken], pieces: Pieces) -> list[pre_tokenizers.PreTokenizer]:
    """Split texts that spell a control or byte piece.

    A unigram model of the library can match every piece in a text; sentencepiece never matches
    these. (Unknown text on both sides of a split gives two ids here, and one in sentencepiece.)
    """
    rests: dict[str, list[str]] = {}
    for token in named.values():
        if len(token.text) > 1:
            escaped = token.text.replace(" ", SPACE)
            rests.setdefault(escaped[0], []).append(re.escape(escaped[1:]))
    if _falls_back_to_bytes(pieces):
        rests.setdefault("<", []).append("0x[0-9A-F]{2}>")
    if not rests:
        return []
    pattern = "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    return [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")]


def _decoder(pieces: Pieces) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if _falls_back_to_bytes(pieces):
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if pieces.add_dummy_prefix or pieces.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
