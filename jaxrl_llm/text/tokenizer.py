# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: a HF folder's tokenizer, or bytes. `gguf_vocabulary.py`: GGUF."""

from __future__ import annotations

import copy
import datetime
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_llm.errors import DataError, ModelError
from jaxrl_llm.text.files import read_json, read_text

__all__ = ["Tokenizer", "bytes_tokenizer", "from_folder", "read_json"]


class Tokenizer:
    """A `tokenizers.Tokenizer` together with what a model's folder says about its special tokens.

    Attributes:
        backend: the tokenizer proper.
        bos_id: the token that begins a text, or None.
        eos_ids: the tokens that end a completion; may be empty.
        pad_id: the token that the folder names for padding, or None. It may equal an EOS id.
        unk_id: the token for what the vocabulary can't spell, or None.
        adds_bos: whether the model expects BOS before plain text.
        chat_template: the jinja template that renders messages, or None.
        settings: `tokenizer_config.json` as it was read; written back on `save`.
        generation: what generation_config.json says beside those ids; an export carries it on.
        rows: rows of the model's embedding, where a model is known; larger ids are refused.
        now: the time that a chat template is told; None: the time when it is rendered.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        unk_id: int | None = None,
        adds_bos: bool = False,
        chat_template: str | None = None,
        settings: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
    ):
        self.backend = backend
        self.bos_id, self.pad_id, self.unk_id = bos_id, pad_id, unk_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.adds_bos = adds_bos and bos_id is not None
        self.chat_template = chat_template
        self.settings, self.generation = dict(settings or {}), dict(generation or {})
        self.rows: int | None = None
        self.now: datetime.datetime | None = None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model may have more rows than that."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. Special tokens that are spelled out in it become their ids.

        Args:
            add_special_tokens: also add what the tokenizer puts around a text, BOS for example.

        Raises:
            DataError: half of a surrogate pair is no character; or the text spells a token for
                which the model has no row.
        """
        try:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            half = re.search("[\ud800-\udfff]", text)
            if half is None:
                raise
            near = text[max(half.start() - 20, 0) : half.end() + 20]
            raise DataError(
                "a text holds half of a surrogate pair, which is no character", got=ascii(near)
            ) from None
        if self.rows is not None and ids and max(ids) >= self.rows:
            raise DataError(
                "a text spells a token for which the model has no row",
                got=f"{self.id_to_token(max(ids))!r}, id {max(ids)}",
                expected=f"ids below {self.rows}",
            )
        return ids

    def for_rows(self, rows: int, source: object) -> Tokenizer:
        """This tokenizer for a model with so many rows of its embedding.

        Tokens that were added to the vocabulary may lie beyond them: some models have them, and
        `encode` refuses the texts that spell one.

        Raises:
            ModelError: the vocabulary itself, or a token that begins or ends texts, lies beyond.
        """
        count = self.backend.get_vocab_size(with_added_tokens=False)
        named = [i for i in (self.bos_id, self.pad_id, self.unk_id, *self.eos_ids) if i is not None]
        if count > rows or max(named, default=0) >= rows:
            raise ModelError(
                f"the tokenizer of {source} has more tokens than the model has rows",
                got=f"{count} tokens and special ids {named}, {rows} rows",
                hint="the tokenizer that the model came with",
            )
        fitted = copy.copy(self)
        fitted.rows = rows
        return fitted

    def at_time(self, now: datetime.datetime) -> Tokenizer:
        """This tokenizer for a run that began at `now`: its templates write that date for good."""
        dated = copy.copy(self)
        dated.now = now
        return dated

    def padding_with(self, index: int) -> Tokenizer:
        """This tokenizer with another token to pad with, which a saved folder then names."""
        padded = copy.copy(self)
        padded.pad_id = index
        padded.settings = {**self.settings, "pad_token": self.id_to_token(index)}
        return padded

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, unknown ids vanish."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its spelling in the vocabulary, or None."""
        return self.backend.token_to_id(token)

    def id_to_token(self, index: int | None) -> str | None:
        """Spelling of a token in the vocabulary, or None."""
        return None if index is None else self.backend.id_to_token(index)

    def save(self, folder: str | pathlib.Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the template, for `transformers`."""
        folder = pathlib.Path(folder)
        self.backend.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.settings,
        }
        first_eos = self.eos_ids[0] if self.eos_ids else None
        named = {"bos": self.bos_id, "eos": first_eos, "pad": self.pad_id, "unk": self.unk_id}
        for name, index in named.items():
            if index is not None:
                settings.setdefault(f"{name}_token", self.id_to_token(index))
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
            settings["chat_template"] = self.chat_template  # where older readers look for it
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def from_folder(folder: str | pathlib.Path) -> Tokenizer:
    """The tokenizer of a HF folder.

    EOS ids come from generation_config.json, else tokenizer_config.json, else config.json.

    Raises:
        ModelError: no tokenizer.json, or a file that can't be read.
    """
    folder = pathlib.Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            "the model folder has no tokenizer.json",
            got=folder,
            hint="transformers' AutoTokenizer.save_pretrained writes it",
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} can't be read as a tokenizer: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    settings = read_json(folder / "tokenizer_config.json")
    sources = {
        folder / name: read_json(folder / name)
        for name in ("generation_config.json", "config.json")
    }
    # Ids from the vocabulary's size on have no text, but maybe a row in the model.
    rows = sources[folder / "config.json"].get("vocab_size")
    size = backend.get_vocab_size(with_added_tokens=True)
    size = max(size, rows) if isinstance(rows, int) and rows < 2**31 else size
    ids = {
        name: _special_ids(backend, settings, sources, name, size, folder)
        for name in ("bos", "eos", "pad", "unk")
    }
    return Tokenizer(
        backend,
        bos_id=next(iter(ids["bos"]), None),
        eos_ids=ids["eos"],
        pad_id=next(iter(ids["pad"]), None),
        unk_id=next(iter(ids["unk"]), None),
        adds_bos=_folder_adds_bos(backend, settings, ids["bos"], folder),
        chat_template=_folder_template(folder, settings),
        settings=settings,
        generation={
            name: value
            for name, value in sources[folder / "generation_config.json"].items()
            if name not in _OWN_GENERATION
        },
    )


def _named_id(backend, settings, name: str, folder: pathlib.Path) -> int | None:
    """A special token in tokenizer_config.json is a string or a serialised AddedToken."""
    value = settings.get(f"{name}_token")
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    if not isinstance(text, str):
        raise _unusable(folder / _SETTINGS, f"{name}_token", value, "a token's text")
    return backend.token_to_id(text)


def _special_ids(
    backend, settings, sources, name: str, size: int, folder: pathlib.Path
) -> tuple[int, ...]:
    """From the first place that tells any: for EOS generation_config.json comes before the name."""
    (first, generation), (second, config) = sources.items()
    named = _named_id(backend, settings, name, folder)
    by_name = () if named is None else (named,)
    if name == "eos":
        found = _read_ids(generation, name, size, first) or by_name
    else:
        found = by_name or _read_ids(generation, name, size, first)
    return found or _read_ids(config, name, size, second)


def _read_ids(
    values: Mapping[str, Any], name: str, size: int, path: pathlib.Path
) -> tuple[int, ...]:
    """The ids under `name`_token_id: none, one or several; −1 is none."""
    attribute = f"{name}_token_id"
    value = values.get(attribute)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not -1 <= i < size:
            raise _unusable(path, attribute, value, f"ids of the vocabulary, 0 .. {size - 1}")
    return tuple(i for i in ids if i >= 0)


def _folder_adds_bos(backend, settings, bos: tuple[int, ...], folder: pathlib.Path) -> bool:
    told = settings.get("add_bos_token")
    if told is not None and not isinstance(told, bool):
        raise _unusable(folder / _SETTINGS, "add_bos_token", told, "true or false")
    if told is not None:
        return told
    return bool(bos) and backend.encode("", add_special_tokens=True).ids[:1] == [bos[0]]


def _folder_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    told = template = settings.get("chat_template")
    if isinstance(told, list) and all(isinstance(entry, dict) for entry in told):
        named = [entry for entry in told if entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if template is not None and not isinstance(template, str):
        expected = "a template, or a list of objects with name and template"
        raise _unusable(folder / _SETTINGS, "chat_template", told, expected)
    return template


def _unusable(path: pathlib.Path, name: str, value: Any, expected: str) -> ModelError:
    return ModelError(
        f"{path} has an unusable value of {name}", got=f"{value!r:.100}", expected=expected
    )


# Of generation_config.json: what an export writes itself.
_OWN_GENERATION = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
_SETTINGS = "tokenizer_config.json"


def bytes_tokenizer() -> Tokenizer:
    """One token per byte (ids 0–255), then `<bos>` 256, `<eos>` 257, `<pad>` 258.

    For tiny models and tests: it spells every text and has nothing to learn.
    """
    # ByteLevel draws each byte as one printable character: the printable bytes of Latin-1 as
    # themselves, the others in order from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    drawn = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in drawn)
    drawn |= {byte: chr(0x100 + order) for order, byte in enumerate(hidden)}
    vocabulary = {drawn[byte]: byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>", "<pad>"]
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
    return Tokenizer(backend, bos_id=256, eos_ids=(257,), pad_id=258)
