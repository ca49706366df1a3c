# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""`report.html`: result, curves, samples and settings of a run as one self-contained page.

It is made from the files of the run directory alone, at any time, also from a run that goes on or
failed. The page fetches nothing, and its policy lets no script run but its own: the text of a model
is hostile, is escaped everywhere, and reaches the script only as data.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import RunDirectoryError
from jaxrl_llm.monitor.charts import Chart, Number, draw, number, smoothing_window
from jaxrl_llm.monitor.curves import Rows, charts, heldout, heldout_key, result_value
from jaxrl_llm.monitor.health import read_alarms
from jaxrl_llm.monitor.progress import duration
from jaxrl_llm.monitor.samples import by_step, cut, read_samples, visible
from jaxrl_llm.monitor.writers import read_metrics

REPORT_FILE = "report.html"
_MOST_STEPS, _MOST_SAMPLES, _MOST_TEXT, _MOST_ALARMS = 80, 32, 3000, 50


def write_report(run_dir: str | os.PathLike[str]) -> pathlib.Path:
    """Write (or rewrite) `report.html` of a run, atomically.

    Returns:
        The path of the page.

    Raises:
        RunDirectoryError: there is no such directory, or it can't be written.
    """
    run_dir = pathlib.Path(run_dir)
    if not run_dir.is_dir():
        raise RunDirectoryError(
            f"no run directory {run_dir}", expected="a directory with metrics.jsonl"
        )
    path = run_dir / REPORT_FILE
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(render(run_dir), encoding="utf-8", newline="\n")
        os.replace(part, path)
    except OSError as error:
        raise RunDirectoryError(f"can't write {path}", got=error.strerror or error) from error
    return path


def render(run_dir: pathlib.Path) -> str:
    """The page of a run, as HTML."""
    rows = read_metrics(run_dir)
    results = _read_json(run_dir / "result.json")
    samples = by_step(read_samples(run_dir))
    shown, others = charts(rows, results)
    cards, extra, points = [], [], []
    for chart in [*shown, *others]:
        svg, hover = draw(chart)
        (cards if len(points) < len(shown) else extra).append(_card(chart, svg, len(points)))
        points.append(hover)
    data = {"charts": points, "samples": _browsed(samples), "reward_range": _reward_range(samples)}
    folder = pathlib.Path(__file__).parent
    script = (folder / "report_page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": _text(run_dir.resolve().name),
        "status": _status(run_dir),
        "command": _text(_read(run_dir / "command.txt")),
        "failure": _failure(run_dir),
        "alarms": _alarms(run_dir),
        "result": _result(rows, results),
        "curves": _cards(cards) if rows else '<p class="card muted">No step has been made yet.</p>',
        "samples": _samples_html(samples),
        "settings": _settings(run_dir, extra),
        "footer": "Made by jaxrl_llm from the files in this run’s directory.",
        "data": _script_json(data),
        "script_hash": f"sha256-{digest}",
        "script": script,
    }
    page = (folder / "report_page.html").read_text(encoding="utf-8")
    # In one pass: what a run wrote may look like a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


# --- curves --------------------------------------------------------------------------------------


def _cards(cards: Sequence[str]) -> str:
    return f'<div class="grid-cards">{"".join(cards)}</div>'


def _card(chart: Chart, svg: str, index: int) -> str:
    drawn = [series for series in chart.series if series.values]
    curves = [series for series in drawn if series.name not in (chart.band or ())]
    now = number(curves[0].values[-1], chart.percent) if curves and chart.kind == "line" else ""
    if len(curves) > 1 and now:
        now = f'<span class="muted">{_text(curves[0].name)}</span> {now}'
    marks = [
        f'<span><i class="c{color}"></i>{_text(series.name)}</span>'
        for color, series in enumerate(chart.series)
        if series.values and series.name not in (chart.band or ())
    ]
    if chart.band:
        marks.append(f'<span><i class="c0 faint"></i>{_text(" to ".join(chart.band))}</span>')
    legend = f'<div class="legend">{"".join(marks)}</div>' if len(marks) > 1 else ""
    notes = [chart.caption]
    window = smoothing_window(max((len(s.values) for s in drawn), default=0)) if chart.smooth else 1
    if window > 1:
        notes.append(f"Bold: mean over {window} steps.")
    broken = sum(not math.isfinite(value) for s in drawn for value in s.values)
    alarm = f'<p class="bad-note">{broken} values are not finite (×).</p>' if broken else ""
    return (
        f'<div class="card chart" data-chart="{index}"><header><h3>{_text(chart.title)}</h3>'
        f'<span class="now">{now}</span></header><p>{_text(" ".join(notes))}</p>'
        f"{alarm}{legend}{svg}</div>"
    )


# --- result -------------------------------------------------------------------------------------


