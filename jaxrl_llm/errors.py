# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The errors that a user can cause or meet, each told as: what · got/expected · try.

A `UserError` is one line on the terminal and exit code 2; everything else is a bug of ours and
keeps its traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user handed over, or a limit of the machine that the user can lift.

    Args:
        what: what is wrong, in one sentence without the final full stop.
        got: what was found, if that helps.
        expected: what would have been right.
        hint: what to try.
    """

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        got: object | None = None,
        expected: object | None = None,
        hint: str | None = None,
    ):
        self.what, self.got, self.expected, self.hint = what, got, expected, hint
        parts = [what]
        if got is not None:
            parts.append(f"got {got}")
        if expected is not None:
            parts.append(f"expected {expected}")
        if hint is not None:
            parts.append(f"try: {hint}")
        super().__init__(" · ".join(" ".join(str(part).split()) for part in parts))


class ConfigError(UserError):
    """A config file or an override is wrong."""


class ModelError(UserError):
    """A model folder or file is missing, damaged, or of a kind that we do not read."""


class DataError(UserError):
    """A prompt source is missing, empty or has the wrong columns."""


class RewardError(UserError):
    """A reward function raised, or returned something that is not a list of finite numbers."""


class RunDirectoryError(UserError):
    """A run directory can't be written, or holds another run."""


class RequestError(UserError):
    """A sampling request can never be served: too long for the context or for the page pool."""


class NonFinite(UserError):
    """A loss or gradient became NaN or infinite; training stopped before the bad update."""


class LostProcess(UserError):
    """Another process of the run died, hangs or can't be reached."""
