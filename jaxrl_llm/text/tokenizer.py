# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: a HF folder's tokenizer, or bytes. `gguf_vocabulary.py`: GGUF."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_llm.errors import ModelError


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
    ):
        self.backend = backend
        self.bos_id, self.pad_id, self.unk_id = bos_id, pad_id, unk_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.adds_bos = adds_bos and bos_id is not None
        self.chat_template = chat_template
        self.settings = dict(settings or {})

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model may have more rows than that."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. Special tokens that are spelled out in it become their ids.

        Args:
            add_special_tokens: also add what the tokenizer puts around a text, BOS for example.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

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
    sources = [read_json(folder / name) for name in ("generation_config.json", "config.json")]
    ids = {name: _special_id(backend, settings, sources, name) for name in ("bos", "pad", "unk")}
    eos = _as_ids(sources[0].get("eos_token_id"))
    named = _token_text(settings.get("eos_token"))
    if not eos and named is not None and backend.token_to_id(named) is not None:
        eos = (backend.token_to_id(named),)
    return Tokenizer(
        backend,
        bos_id=ids["bos"],
        eos_ids=eos or _as_ids(sources[1].get("eos_token_id")),
        pad_id=ids["pad"],
        unk_id=ids["unk"],
        adds_bos=_folder_adds_bos(backend, settings, ids["bos"]),
        chat_template=_folder_template(folder, settings),
        settings=settings,
    )


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file.

    Raises:
        ModelError: the file is not JSON, or not an object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object", got=type(value).__name__)
    return value


def _token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json is a string or a serialised AddedToken."""
    return value.get("content") if isinstance(value, dict) else value


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)


def _special_id(backend, settings, sources, name: str) -> int | None:
    text = _token_text(settings.get(f"{name}_token"))
    if text is not None and backend.token_to_id(text) is not None:
        return backend.token_to_id(text)
    found = [ids for source in sources for ids in _as_ids(source.get(f"{name}_token_id"))]
    return found[0] if found else None


def _folder_adds_bos(backend, settings, bos_id: int | None) -> bool:
    if isinstance(settings.get("add_bos_token"), bool):
        return settings["add_bos_token"]
    return bos_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]


def _folder_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template


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
