# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The sandbox on another machine: the same jobs and outcomes as JSON over HTTP.

On the machine with the sandbox:

    SANDBOX_TOKEN=secret python -m jaxrl_llm.rewards.sandbox_http --host=0.0.0.0 --port=8911

In a config: `RemoteSandbox("http://sandbox-host:8911")`, with SANDBOX_TOKEN in the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import hmac
import http.client
import http.server
import json
import os
import socketserver
import time
import urllib.error
import urllib.request

from jaxrl_llm.errors import RewardError, UserError
from jaxrl_llm.rewards.sandbox import NO_CPU_TIME, Job, Limits, Outcome, Runner, Sandbox

_ATTEMPTS = 3
_PAUSE_S = 0.5
_MOST_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class RemoteSandbox:
    """Runs jobs on a sandbox server; takes the place of a `Sandbox`.

    Attributes:
        url: of the server, such as http://sandbox-host:8911.
        token_variable: name of the environment variable with the server's token.
        timeout_s: longest wait for one job; beyond it the outcome is "unavailable".
    """

    url: str
    token_variable: str = "SANDBOX_TOKEN"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise RewardError(
                "the address of a remote sandbox is not a URL",
                got=repr(self.url),
                expected="http://host:port",
            )

    def run(self, job: Job) -> Outcome:
        """Runs a job there; "unavailable" where the server can't be reached or fails.

        Raises:
            RewardError: the server refuses the token, or says that its sandbox can't work.
        """
        outcome = Outcome("unavailable")
        for attempt in range(_ATTEMPTS):
            time.sleep(attempt * _PAUSE_S)
            outcome = self._post(json.dumps(dataclasses.asdict(job)).encode())
            if outcome.status != "unavailable" or outcome.reason == NO_CPU_TIME:
                break
        return outcome

    def _post(self, body: bytes) -> Outcome:
        headers = {"Content-Type": "application/json"}
        headers["Authorization"] = f"Bearer {os.environ.get(self.token_variable, '')}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/run", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                return Outcome(**json.load(response))
        except urllib.error.HTTPError as error:
            if error.code in (401, 422):
                message = error.read(1000).decode("utf-8", "replace")
                raise RewardError(
                    f"the sandbox server at {self.url} refuses",
                    got=message or f"status {error.code}",
                    hint=f"the server's token in the environment variable {self.token_variable}"
                    if error.code == 401
                    else None,
                ) from None
            return Outcome("unavailable", reason=f"the server answered with status {error.code}")
        except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
            return Outcome("unavailable", reason=f"{type(error).__name__}: {error}")


class SandboxServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Answers `POST /run` with the outcome of a job, as long as the token is right.

    Args:
        address: (host, port); port 0 takes a free one, found in `server_address`.
        token: what clients must send; not empty.
        runner: where the jobs run.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], token: str, runner: Runner | None = None):
        if not token:
            raise RewardError("a sandbox server needs a token", hint="SANDBOX_TOKEN=… python -m …")
        self.token, self.runner = token, runner or Sandbox()
        super().__init__(address, _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: SandboxServer

    def do_POST(self) -> None:
        sent = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(sent, f"Bearer {self.server.token}".encode()):
            return self._answer(401, b"wrong token")
        if self.path != "/run":
            return self._answer(404, b"only /run is served")
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= _MOST_BYTES:
                raise ValueError(f"{length} bytes")
            row = json.loads(self.rfile.read(length))
            limits = Limits(**row.pop("limits"))
            job = Job(**{**row, "command": tuple(row["command"]), "limits": limits})
        except (ValueError, TypeError, KeyError, AttributeError, UserError) as error:
            return self._answer(400, f"not a job: {error}".encode())
        try:
            outcome = self.server.runner.run(job)
        except UserError as error:
            return self._answer(422, str(error).encode())
        return self._answer(200, json.dumps(dataclasses.asdict(outcome)).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: a line for every run would bury what matters."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a sandbox for model-written programs.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8911)
    options = parser.parse_args()
    try:
        server = SandboxServer((options.host, options.port), os.environ.get("SANDBOX_TOKEN", ""))
        server.runner.run(Job(("true",)))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"sandbox server on http://{options.host}:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
