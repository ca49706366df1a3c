# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Messages to text by the model's own template, and prompts to tokens.

A template comes with the model, from a stranger: it runs in jinja's immutable sandbox and sees
plain JSON values only. What it can still do is waste time and memory.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxrl_llm.errors import DataError, ModelError
from jaxrl_llm.text.tokenizer import Tokenizer


def render(
    messages: Any, tokenizer: Tokenizer, add_generation_prompt: bool = True, **kwargs: Any
) -> str:
    """The text of a conversation by the tokenizer's chat template.

    Args:
        messages: dicts with at least `role`; the other keys reach the template, None is left out.
        add_generation_prompt: end where the assistant's next message begins.
        **kwargs: further variables of the template: `tools`, `enable_thinking`, …

    Raises:
        ModelError: no template, or it is not valid jinja, fails, or does what it may not.
        DataError: `messages` is not a list of messages, or the template itself refuses it.
    """
    return _render(messages, tokenizer, _GenerationTag, add_generation_prompt, kwargs)


def render_with_spans(
    messages: Any, tokenizer: Tokenizer, **kwargs: Any
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and where in it (characters, end excluded) the assistant speaks:
    what the template puts between `{% generation %}` and `{% endgeneration %}`.

    Raises:
        ModelError, DataError: as `render`; a ModelError too when the template has no such marks.
    """
    if tokenizer.chat_template is not None and not _MARKED.search(tokenizer.chat_template):
        raise ModelError(
            "the chat template does not mark what the assistant says",
            expected="{% generation %} … {% endgeneration %} around the assistant's words",
            hint="a template with marks, or prompt and completion in columns of their own",
        )
    if any(mark in json.dumps(_plain(messages), ensure_ascii=False) for mark in (_OPEN, _CLOSE)):
        raise DataError("a message holds the characters that mark spans", got=repr(_OPEN + _CLOSE))
    text = _render(messages, tokenizer, _MarkingTag, False, kwargs)
    plain, spans, starts = "", [], []
    for piece in _SPAN_EDGE.split(text):
        if piece == _OPEN:
            starts.append(len(plain))
        elif piece == _CLOSE and starts:
            spans.append((starts.pop(), len(plain)))
        elif piece == _CLOSE:
            starts.append(-1)  # for good: no mark is closed before it is opened
            break
        else:
            plain += piece
    if starts or plain != _render(messages, tokenizer, _GenerationTag, False, kwargs):
        raise ModelError(
            "the chat template changes, measures or cuts what it marks as the assistant's words, "
            "so it can't be told which they are",
            expected="{% generation %} … {% endgeneration %} around the words as they are written",
        )
    return plain, _outermost([span for span in spans if span[0] < span[1]])


def _outermost(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of spans that nest or stand side by side, those that lie in no other, from left to right."""
    outer: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not outer or span[0] >= outer[-1][1]:
            outer.append(span)
    return outer


def _render(
    messages: Any,
    tokenizer: Tokenizer,
    tag: type[jinja2.ext.Extension],
    add_generation_prompt: bool,
    kwargs: Mapping[str, Any],
) -> str:
    if tokenizer.chat_template is None:
        raise ModelError(
            "the model has no chat template, so it can't read messages",
            hint="prompts as plain text, an instruction-tuned model, or a file chat_template.jinja "
            "in the model's folder",
        )
    _check_messages(messages)
    special = {
        "bos_token": tokenizer.id_to_token(tokenizer.bos_id) or "",
        "eos_token": tokenizer.id_to_token(tokenizer.eos_ids[0]) if tokenizer.eos_ids else "",
        "pad_token": tokenizer.id_to_token(tokenizer.pad_id) or "",
        "unk_token": tokenizer.id_to_token(tokenizer.unk_id) or "",
    }
    try:
        plain = _plain([_without_none(message) for message in messages])
    except RecursionError:
        raise DataError("a message is nested too deeply", expected="plain JSON") from None
    variables = {
        **_plain({**special, "tools": None, "documents": None, **kwargs}),
        "messages": plain,
        "add_generation_prompt": add_generation_prompt,
        "strftime_now": (tokenizer.now or datetime.datetime.now()).strftime,
    }
    try:
        template = _compile(tokenizer.chat_template, tag)
        text = template.render(**variables)
    except _Refused as error:
        raise DataError(f"the chat template refuses the messages: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template is not valid jinja, line {error.lineno}: {error.message}"
        ) from error
    except jinja2.sandbox.SecurityError as error:
        raise ModelError(f"the chat template does what it may not: {error}") from error
    except Exception as error:  # whatever a stranger's program may raise
        raise ModelError(f"the chat template failed: {type(error).__name__}: {error}") from error
    _check_calls_written(text, template, variables)
    return text


def _check_calls_written(text: str, template: jinja2.Template, variables: dict[str, Any]) -> None:
    """Raises ModelError where messages call tools and the text is the same without the calls."""
    messages = variables["messages"]
    if not any(message.get("tool_calls") for message in messages):
        return
    silent = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages]
    try:
        same = template.render(**{**variables, "messages": silent}) == text
    except Exception:  # it needs the calls, so it reads them
        return
    if same:
        raise ModelError(
            "the chat template leaves out calls of tools",
            got="messages with tool_calls",
            hint="a template that writes them, or messages without",
        )


def encode_prompt(
    text_or_messages: Any, tokenizer: Tokenizer, **kwargs: Any
) -> tuple[list[int], str]:
    """Tokens of a prompt, and the prompt as the model reads it.

    Plain text gets the BOS that the model expects before a text, if it expects one. A conversation
    is rendered by the chat template, which writes BOS itself where it wants one, so none is added.

    Args:
        text_or_messages: a string, or a list of messages for `render`.
        **kwargs: variables of the chat template.

    Raises:
        ModelError, DataError: as `render`.
    """
    if isinstance(text_or_messages, str):
        tokens = tokenizer.encode(text_or_messages)
        if tokenizer.adds_bos and tokens[:1] != [tokenizer.bos_id]:
            assert tokenizer.bos_id is not None
            tokens = [tokenizer.bos_id, *tokens]
        return tokens, text_or_messages
    text = render(text_or_messages, tokenizer, **kwargs)
    return tokenizer.encode(text), text


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError("messages are not a list of messages", got=f"{messages!r:.100}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                "a message is not an object with a role",
                got=f"{message!r:.100}",
                expected='{"role": "user", "content": "…"}',
            )


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    """Interfaces fill in `content=None`; templates know only an absent key."""
    return {key: value for key, value in message.items() if value is not None}


def _plain(value: Any) -> Any:
    """The value rebuilt from exact JSON types, so that no method of anything else is in reach."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_plain(v) for v in value]
    raise DataError("a message holds a value that is not JSON", got=f"{value!r:.100}")


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`: it doesn't take these messages."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant words; it renders as the body."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body).set_lineno(line)]


class _MarkingTag(_GenerationTag):
    """The same, with a private character before and after the body."""

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = parser.stream.current.lineno
        marks = [
            jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]).set_lineno(line)
            for mark in (_OPEN, _CLOSE)
        ]
        return [marks[0], *super().parse(parser), marks[1]]


# From a private plane of Unicode: no text holds them by chance.
_OPEN, _CLOSE = "\U0010fd01", "\U0010fd02"
_SPAN_EDGE = re.compile(f"([{_OPEN}{_CLOSE}])")
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(str(message))


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON; jinja's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.lru_cache(maxsize=8)
def _compile(template: str, tag: type[jinja2.ext.Extension]) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[tag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template)