def _result(rows: Rows, results: Mapping[str, Any]) -> str:
    formed = heldout(rows, results, "well_formed").values
    steps = rows[-1]["step"] if rows else 0
    tiles: dict[str, str] = {"steps": str(results.get("steps", steps))}
    spent = [row["step_time"] for row in rows if math.isfinite(row.get("step_time", math.nan))]
    tiles |= {"in training steps": duration(sum(spent))} if spent else {}
    tokens = [row["num_tokens"] for row in rows if "num_tokens" in row]
    tiles |= {"tokens": f"{tokens[-1]:,.0f}"} if tokens else {}
    rewards = [row["reward"] for row in rows if math.isfinite(row.get("reward", math.nan))]
    if len(rewards) >= 6:
        first, last = (sum(part) / 3 for part in (rewards[:3], rewards[-3:]))
        tiles["reward, first → last 3"] = f"{first:.3g} → {last:.3g}"
    if formed:
        ends = dict.fromkeys((formed[0], formed[-1]))
        tiles["well-formed answers"] = " → ".join(number(value, True) for value in ends)
    cells = "".join(
        f'<div class="tile"><b>{_text(v)}</b><span>{_text(k)}</span></div>'
        for k, v in tiles.items()
    )
    return (
        f'<div class="card result"><div>{_before_after(rows, results)}</div>'
        f'<div class="tiles">{cells}</div></div>'
    )


def _before_after(rows: Rows, results: Mapping[str, Any]) -> str:
    """The two numbers that count, with a bar from the one to the other."""
    key = heldout_key(rows, results)
    curve = heldout(rows, results, key)
    known = [p for p in zip(curve.steps, curve.values, strict=True) if math.isfinite(p[1])]
    if not known:
        return '<h3>Held-out accuracy</h3><p class="muted">Not measured yet.</p>'
    percent = key == "accuracy"
    (first, old), (last, new) = known[0], known[-1]
    count = results.get("heldout_count", result_value(results, "after", "count"))
    prompts = f" on {number(count)} prompts" if isinstance(count, int | float) else ""
    start = "before training" if first == 0 else f"step {first}"
    title = f"<h3>Held-out {key}{prompts}</h3>"
    if len(known) == 1:
        return (
            f'{title}<div class="big">{number(new, percent)}</div>'
            f'{_track(new, new) if percent else ""}<span class="muted">{start}</span>'
        )
    word = "up" if new >= old else "down"
    gain = f"{100 * (new - old):+.1f} points" if percent else f"{new - old:+.4g}"
    return (
        f'{title}<div class="big"><span class="from">{number(old, percent)}</span>'
        f'<span class="arrow">→</span>{number(new, percent)}</div>'
        f'{_track(old, new) if percent else ""}<span class="{word}-text">{gain}</span> '
        f'<span class="muted">{start} → step {last}</span>'
    )


def _track(old: Number, new: Number) -> str:
    """A bar of 100 % with the change from one share to another."""
    left, width = 100 * min(old, new), 100 * abs(new - old)
    word = "up" if new >= old else "down"
    return (
        f'<div class="track"><i class="base" style="width:{left:.1f}%"></i>'
        f'<i class="{word}" style="left:{left:.1f}%;width:{width:.1f}%"></i></div>'
    )


def _status(run_dir: pathlib.Path) -> str:
    kind, word = "open", "not finished"
    if (run_dir / "FAILED.txt").exists():
        kind, word = "failed", "failed"
    elif (run_dir / "DONE").exists():
        kind, word = "done", "done"
    return f'<span class="pill {kind}">{word}</span>'


def _failure(run_dir: pathlib.Path) -> str:
    text = _read(run_dir / "FAILED.txt")
    return f'<div class="card failure mono">{_text(text)}</div>' if text else ""


def _alarms(run_dir: pathlib.Path) -> str:
    """What went wrong on the way, the latest first; nothing where all was well."""
    alarms = read_alarms(run_dir)[::-1]
    if not alarms:
        return ""
    lines = [
        f'<li class="{alarm.severity}"><b>step {alarm.step} · {_text(alarm.name)}</b> '
        f"{_text(alarm.message)}</li>"
        for alarm in alarms[:_MOST_ALARMS]
    ]
    rest = len(alarms) - len(lines)
    more = f'<p class="muted">{rest} earlier ones are in alarms.jsonl.</p>' if rest else ""
    word = "alarm" if len(alarms) == 1 else "alarms"
    return (
        f'<details class="card alarms" open><summary>{len(alarms)} {word}</summary>'
        f"<ul>{''.join(lines)}</ul>{more}</details>"
    )


# --- samples and settings -----------------------------------------------------------------------


