# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by the other scripts: finds a Python and makes a virtual environment with the package in it.
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

# make_environment TARGET: what pip installs in editable mode, "." or ".[dev]".
make_environment() {
  if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: $PYTHON is missing or older than 3.11 · try: PYTHON=python3.11 bash $0" >&2
    exit 2
  fi
  if ! "$PYTHON" -m venv "$VENV"; then
    echo "error: $PYTHON can't make $VENV · try: install your system's python3-venv package" >&2
    exit 2
  fi
  echo "installing jaxrl_llm into $VENV ($("$PYTHON" -V)) …"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$1"
}

# need_bubblewrap: the sandbox that the code rewards run model-written programs in.
need_bubblewrap() {
  command -v bwrap >/dev/null && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing bubblewrap …"
    apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null
  else
    echo "error: bwrap is missing · try: sudo apt-get install bubblewrap" >&2
    exit 2
  fi
}
