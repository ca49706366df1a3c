# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""jaxrl_llm: post-train language models with reinforcement learning, in JAX."""

__version__ = "0.1.0"
