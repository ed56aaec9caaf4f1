"""Pretokenizers: how text is split into words before byte-level BPE, for each kind of tokenizer.

Knows the patterns that tokenizers were trained with, as their tokenizer.json files or tiktoken have
them, and their names in GGUF files. Must not know tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import tokenizers
from tokenizers import normalizers, pre_tokenizers

_SHORT_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _cased_words(but: str = "") -> tuple[str, str]:
    """Return patterns of words whose capitals stand first, and last, without some letters."""
    upper, lower = (rf"[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for kind in (r"Lu}\p{Lt", "Ll"))
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+", f"{before}{upper}+{lower}*"


_CAPITALS_FIRST, _CAPITALS_LAST = _cased_words()
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretokenizer:
    """Patterns that split a text, one after another; matches and the text between are words.

    `gpt2_words` splits the result further as GPT-2 does. `composes`: text is NFC-normalized first.
    `whole_words`: a word that is a token is not split, as in tiktoken. `adds_bos`: whether bos is
    prepended by default in GGUF files of this kind.
    """

    patterns: tuple[str, ...] = ()
    gpt2_words: bool = False
    composes: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """Make the normalizer that runs before splitting, or None."""
        return normalizers.NFC() if self.composes else None

    def pre_tokenizer(self, *, prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
        """Make the splitter, which also writes each byte of a word as a printable character.

        Raises ValueError for an invalid pattern.
        """
        try:
            cuts = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in self.patterns]
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(str(error)) from error
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=self.gpt2_words)
        return pre_tokenizers.Sequence([*cuts, bytes_])


GPT2 = Pretokenizer(gpt2_words=True)
DIGITS = Pretokenizer(patterns=(r"\p{N}",), gpt2_words=True)
CL100K = Pretokenizer(
    patterns=("|".join((_SHORT_ENDINGS, _LETTERS, r"\p{N}{1,3}", _SIGNS, _SPACES)),)
)
LLAMA3 = Pretokenizer(patterns=CL100K.patterns, whole_words=True, adds_bos=True)
QWEN2 = Pretokenizer(
    patterns=("|".join((_SHORT_ENDINGS, _LETTERS, r"\p{N}", _SIGNS, _SPACES)),), composes=True
)
QWEN35 = Pretokenizer(
    patterns=(
        "|".join(
            (
                _SHORT_ENDINGS,
                r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                _SPACES,
            )
        ),
    ),
    composes=True,
)
TEKKEN = Pretokenizer(
    patterns=("|".join((_CAPITALS_FIRST, _CAPITALS_LAST, r"\p{N}", _PATHS, _SPACES)),),
    whole_words=True,
    adds_bos=True,
)
O200K = Pretokenizer(
    patterns=(
        "|".join(
            (
                f"{_CAPITALS_FIRST}{_SHORT_ENDINGS}?",
                f"{_CAPITALS_LAST}{_SHORT_ENDINGS}?",
                r"\p{N}{1,3}",
                _PATHS,
                _SPACES,
            )
        ),
    ),
    whole_words=True,
)
KIMI = Pretokenizer(
    patterns=(
        "|".join(
            (
                r"\p{Han}+",
                *(f"{words}{_SHORT_ENDINGS}?" for words in _cased_words(r"&&[^\p{Han}]")),
                r"\p{N}{1,3}",
                _SIGNS,
                _SPACES,
            )
        ),
    ),
    whole_words=True,
)
_UNCASED = r"\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1d400}-\x{1d7ff}"
_CASED = rf"[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{_UNCASED}]]"
"""Letters of two cases, but for small ones of Armenian and Georgian, and those of formulas."""
DEEPSEEK2 = Pretokenizer(
    patterns=(
        r"[\r\n]",
        rf"\s?{_CASED}+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-\ud7ff]+",
        r"\p{N}+",
    )
)
DEEPSEEK3 = Pretokenizer(
    patterns=(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    )
)

SEED_CODER = Pretokenizer(
    patterns=("|".join((_SHORT_ENDINGS, _LETTERS, r"\p{N}", r" ?[^\s\p{L}\p{N}]+", _SPACES)),)
)

PLAIN_QWEN = replace(QWEN2, composes=False)
JAIS2 = Pretokenizer(
    patterns=(
        "|".join(
            (
                *(_SHORT_ENDINGS, _LETTERS, r"\p{N}{1,3}", _SIGNS, r"\s*[\r\n]+"),
                *(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4")),
                r"\s{1,2}(?!\S)|\s{1}",
            )
        ),
    )
)
EXAONE_MOE = Pretokenizer(
    patterns=(
        "|".join(
            (
                _SHORT_ENDINGS,
                r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    )
)
BAILING = Pretokenizer(
    patterns=(
        "|".join(
            (
                r"'(?i:[sdmt]|ll|ve|re)",
                _LETTERS,
                r"\p{N}",
                _SIGNS,
                r"\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    )
)

GGUF_NAMES = {
    "gpt-2": GPT2,
    **dict.fromkeys(("mpt", "jais", "trillion", "granite-docling", "gigachat", "mellum"), GPT2),
    **dict.fromkeys(("falcon3", "falcon-h1", "pixtral", "midm-2.0"), LLAMA3),
    **dict.fromkeys(("exaone", "codeshell", "minerva-7b", "mellum2"), DIGITS),
    **dict.fromkeys(("stablelm2", "solar-open", "grok-2", "megrez", "kormo"), PLAIN_QWEN),
    **dict.fromkeys(("joyai-llm", "hy_v4"), DEEPSEEK3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), BAILING),
    **dict.fromkeys(("glm4", "glm5"), replace(CL100K, whole_words=True)),
    "kanana2": O200K,
    "jais-2": JAIS2,
    "exaone-moe": EXAONE_MOE,
    "phi-2": GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "lfm2": LLAMA3,
    "dbrx": CL100K,
    "smaug-bpe": CL100K,
    "qwen2": QWEN2,
    "qwen35": QWEN35,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
    "gpt-4o": O200K,
    "llama4": O200K,
    "refact": DIGITS,
    "starcoder": DIGITS,
    "command-r": DIGITS,
    "smollm": DIGITS,
    "deepseek-llm": DEEPSEEK2,
    "deepseek-v3": DEEPSEEK3,
    "hunyuan-dense": DEEPSEEK3,
    "hunyuan": replace(QWEN2, whole_words=True),
    "chatglm-bpe": CL100K,
    "exaone4": GPT2,
    "olmo": GPT2,
    "minimax-m2": replace(O200K, whole_words=False),
    "kimi-k2": replace(KIMI, whole_words=False),
    "seed-coder": SEED_CODER,
    "roberta-bpe": GPT2,
    "modern-bert": replace(GPT2, composes=True),
}
"""tokenizer.ggml.pre, as llama.cpp writes it (its src/llama-vocab.cpp)."""
