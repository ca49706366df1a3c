# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Write (or rewrite) the page of a run: `python -m jaxrl_llm.cli.report runs/grpo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxrl_llm.errors import UserError
from jaxrl_llm.monitor.report import write_report


def main(args: Sequence[str] | None = None) -> int:
    """Write `report.html` of each run directory; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.cli.report", description=__doc__)
    parser.add_argument("run", nargs="+", help="run directory, such as runs/grpo")
    for run in parser.parse_args(args).run:
        try:
            print(write_report(run))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