def _browsed(samples: Mapping[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the script browses: steps spread over the run, each prompt with its completions."""
    steps = list(samples)
    if len(steps) > _MOST_STEPS:
        last = len(steps) - 1
        steps = [steps[round(i * last / (_MOST_STEPS - 1))] for i in range(_MOST_STEPS)]
    found = []
    for step in steps:
        rows = samples[step][:_MOST_SAMPLES]
        left_out = len(samples[step]) - len(rows)
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(f"{row.get('prompt_id')}\0{row.get('prompt')}", []).append(row)
        note = f"{left_out} more samples of this step are in samples.jsonl." if left_out else ""
        found.append({"step": step, "groups": [_group(g) for g in groups.values()], "note": note})
    return found


def _group(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [row["reward"] for row in rows if isinstance(row.get("reward"), int | float)]
    mean = f", mean reward {number(sum(rewards) / len(rewards))}" if rewards else ""
    prompt_id = cut(visible(str(rows[0].get("prompt_id", ""))), 40)
    return {
        "prompt": _long(rows[0].get("prompt", "")),
        "note": f"{prompt_id} · {len(rows)} completions{mean}",
        "samples": [_sample(row) for row in rows],
    }


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    reward = row.get("reward")
    score = number(reward) if isinstance(reward, int | float) else "not judged"
    parts = row.get("parts") or {}
    facts = [f"{name} {_score(value)}" for name, value in parts.items()] if len(parts) > 1 else []
    facts += [f"advantage {_score(row['advantage'])}"] if row.get("advantage") is not None else []
    facts += [f"{row['length']} tokens"] if "length" in row else []
    ended = {"length": "cut off", "stop": "stopped"}
    end = row.get("finish_reason")
    facts += [ended.get(str(end), str(end))] if end is not None else []
    return {
        "reward": reward if isinstance(reward, int | float) else None,
        "score": visible(str(reward)) if isinstance(reward, str) else score,
        "completion": _long(row.get("completion", "")),
        "facts": cut(visible(" · ".join(map(str, facts))), 300),
    }


def _score(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else str(value)


def _long(text: Any) -> str:
    """Text with its line breaks; of a very long one the beginning and the end."""
    text = str(text)
    if len(text) > _MOST_TEXT:
        text = f"{text[: _MOST_TEXT // 2]} … {text[-_MOST_TEXT // 2 :]}"
    return visible(text, keep="\n\t")


def _reward_range(samples: Mapping[int, list[dict[str, Any]]]) -> list[float]:
    rewards = [row.get("reward") for rows in samples.values() for row in rows]
    known = [reward for reward in rewards if isinstance(reward, int | float)]
    return [min(known), max(known)] if known else [0.0, 1.0]


def _samples_html(samples: Mapping[int, Any]) -> str:
    if not samples:
        return '<p class="card muted">No samples have been written yet.</p>'
    return (
        '<div class="bar-row"><button id="back" aria-label="earlier step">←</button>'
        '<span id="which"></span><button id="forward" aria-label="later step">→</button>'
        '<input id="slider" type="range" min="0" value="0" aria-label="step">'
        '<select id="order" aria-label="order"><option value="asis">as sampled</option>'
        '<option value="best">best first</option><option value="worst">worst first</option>'
        "</select></div>"
        '<div id="browser"></div><noscript><p class="card">The samples are browsed with a script; '
        "without one, read samples.txt beside this page.</p></noscript>"
    )


def _settings(run_dir: pathlib.Path, extra: Sequence[str]) -> str:
    blocks = []
    for name, label in (("config.json", "Config"), ("versions.json", "Versions and devices")):
        values = _read_json(run_dir / name)
        if values:
            blocks.append(
                f'<details class="card"><summary>{label}</summary>{_table(values)}</details>'
            )
    if extra:
        summary = f"<summary>Other metrics ({len(extra)})</summary>"
        blocks.append(f'<details class="card">{summary}{_cards(extra)}</details>')
    return "".join(blocks) or '<p class="card muted">None are stored.</p>'


def _table(values: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = [
        f'<tr><th>{_text(key)}</th><td class="mono">{_text(_one_line(value))}</td></tr>'
        for key, value in plain.items()
    ]
    for key, value in values.items():
        if isinstance(value, dict):
            lines.append(f'<tr class="sec"><th colspan="2">{_text(key)}</th></tr>')
            lines += [
                f'<tr><th>{_text(name)}</th><td class="mono">{_text(_one_line(item))}</td></tr>'
                for name, item in _flat(value).items()
            ]
    return f"<table>{''.join(lines)}</table>"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def _one_line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- escaping and reading -----------------------------------------------------------------------


def _text(text: Any) -> str:
    """HTML of any text: markup escaped, and what can't be seen made visible."""
    return html.escape(visible(str(text), keep="\n"))


def _script_json(data: Any) -> str:
    """JSON that can't end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(_read(path))
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
