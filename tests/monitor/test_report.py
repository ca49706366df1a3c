# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The report is one page that needs nothing else, and nothing a run wrote can act in it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import math
import subprocess
import sys

import pytest

from jaxrl_llm.cli import report as command
from jaxrl_llm.errors import RunDirectoryError
from jaxrl_llm.monitor.report import write_report
from jaxrl_llm.monitor.samples import SamplesWriter, visible
from jaxrl_llm.monitor.writers import MetricsWriter

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> ]]> --> <!-- \"'& {{data}}"
    "\x1b[31m\x00\x9b\u202eabc\ud800\u2028"
)


class Page(html.parser.HTMLParser):
    """What a browser would see: elements, their attributes and their text."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        self.texts.setdefault(self._open, []).append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def data(self) -> dict:
        return json.loads(self.texts["script"][0])

    @property
    def text(self) -> str:
        return "\n".join(
            t for tag, ts in self.texts.items() if tag not in ("script", "style") for t in ts
        )


def step_metrics(step: int) -> dict:
    return {
        "reward": 0.2 + step / 100,
        "rewards/answer/mean": 0.2,
        "entropy": 1.0,
        "completions/mean_length": 3.5,
        "completions/min_length": 2,
        "completions/max_length": 4,
        "completions/clipped_ratio": 0.1,
        "grad_norm": 2.0,
        "learning_rate": 1e-5,
        "step_time": 10.0,
        "num_tokens": 100 * step,
        "kl": 0.0,
        "my/own": 1.0,
        "sampling/sampling_logp_difference/mean": 2e-7,
        "sampling/sampling_logp_difference/max": 4e-6,
        "time/sampling": 2.0,
        "time/rewards": 0.1,
        "time/logprobs": 0.0,
        "time/update": 7.0,
    }


def make_run(path, steps=3, samples=True, **more):
    path.mkdir(exist_ok=True)
    metrics, writer = MetricsWriter(path, tensorboard=False), SamplesWriter(path)
    for step in range(1, steps + 1):
        metrics.write(step, step_metrics(step) | more)
        if samples:
            group = {"prompt_id": "34+5", "prompt": "34+5=", "finish_reason": "stop", "length": 3}
            rows = [
                group | {"sample": i, "completion": str(38 + i), "reward": float(i)} for i in (0, 1)
            ]
            writer.write(step, rows)
    metrics.close()
    writer.close()
    return path


def page(run) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_the_page_shows_result_curves_samples_and_settings(tmp_path):
    run = make_run(tmp_path / "grpo", 3)
    (run / "config.json").write_text('{"seed": 7, "algo": {"kl_coef": 0.125}}')
    (run / "command.txt").write_text("python -m jaxrl_llm.train --config=grpo.py")
    (run / "versions.json").write_text('{"jax": "0.10.2"}')
    result = {
        "heldout_before": {"accuracy": 0.25, "well_formed": 0.98},
        "heldout_after": {"eval/accuracy": 0.85, "eval/well_formed": 1.0, "count": 150},
        "steps": 3,
    }
    (run / "result.json").write_text(json.dumps(result))
    (run / "DONE").write_text("")
    seen = page(run)
    for text in (
        "grpo", "done", "25.0%", "85.0%", "+60.0 points", "98.0% → 100.0%", "30s", "kl_coef",
        "0.125", "0.10.2", "--config=grpo.py", "Held-out accuracy on 150 prompts",
    ):  # fmt: skip
        assert text in seen.text, text
    titles = seen.texts["h3"][1:]
    assert titles == [
        "Reward", "Held-out accuracy", "Entropy", "Completion length", "Without signal",
        "Gradient norm", "Learning rate", "Seconds a step", "Sampler against trainer",
        "num_tokens", "my/own",
    ]  # fmt: skip
    assert "KL from the reference" not in titles  # 0 throughout: no reference
    assert seen.count("svg") == len(seen.data["charts"]) == len(titles)
    assert [step["step"] for step in seen.data["samples"]] == [1, 2, 3]
    (group,) = seen.data["samples"][0]["groups"]
    assert group["prompt"] == "34+5="
    assert [s["completion"] for s in group["samples"]] == ["38", "39"]
    assert [s["reward"] for s in group["samples"]] == [0.0, 1.0]
    heldout = seen.data["charts"][1]["series"]
    assert heldout[0]["text"] == ["25.0%", "85.0%"]
    assert heldout[1]["text"] == ["98.0%", "100.0%"]


def test_without_accuracy_the_heldout_reward_tells_the_result(tmp_path):
    run = make_run(tmp_path / "run", 2)
    writer = MetricsWriter(run, tensorboard=False)
    writer.write(0, {"eval/reward": -1.5})
    writer.write(2, {"eval/reward": 0.5})
    writer.close()
    (run / "result.json").write_text('{"heldout_count": 10}')
    seen = page(run)
    for text in ("Held-out reward on 10 prompts", "-1.5", "+2", "before training → step 2"):
        assert text in seen.text, text
    assert "Held-out reward" in seen.texts["h3"]
    assert "Held-out accuracy" not in seen.texts["h3"]
    assert "eval/reward" not in seen.texts["h3"]
    index = seen.texts["h3"][1:].index("Held-out reward")
    assert seen.data["charts"][index]["labels"] == ["step 0", "step 2"]
    assert seen.data["charts"][index]["series"][0]["text"] == ["-1.5", "0.5"]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_short_runs_have_a_page(tmp_path, steps):
    seen = page(make_run(tmp_path / "run", steps))
    assert "not finished" in seen.text
    assert ("No step has been made yet." in seen.text) == (steps == 0)
    assert ("No samples have been written yet." in seen.text) == (steps == 0)
    assert all(len(chart["x"]) == steps for chart in seen.data["charts"])


def test_an_empty_directory_and_damaged_files_have_a_page(tmp_path):
    assert "Not measured yet." in page(tmp_path).text
    for name in ("config.json", "result.json", "versions.json", "metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_bytes(b"\xff\x00{nonsense")
    assert "Not measured yet." in page(tmp_path).text
    (tmp_path / "result.json").write_text(
        '{"heldout_before": 3, "heldout_after": {"accuracy": "x"}}'
    )
    assert "Not measured yet." in page(tmp_path).text


def test_nothing_that_a_run_wrote_acts_in_the_page(tmp_path):
    run = make_run(
        tmp_path / "a&<b>",
        2,
        **{f"rewards/{HOSTILE}/mean": 1.0, HOSTILE: 2.0, "rewards/x/mean": 1.0},
    )
    writer = SamplesWriter(run)
    row = {
        "prompt_id": HOSTILE,
        "sample": 0,
        "prompt": HOSTILE,
        "completion": HOSTILE,
        "reward": 1.0,
    }
    writer.write(
        2,
        [
            row
            | {"parts": {HOSTILE: 1.0, "b": HOSTILE}, "finish_reason": HOSTILE, "length": HOSTILE}
        ],
    )
    writer.write(3, [row | {"reward": None}, row | {"reward": HOSTILE}, {}])
    writer.close()
    (run / "config.json").write_text(json.dumps({HOSTILE: HOSTILE, "a": {HOSTILE: [HOSTILE]}}))
    for name in ("command.txt", "FAILED.txt"):
        (run / name).write_text(HOSTILE, encoding="utf-8", errors="surrogatepass")
    text = write_report(run).read_text(encoding="utf-8")
    seen = Page(text)
    assert seen.count("script") == 2
    assert seen.count("img") == 0
    for tag, attributes in seen.elements:
        assert not {
            a for a in attributes if a.startswith("on") or a in ("src", "href", "action")
        }, tag
    assert visible(HOSTILE) in seen.data["samples"][1]["groups"][1]["samples"][0]["completion"]
    assert all(c in "\n\t" or visible(c) == c for c in text)
    assert "alert(1)" in seen.text  # shown, as text


def test_the_policy_allows_only_the_pages_own_script(tmp_path):
    seen = page(make_run(tmp_path / "run", 1))
    (policy,) = [a["content"] for t, a in seen.elements if t == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(seen.texts["script"][1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    for tag, attributes in seen.elements:
        for name, value in attributes.items():
            assert "http" not in str(value) or name in ("http-equiv", "content"), (tag, name)


def test_values_that_are_not_finite_are_told(tmp_path):
    run = make_run(tmp_path / "run", 2)
    writer = MetricsWriter(run, tensorboard=False)
    writer.write(
        3, step_metrics(3) | {"reward": math.nan, "grad_norm": math.inf, "step_time": math.nan}
    )
    writer.close()
    seen = page(run)
    assert "1 values are not finite (×)." in seen.text
    assert seen.data["charts"][0]["series"][0]["text"] == ["0.21", "0.22", "NaN"]


def test_a_resumed_run_shows_each_step_once(tmp_path):
    run = make_run(tmp_path / "run", 4)
    metrics, samples = MetricsWriter(run, tensorboard=False), SamplesWriter(run)
    metrics.truncate(2)
    samples.truncate(2)
    metrics.write(3, step_metrics(3) | {"reward": 0.9})
    metrics.close()
    seen = page(run)
    assert seen.data["charts"][0]["labels"] == ["step 1", "step 2", "step 3"]
    assert seen.data["charts"][0]["series"][0]["text"][2] == "0.9"
    assert [step["step"] for step in seen.data["samples"]] == [1, 2]


def test_long_runs_stay_small(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": s} | step_metrics(s)) + "\n" for s in range(1, 4001))
    sample = {"prompt_id": "p", "prompt": "q" * 50, "completion": "w" * 9000, "reward": 1.0}
    with (run / "samples.jsonl").open("w") as file:
        for s in range(1, 301):
            file.writelines(json.dumps({"step": s, "sample": i} | sample) + "\n" for i in range(2))
    path = write_report(run)
    assert path.stat().st_size < 2_500_000
    seen = Page(path.read_text())
    steps = [step["step"] for step in seen.data["samples"]]
    assert steps[0] == 1
    assert steps[-1] == 300
    assert len(steps) <= 80
    assert len(seen.data["samples"][0]["groups"][0]["samples"][0]["completion"]) < 3100
    assert len(seen.data["charts"][0]["x"]) < 800


def test_a_missing_directory_is_one_line(tmp_path, capsys):
    with pytest.raises(RunDirectoryError, match="no run directory"):
        write_report(tmp_path / "nowhere")
    assert command.main([str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("error: no run directory")


def test_the_command_writes_the_page(tmp_path):
    run = make_run(tmp_path / "run", 1)
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_llm.cli.report", str(run)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(run / "report.html")
    assert (run / "report.html").stat().st_size > 10_000
    assert not list(run.glob("*.part"))
