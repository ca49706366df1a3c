# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import json
import random

import pytest

from jaxrl_llm.errors import DataError, ModelError
from jaxrl_llm.text.files import user_path
from jaxrl_llm.text.gguf_vocabulary import from_gguf
from jaxrl_llm.text.tokenizer import bytes_tokenizer, from_folder

# A vocabulary small enough to merge by hand; "Ġ" is a space and "Ċ" a line end.
TOKENS = ["<unk>", "<s>", "</s>", "<tool>", "h", "e", "l", "o", "1", "2", "Ġ", "Ċ", "'", "s"]
TOKENS += ["he", "ll", "llo", "hello", "Ġhello", "12", "'s"]
MERGES = ["h e", "l l", "ll o", "he llo", "Ġ hello", "1 2", "' s"]
METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3, 4] + [1] * (len(TOKENS) - 4),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def ids(*tokens):
    return [TOKENS.index(token) for token in tokens]


def test_bytes_spell_every_text():
    tokenizer = bytes_tokenizer()
    text = "plain, naïve, 世界 👍🏽\r\n\t\x00 'll 12"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 259
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (256, (257,), 258)
    assert tokenizer.encode("a<eos>") == [97, 257]
    assert tokenizer.decode([97, 257, 98]) == "a<eos>b"
    assert tokenizer.decode([97, 257, 98], skip_special=True) == "ab"
    assert tokenizer.decode([0xE4, 0xB8]) == "\ufffd"  # half a character


def test_gguf_merges_and_special_tokens():
    tokenizer = from_gguf(METADATA)
    assert tokenizer.encode("hello hello\n12") == ids("hello", "Ġhello", "Ċ", "12")
    assert tokenizer.encode("hello's") == ids("hello", "'s")
    assert tokenizer.encode("</s>hello<tool><s>") == ids("</s>", "hello", "<tool>", "<s>")
    assert tokenizer.decode(ids("</s>", "hello", "<tool>"), skip_special=True) == "hello<tool>"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id) == (1, (2,), 0)
    assert tokenizer.pad_id is None and not tokenizer.adds_bos


def test_gguf_pre_tokenizers_differ_where_they_should():
    by = lambda pre: from_gguf({**METADATA, "tokenizer.ggml.pre": pre})  # noqa: E731
    assert by("smollm").encode(" hello12") == ids("Ġhello", "1", "2")
    assert by("gpt-2").encode(" hello12") == ids("Ġhello", "12")
    # Llama 3 lets a word take the space before it and groups digits by three.
    assert by("llama-bpe").encode(" hello12121") == ids("Ġhello", "12", "1", "2", "1")


def test_qwen2_takes_digits_one_by_one_and_joins_accents():
    accented = [*TOKENS, "Ã©"]
    types = METADATA["tokenizer.ggml.token_type"] + [1]
    merges = [*MERGES, "Ã ©"]
    qwen = {
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*accented, "Ã", "©"],
        "tokenizer.ggml.token_type": [*types, 1, 1],
        "tokenizer.ggml.merges": merges,
    }
    tokenizer = from_gguf({**METADATA, **qwen})
    assert tokenizer.encode(" hello12") == ids("Ġhello", "1", "2")
    assert tokenizer.encode("e\u0301") == [accented.index("Ã©")]


