# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Chat templates with generation marks, for models whose own template has none."""

from __future__ import annotations

import copy

from jaxrl_llm.errors import ModelError
from jaxrl_llm.text.files import read_text, user_path
from jaxrl_llm.text.tokenizer import Tokenizer

_NO_CALLS = (
    "{% if message['tool_calls'] %}{{ raise_exception('it writes no calls of tools') }}{% endif %}"
)
_CHATML_TURNS = (
    "{% for message in messages %}" + _NO_CALLS + "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SMOLLM_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

CHAT_TEMPLATES: dict[str, str] = {
    # Turns between <|im_start|> and <|im_end|>.
    "chatml": _CHATML_TURNS,
    # The same with the system message that SmolLM2 writes where there is none.
    "smollm2": "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\n" + _SMOLLM_SYSTEM + "<|im_end|>\\n' }}{% endif %}" + _CHATML_TURNS,
    # For models without special turn tokens: roles as words, and the end token after each reply.
    "plain": "{{ bos_token }}{% for message in messages %}"
    + _NO_CALLS
    + "{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
}
"""Name → template; `with_template` takes these names and paths of jinja files."""


def with_template(tokenizer: Tokenizer, name: str | None) -> Tokenizer:
    """The tokenizer with another chat template, which an export then carries too.

    Args:
        name: a row of `CHAT_TEMPLATES`, the path of a jinja file, or None for the model's own.

    Raises:
        ModelError: no such row and no such file, or one that is not UTF-8.
    """
    if name is None:
        return tokenizer
    template = CHAT_TEMPLATES.get(name)
    if template is None:
        path = user_path(name)
        if path is None or not path.is_file():
            raise ModelError(
                "there is no such chat template",
                got=f"{name!r:.100}",
                expected="a jinja file, or one of " + ", ".join(CHAT_TEMPLATES),
            )
        template = read_text(path)
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed
