# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The tokenizer that a GGUF file carries in its metadata, rebuilt.

Two kinds: byte-level BPE with a list of merges (`gpt2`: Llama 3, Qwen, SmolLM2), and SentencePiece
(`llama`: Llama 2, Mistral, Gemma), whose pieces have scores: of all neighbours that form a piece,
those of the best one are merged first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxrl_llm.errors import ModelError
from jaxrl_llm.text.tokenizer import Tokenizer

# Types of entries in the vocabulary; the others (normal, unused) are ordinary entries.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def _byte_level(split: pre_tokenizers.PreTokenizer | None = None) -> pre_tokenizers.PreTokenizer:
    """GPT-2's own splitting, after `split` if given."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return level if split is None else pre_tokenizers.Sequence([split, level])


def _by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Splitting by a pattern alone, then bytes as characters."""
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, level])


# English contractions, words with one leading non-letter, digits, punctuation with the
# line ends after it, line ends, other white space.
def _word_pattern(digits: str) -> str:
    return "|".join(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file carries in its metadata.

    Raises:
        ModelError: a vocabulary type or pre-tokenizer that we don't know, or a damaged vocabulary.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ModelError(
            "the GGUF file's vocabulary is of a type that is not supported",
            got=f"{kind!r:.100}",
            expected=" or ".join(repr(kind) for kind in KINDS),
            hint="the model's HF folder, which carries a tokenizer.json",
        )
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int, default=[1] * len(tokens))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(types) != len(tokens) or len(vocabulary) != len(tokens):
        raise ModelError(
            "the GGUF file's vocabulary is damaged",
            got=f"{len(tokens)} tokens, {len(vocabulary)} different, {len(types)} types",
        )
    try:
        backend, adds_bos = KINDS[kind](metadata, tokens, vocabulary)
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the GGUF file's merges are damaged: {error}") from error
    _add_special(backend, tokens, types)
    return _with_gguf_ids(backend, metadata, tokens, adds_bos_by_default=adds_bos)


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: list[str], vocabulary: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether it adds BOS unless the file says otherwise."""
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ModelError(
            "the GGUF file's pre-tokenizer is not supported",
            got=f"{pre!r:.100}",
            expected="one of " + ", ".join(sorted(PRE_TOKENIZERS)),
            hint="the model's HF folder, which carries a tokenizer.json",
        )
    merges = [tuple(merge.split(" ")) for merge in _list(metadata, "merges", str)]
    model = models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    backend = tokenizers.Tokenizer(model)
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _BOS_BY_DEFAULT


def _scored_pieces(
    metadata: Mapping[str, Any], tokens: list[str], vocabulary: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """As `_byte_level_bpe`. Spaces are "▁"; what no piece spells is spelled in bytes, `<0x0A>`."""
    scores = _list(metadata, "scores", float, default=[])
    if len(scores) != len(tokens):
        raise ModelError(
            "the GGUF file's vocabulary is damaged",
            got=f"{len(tokens)} tokens, {len(scores)} scores",
        )
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    unknown = unknown if isinstance(unknown, int) else -1  # refused by name later
    model = models.BPE(
        vocabulary,
        _merges_by_score(tokens, scores, vocabulary),
        unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefixed = _flag(metadata, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    begin = [normalizers.Prepend("▁")] if prefixed else []
    backend.normalizer = normalizers.Sequence([*begin, spaces])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    parts += [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(parts)
    return backend, True


def _merges_by_score(
    tokens: list[str], scores: Sequence[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best piece first."""
    merges = []
    for index in sorted(range(len(tokens)), key=lambda index: (-scores[index], index)):
        piece = tokens[index]
        ways = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [way for way in ways if way[0] in vocabulary and way[1] in vocabulary]
        merges += sorted(known, key=lambda way: (vocabulary[way[0]], vocabulary[way[1]]))
    return merges


def _list(metadata: Mapping[str, Any], name: str, kind: type, default: Any = None) -> list[Any]:
    """A list of values of one kind, or the default for an absent or empty one."""
    key = f"tokenizer.ggml.{name}"
    values = metadata.get(key)
    if values is None or values == []:
        if default is None:
            raise ModelError(f"the GGUF file's metadata has no {key}")
        return default
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ModelError(
            f"{key} of the GGUF file is unusable",
            got=f"{values!r:.100}",
            expected=f"a list of {kind.__name__}",
        )
    return values


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(
            f"tokenizer.ggml.{name} of the GGUF file is unusable",
            got=f"{value!r:.100}",
            expected="true or false",
        )
    return value


def _add_special(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL):
            special.append(tokenizers.AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(tokenizers.AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _with_gguf_ids(backend, metadata, tokens: list[str], *, adds_bos_by_default: bool) -> Tokenizer:
    def index(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
            raise ModelError(
                f"the GGUF file's {name} token is outside its vocabulary", got=f"{value!r:.100}"
            )
        return value

    bos = index("bos")
    adds_bos = _flag(metadata, "add_bos_token", adds_bos_by_default)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError("the GGUF file's chat template is no text", got=f"{template!r:.100}")
    if adds_bos and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return Tokenizer(
        backend,
        bos_id=bos,
        eos_ids=[i for i in (index("eos"), index("eot"), index("eom")) if i is not None],
        pad_id=index("padding"),
        unk_id=index("unknown"),
        adds_bos=adds_bos,
        chat_template=template,
    )


# What GGUF files call their pre-tokenizer → how it splits a text before the merges.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "llama-bpe": lambda: _by_pattern(_word_pattern(r"\p{N}{1,3}")),
    "qwen2": lambda: _by_pattern(_word_pattern(r"\p{N}")),
}
_WHOLE_WORDS_FIRST = {"llama-bpe"}  # a word that is in the vocabulary is taken whole
_BOS_BY_DEFAULT = {"llama-bpe"}
_COMPOSED = {"qwen2"}  # accents are joined to their letters first (NFC)

# What GGUF files call the kind of their vocabulary.
KINDS: dict[str, Callable[..., tuple[tokenizers.Tokenizer, bool]]] = {
    "gpt2": _byte_level_bpe,
    "llama": _scored_pieces,
}