# A SentencePiece vocabulary: pieces with scores, bytes for the rest.
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "ca", "cab", "▁▁", "ba", "▁cab"]
PIECES = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
SCORES = [0.0] * 259 + [-90.0, -91.0, -92.0, -93.0, -30.0, -20.0, -10.0, -25.0, -15.0, -40.0]
SCORES += [-5.0, -50.0, -60.0, -70.0]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def best_merges(text):
    """The rule as it is told: of all neighbours, merge those that form the best piece, leftmost."""
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(a + b, i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        known = [(SCORES[PIECES.index(p)], -i) for p, i in pairs if p in WORDS]
        if not known:
            break
        at = -max(known)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    spelled = [
        [part] if part in WORDS else [BYTES[byte] for byte in part.encode()] for part in parts
    ]
    return [PIECES.index(piece) for pieces in spelled for piece in pieces]


def test_sentencepiece_vocabularies_merge_the_best_piece_first():
    tokenizer = from_gguf(SENTENCEPIECE)
    plain = from_gguf({**SENTENCEPIECE, "tokenizer.ggml.add_space_prefix": False})
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice("aabbcc  é") for _ in range(draw.randint(1, 12)))
        assert tokenizer.encode(text) == best_merges(" " + text), text
        assert plain.encode(text) == best_merges(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert plain.decode(plain.encode(text)) == text
    assert tokenizer.adds_bos and tokenizer.eos_ids == (2,)
    assert tokenizer.encode("abc</s>") == [*best_merges(" abc"), 2]
    assert tokenizer.decode([1, *best_merges(" ab"), 2], skip_special=True) == "ab"


def test_gguf_bos_by_the_file_or_by_the_kind():
    assert from_gguf({**METADATA, "tokenizer.ggml.pre": "llama-bpe"}).adds_bos
    tokenizer = from_gguf({**METADATA, "tokenizer.ggml.add_bos_token": True})
    assert tokenizer.adds_bos
    assert tokenizer.encode("hello") == ids("hello")
    assert tokenizer.encode("hello", add_special_tokens=True) == ids("<s>", "hello")
    quiet = {**METADATA, "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    assert not from_gguf(quiet).adds_bos


def test_gguf_end_of_turn_is_an_eos():
    tokenizer = from_gguf({**METADATA, "tokenizer.ggml.eot_token_id": 3})
    assert tokenizer.eos_ids == (2, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": "llama"}, "21 tokens, 0 scores"),
        ({"tokenizer.ggml.pre": "viking"}, "'viking'"),
        ({"tokenizer.ggml.pre": None}, "None"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["h e", "x y"]}, "merges"),
        ({"tokenizer.ggml.merges": ["h e l"]}, "merges"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "vocabulary"),
        ({"tokenizer.ggml.tokens": ["a"] * len(TOKENS)}, "vocabulary"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos"),
        ({"tokenizer.ggml.bos_token_id": 1.0}, "bos"),
        ({"tokenizer.ggml.bos_token_id": True}, "bos"),
        ({"tokenizer.ggml.token_type": 3}, "token_type"),
        ({"tokenizer.ggml.token_type": ["1"] * len(TOKENS)}, "token_type"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokens"),
        ({"tokenizer.ggml.tokens": [[1]]}, "tokens"),
        ({"tokenizer.ggml.merges": 5}, "merges"),
        ({"tokenizer.ggml.model": ["gpt2"]}, "gpt2"),
        ({"tokenizer.ggml.pre": ["smollm"]}, "smollm"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token"),
        ({"tokenizer.chat_template": 5}, "chat template"),
    ],
)
def test_gguf_vocabularies_that_are_refused(change, said):
    with pytest.raises(ModelError, match=said):
        from_gguf({**METADATA, **change})


def test_folder_round_trip_keeps_everything(tmp_path):
    tokenizer = from_gguf({**METADATA, "tokenizer.ggml.add_bos_token": True})
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save(tmp_path)
    again = from_folder(tmp_path)
    text = "hello 12\n's <s>"
    assert again.encode(text) == tokenizer.encode(text)
    for name in ("bos_id", "eos_ids", "pad_id", "unk_id", "adds_bos", "chat_template"):
        assert getattr(again, name) == getattr(tokenizer, name), name


def test_settings_of_a_folder_survive(tmp_path):
    bytes_tokenizer().save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 77}))
    from_folder(tmp_path).save(tmp_path)
    assert json.loads(path.read_text())["model_max_length"] == 77


def write_json(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def test_eos_comes_from_the_most_specific_file(tmp_path):
    bytes_tokenizer().save(tmp_path)
    write_json(tmp_path, "config.json", {"eos_token_id": 5, "bos_token_id": 256})
    assert from_folder(tmp_path).eos_ids == (257,)  # tokenizer_config.json before config.json
    write_json(tmp_path, "generation_config.json", {"eos_token_id": [7, 257, 7]})
    assert from_folder(tmp_path).eos_ids == (7, 257)
    write_json(tmp_path, "tokenizer_config.json", {"bos_token": {"content": "<bos>"}})
    write_json(tmp_path, "generation_config.json", {})
    tokenizer = from_folder(tmp_path)
    assert tokenizer.eos_ids == (5,)
    assert (tokenizer.bos_id, tokenizer.pad_id) == (256, None)


def test_bos_by_setting_or_by_post_processor(tmp_path):
    from_gguf({**METADATA, "tokenizer.ggml.add_bos_token": True}).save(tmp_path)
    assert from_folder(tmp_path).adds_bos
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write_json(tmp_path, "tokenizer_config.json", {**settings, "add_bos_token": False})
    assert not from_folder(tmp_path).adds_bos


def test_several_named_templates_give_the_default(tmp_path):
    bytes_tokenizer().save(tmp_path)
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    write_json(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert from_folder(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert from_folder(tmp_path).chat_template == "file"


def test_truncation_and_padding_of_a_folder_are_off(tmp_path):
    tokenizer = bytes_tokenizer()
    tokenizer.backend.enable_truncation(3)
    tokenizer.backend.enable_padding(length=9)
    tokenizer.save(tmp_path)
    assert from_folder(tmp_path).encode("abcde") == list(b"abcde")


def test_unreadable_folders_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="can't be read as a tokenizer"):
        from_folder(tmp_path)
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    ("file", "attribute", "values"),
    [
        (
            "generation_config.json",
            "eos_token_id",
            ["</s>", [None], [[1]], {}, 10**12, 1.5, True, 999, -2, [1, 259]],
        ),
        ("config.json", "pad_token_id", ["1", 10**12, -5, 259, 10**400]),
        ("tokenizer_config.json", "eos_token", [5, ["<eos>"], {"content": 5}]),
        (
            "tokenizer_config.json",
            "chat_template",
            [5, {}, [1], [{"name": "default", "template": 1}]],
        ),
        ("tokenizer_config.json", "add_bos_token", ["true", 1]),
    ],
)
def test_unusable_values_of_a_folder_are_refused_by_name(file, attribute, values, tmp_path):
    bytes_tokenizer().save(tmp_path)
    if attribute == "pad_token_id":
        write_json(tmp_path, "tokenizer_config.json", {})
    for value in values:
        write_json(tmp_path, file, {attribute: value})
        with pytest.raises(ModelError) as caught:
            from_folder(tmp_path)
        assert f"{file} has an unusable value of {attribute}" in str(caught.value)
        assert len(str(caught.value)) < 500


def test_a_padding_id_of_minus_one_is_none_and_padded_rows_have_ids(tmp_path):
    bytes_tokenizer().save(tmp_path)
    write_json(tmp_path, "tokenizer_config.json", {})
    write_json(
        tmp_path, "config.json", {"pad_token_id": -1, "eos_token_id": 270, "vocab_size": 272}
    )
    tokenizer = from_folder(tmp_path)
    assert (tokenizer.pad_id, tokenizer.eos_ids) == (None, (270,))
    tokenizer.save(tmp_path)


def test_texts_that_are_not_utf8_and_json_without_end_are_refused(tmp_path):
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xe9")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not a text in UTF-8"):
        from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("[" * 200_000)
    with pytest.raises(ModelError, match="not valid JSON"):
        from_folder(tmp_path)


def test_half_of_a_surrogate_pair_is_refused():
    with pytest.raises(DataError, match=r"surrogate.*ud83d"):
        bytes_tokenizer().encode("smile \ud83d!")
    assert len(bytes_tokenizer().encode("\U0001f642")) == 4


def test_a_tokenizer_fits_the_rows_of_its_model():
    tokenizer = bytes_tokenizer()
    assert tokenizer.for_rows(259, "m").encode("<pad>") == [258]
    fitted = from_gguf(METADATA).for_rows(len(TOKENS), "m")
    fitted.backend.add_tokens(["<image>"])  # added beyond the rows, as Gemma 3 has one
    assert fitted.encode("hello") == ids("hello")
    with pytest.raises(DataError, match="<image>"):
        fitted.encode("an <image>")
    with pytest.raises(ModelError, match="more tokens than the model has rows"):
        tokenizer.for_rows(258, "m")
    with pytest.raises(ModelError, match="more tokens than the model has rows"):
        from_gguf(METADATA).for_rows(len(TOKENS) - 1, "m")


def test_paths_that_can_not_be_are_none(tmp_path):
    assert user_path(tmp_path / "none") == tmp_path / "none"
    for name in ("x" * 300, "~nosuchuserhere/x", "a\0b"):
        assert user_path(name) is None


def test_what_else_a_folder_says_about_generation_is_kept(tmp_path):
    bytes_tokenizer().save(tmp_path)
    told = {"eos_token_id": 257, "temperature": 0.6, "top_p": 0.95, "transformers_version": "4.1"}
    write_json(tmp_path, "generation_config.json", told)
    assert from_folder(tmp_path).generation == {"temperature": 0.6, "top_p": 0.95}
    assert bytes_tokenizer().generation == {}
