# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
import pathlib
import threading
import time
from concurrent import futures

import numpy as np
import pytest

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards import math as math_rewards
from jaxrl_llm.rewards.math import MathReward, math_answer
from jaxrl_llm.rewards.math_answers import same_mathematics
from jaxrl_llm.types import Prompt, Rollout

_GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "math_answers.json"

_RIGHT = [
    ("34", "34"),
    (r"\frac{2}{4}", r"\frac12"),
    (r"\dfrac{3}{4}", "0.75"),
    ("3/4", r"\frac34"),
    (r"1\frac{1}{2}", "1.5"),
    ("1 1/2", r"\frac32"),
    (r"1\frac12", "3/2"),
    ("-5", "-5"),
    ("−5", "-5"),
    ("+5", "5"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"2\sqrt2", r"\sqrt{8}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt3}"),
    (r"3\cdot 10^8", "300000000"),
    (r"3 \times 10^{-2}", "0.03"),
    ("10^{3}", "1000"),
    (r"\sqrt{16}", "4"),
    (r"\sqrt[3]{27}", "3"),
    ("1,234,567", "1234567"),
    ("1{,}234.5", "1234.5"),
    (r"10\,000", "10000"),
    ("10 000", "10000"),
    (r"5\text{ cm}", "5"),
    ("5 cm", "5"),
    (r"5\,\mathrm{cm}", "5 cm"),
    ("5", "5 cm"),
    (r"12\text{ square units}", "12"),
    (r"9.8\,\mathrm{m/s}^2", "9.8"),
    ("34 dollars", "34"),
    (r"\$34", "34"),
    ("$34$", "34"),
    (r"\$1,000", "1000"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", r"90^\circ"),
    ("90°", "90"),
    ("90 degrees", r"90^\circ"),
    ("50%", r"50\%"),
    (r"50\%", "0.5"),
    ("50%", "50"),
    ("0.5", r"50\%"),
    ("x = 34", "34"),
    ("x=34", "x=34"),
    ("34", "x=34"),
    ("f(x) = 2x+1", "2x+1"),
    ("y=2x+1", "y = 1 + 2x"),
    ("2x+y=3", "y=3-2x"),
    ("x_1=3", "3"),
    (r"\{1,2,3\}", r"\{3, 2, 1\}"),
    ("1,2", "2,1"),
    ("1 and 2", "1,2"),
    (r"1\text{ or }2", "2, 1"),
    (r"\pm 3", "3,-3"),
    (r"\pm\sqrt{2}", r"\sqrt2, -\sqrt{2}"),
    ("x=1, x=2", "1,2"),
    (r"\{1\}", r"\{1\}"),
    (r"1\pm\sqrt{2}", r"1-\sqrt2,1+\sqrt2"),
    ("(1,2)", "(1, 2)"),
    (r"\left(1,\frac12\right)", "(1,0.5)"),
    ("[0,1)", "[0, 1)"),
    (r"(-\infty,2]", r"(-\infty, 2]"),
    (r"(-\infty,0)\cup(1,\infty)", r"(1,\infty) \cup (-\infty,0)"),
    (r"x \in [1,2]", "[1,2]"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{bmatrix}1&0\\0&\frac12\end{bmatrix}", r"\begin{pmatrix}1&0\\0&0.5\end{pmatrix}"),
    ("(B)", "B"),
    ("B", "(B)"),
    (r"\text{B}", "B"),
    (r"\textbf{(B)}\ 12", "B"),
    (r"\mathrm{(B)}", "B"),
    ("B.", "B"),
    (r"\text{Yes}", "yes"),
    ("even", r"\text{even}"),
    (r"\text{no solution}", "No solution"),
    ("East", "east"),
    ("x^2+2x+1", "(x+1)^2"),
    ("2(x+1)", "2x+2"),
    (r"\frac{x+1}{2}", r"\frac{x}{2}+\frac12"),
    ("a*b", "ba"),
    ("e^{2x}", "(e^x)^2"),
    (r"\sin^2 x", r"1-\cos^2 x"),
    (r"\ln 4", r"2\ln 2"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    (r"2\pi", "2π"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    ("3+4i", "4i+3"),
    ("i", "i"),
    ("x>3", "x > 3"),
    ("3<x", "x>3"),
    (r"x\geq 3", r"x \ge 3"),
    (r"-1<x\le 2", r"-1 < x \leq 2"),
    (r"0.\overline{3}", r"\frac13"),
    ("5!", "5!"),
    (r"\binom{5}{2}", r"\binom{5}{2}"),
    ("1:2", "1/2"),
    (r"\infty", r"\infty"),
    ("n(n+1)/2", r"\frac{n(n+1)}{2}"),
    ("2^{10}", "1024"),
    ("11/2", r"5\frac12"),
    (r"\frac{1}{2}x", r"\frac{x}{2}"),
    ("|x|", "|x|"),
    (r"\alpha+\beta", r"\beta+\alpha"),
    (r"\boldsymbol{34}", "34"),
    (r"\mathbf{34}", "34"),
    ("(34)", "34"),
    ("34.", "34"),
    (r"\text{34}", "34"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"-\frac{1}{2}", r"\frac{1}{-2}"),
    (r"\frac{3}{2}\text{ hours}", "1.5"),
    (r"A \cup B", r"A\cup B"),
    (r"\text{(C)}", "C"),
    ("1/3", r"\frac{1}{3}"),
    (r"6.02\times 10^{23}", r"6.02 \times 10^{23}"),
    (r"x=-1\text{ or }x=3", "-1,3"),
    (r"\sqrt{-4}", "2i"),
    (r"7\text{ and }9", "7, 9"),
]

_WRONG = [
    ("33", "34"),
    ("33,34", "34"),
    (r"33\text{ or }34", "34"),
    ("33 or 34", "34"),
    ("33=34", "34"),
    ("x=33=34", "34"),
    ("34=x=33", "34"),
    ("34=34", "34"),
    ("33 34", "34"),
    ("33;34", "34"),
    ("33/34", "34"),
    ("", "34"),
    (r"17\cdot 2", "34"),
    ("33+1", "34"),
    ("30+4", "34"),
    ("68/2=34", "34"),
    ("2x=68", "34"),
    ("x", "34"),
    ("not 34", "34"),
    ("34 or so", "34"),
    (r"34 \text{ or } 35", "34"),
    (r"34\text{ maybe }", "35"),
    ("34 (or 35)", "34"),
    ("[33,35]", "34"),
    ("(33,34)", "34"),
    (r"\{33,34\}", "34"),
    (r"\{34\}", "34"),
    ("34, 34", "34"),
    (r"\pm 34", "34"),
    ("34 or -34", "34"),
    ("0.33", r"\frac13"),
    ("0.3333333333", r"\frac13"),
    ("3.14", r"\pi"),
    ("3.14159265358979323846264338327950288419716939937510", r"\pi"),
    ("1.414", r"\sqrt2"),
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("(1,2,3)", "(1,2)"),
    ("1,2", "(1,2)"),
    ("1,2,3", "1,2"),
    ("1", "1,2"),
    ("1,1", "1,2"),
    (r"(1,\infty)", r"[1,\infty)"),
    ("(0,1)", r"(0,1)\cup(2,3)"),
    ("5 m", "5 cm"),
    (r"5\text{ m}", r"5\text{ cm}"),
    ("0.5%", "0.5"),
    ("5%", "50"),
    ("0.05", "50%"),
    ("-34", "34"),
    ("1000", "100"),
    ("1,00", "100"),
    ("A", "B"),
    ("(A) or (B)", "B"),
    ("A and B", "B"),
    ("(A)(B)", "B"),
    ("AB", "B"),
    ("(B) or (C)", "B"),
    ("ABCD", "B"),
    (r"\text{A, B}", "B"),
    ("(B) (C)", "B"),
    ("x^2", "x"),
    (r"\sqrt{x^2}", "x"),
    ("x+1", "x+2"),
    ("ab", "a+b"),
    ("x>3", "x<3"),
    ("x>3", r"x\ge 3"),
    ("x=3", "x>3"),
    ("y=2x+1", "y=2x"),
    ("y=2x", "2x=y+1"),
    (r"\text{No}", "yes"),
    ("odd", "even"),
    ("neve", "even"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("1,2,3,4", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("9^{9^{9^{9}}}", "34"),
    ("1/0", "34"),
    (r"\frac{1}{0}", "34"),
    ("0/0", "0"),
    (r"\infty", "34"),
    (r"\int_0^{34}dx", "34"),
    (r"\sum_{i=1}^{34}1", "34"),
    ("three", "3"),
    ("34x", "34"),
    ("34i", "34"),
    (r"e^{\pi\sqrt{163}}", "262537412640768744"),
    ("__import__('os').system('x')", "34"),
    ("34 if True else 35", "34"),
    ("lambda: 34", "34"),
    (r"\text{34 or 35}", "34"),
    (r"\text{thirty four}", "34"),
    ("3 4", "34"),
    ("3,4", "34"),
    ("0x22", "34"),
    ("3.4e1", "34"),
    ("34°C or 35", "34"),
    (r"\text{34, 35}", "34"),
    ("34\n35", "34"),
    ("33, 34, 35", "34"),
    (r"\boxed{33}, \boxed{34}", "34"),
    ("max(33,34)", "34"),
    ("33<34", "34"),
    ("34>33", "34"),
    (r"x\in\{33,34\}", "34"),
    (r"33\to 34", "34"),
    (r"33\Rightarrow 34", "34"),
    (r"33 \approx 34", "34"),
    (r"\approx 34", "33"),
    ("33~34", "34"),
    ("33-34", "34"),
    ("33..34", "34"),
]


def test_the_handed_pairs():
    cases = json.loads(_GOLDEN.read_text())["cases"]
    assert len(cases) == 31
    for case in cases:
        verdict = math_answer.verdict(case["response"], case["gold"])
        assert verdict == case["want"] or case["want"] is None, case
    # The documented choices.
    open_cases = {c["name"]: math_answer.verdict(c["response"], c["gold"]) for c in cases}
    assert open_cases["unreduced 2/4 vs 1/2"] == 1.0
    assert open_cases["50% vs 0.5"] == open_cases["50% vs 50"] == 1.0
    assert open_cases["text answer"] == 1.0
    assert open_cases["HACK echo unsimplified"] == 0.0


@pytest.mark.parametrize(("stated", "right"), _RIGHT)
def test_the_same_mathematics(stated, right):
    assert same_mathematics(stated, right)
    assert same_mathematics(right, right)


@pytest.mark.parametrize(("stated", "right"), _WRONG)
def test_another_answer(stated, right):
    assert not same_mathematics(stated, right)


# ----------------------------------------------------------------------------
# What no algebra can work out
# ----------------------------------------------------------------------------


def _pathological(count):
    """Expressions that hang, explode or crash a careless verifier."""
    kinds = [
        "9^{9^{9^{%d}}}",
        "%d^{9^{9^{9}}}-34",
        "(9^{9^{9}})!+%d",
        "%d!!!!!!",
        "(10^{%d})!",
        "\\sqrt{" * 200 + "%d" + "}" * 200,
        "(" * 5000 + "%d" + ")" * 5000,
        "\\frac{1}{" * 500 + "%d" + "}" * 500,
        "x^{x^{x^{x^{x^{x^{%d}}}}}}",
        "(x+y+z+w)^{%d00000}",
        "e^{e^{e^{e^{%d}}}}",
        "\\sin(10^{10^{10^{%d}}})",
        "0.%d" + "9" * 5000,
        "1,".join("%d" for _ in range(1)) + "1," * 5000,
        "\\{" * 300 + "%d",
        "\\binom{10^{%d}}{10^9}",
        "2^{2^{2^{2^{2^{%d}}}}}",
        "((((x+1)^{99}+1)^{99}+1)^{99}+1)^{99%d}",
        "\\sin(\\tan(e^{e^{30}}))^{%d.5}",
        "i^{i^{i^{%d}}}",
        "\\log_{0}{%d}",
        "-" * 3000 + "%d",
        "x_{%d" + "_{1" * 500,
        "\\begin{pmatrix}" + "1&" * 3000 + "%d\\end{pmatrix}",
        "\\pm" * 500 + "%d",
        "%d=" * 500,
        "((%d^{0.5})^{10^{30}})",
        "(x^{%d0000000}+1)^{30}-1",
        "|" * 501 + "%d",
        "\\pi^{\\pi^{\\pi^{\\pi^{%d}}}}",
    ]
    return [kinds[k % len(kinds)].replace("%d", str(3 + k // len(kinds))) for k in range(count)]


def _judge_all(expressions, right):
    reward = MathReward(cpu_s=1.0)
    expressions = [f"\\boxed{{{expression}}}" for expression in expressions]
    with futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda text: reward.verdict(text, right), expressions))


def test_pathological_expressions_from_threads_and_from_asyncio():
    expressions = _pathological(60)
    begin = time.monotonic()
    for right in ("34", "x^{2}+\\sqrt{y}"):
        assert _judge_all(expressions[:30], right) == [0.0] * 30

    async def judge():
        calls = [
            asyncio.to_thread(MathReward(cpu_s=1.0).verdict, f"\\boxed{{{text}}}", "34")
            for text in expressions[30:]
        ]
        return await asyncio.gather(*calls)

    assert asyncio.run(judge()) == [0.0] * 30
    assert time.monotonic() - begin < 240.0
    workers = math_rewards._workers(1.0)
    assert [MathReward(cpu_s=1.0).verdict("Answer: 2x", "x+x") for _ in range(4)] == [1.0] * 4
    assert workers._slots().qsize() == workers.count


@pytest.mark.full
def test_a_thousand_pathological_expressions():
    begin = time.monotonic()
    assert _judge_all(_pathological(1000), "34") == [0.0] * 1000
    assert time.monotonic() - begin < 550.0
    assert MathReward(cpu_s=1.0).verdict("Answer: 2x", "x+x") == 1.0


def test_a_comparison_that_never_ends_is_wrong_and_the_next_one_is_judged(monkeypatch):
    workers = math_rewards.Workers(
        "worker_functions:busy", count=1, cpu_s=0.3, environment={"PYTHONPATH": _here()}
    )
    monkeypatch.setattr(math_rewards, "_workers", lambda cpu_s: workers)
    assert math_answer.verdict("Answer: for ever", "x") == 0.0
    assert workers.lost == 1
    assert math_answer.verdict("Answer: true", "x") == 1.0
    workers.close()


def _here():
    return str(pathlib.Path(__file__).parent)


# ----------------------------------------------------------------------------
# The reward
# ----------------------------------------------------------------------------


def _rollouts(answer, *completions):
    none = np.zeros(0, np.int32)
    prompt = Prompt("p", (1,), "p", answer)
    logp = np.zeros(0, np.float32)
    return [
        Rollout(prompt, i, none, logp, none > 0, none, "stop", text)
        for i, text in enumerate(completions)
    ]


def test_the_reward_judges_rollouts_in_order():
    rollouts = _rollouts(r"\boxed{\frac{1}{2}}", "Answer: 0.5", "0.5", r"\boxed{1/2}", "Answer: 2")
    assert math_answer(rollouts) == [1.0, 0.0, 1.0, 0.0]
    assert math_answer(_rollouts(0.5, r"\boxed{\frac12}")) == [1.0]
    assert math_answer([]) == []
    with pytest.raises(ValueError, match="neither text nor a number"):
        math_answer(_rollouts(None, "Answer: 1"))


def test_the_last_anchor_decides():
    for completion, verdict in (
        ("\\boxed{33} and so \\boxed{\\frac{68}{2}}", 1.0),
        ("\\boxed{34} or rather \\boxed{33}", 0.0),
        ("Answer: 33\nAnswer: $\\dfrac{68}{2}$", 1.0),
        ("Answer: \\dfrac{68}{2}\nAnswer: ", 0.0),
        ("The result is $\\dfrac{68}{2}$.", 0.0),
        ("Answer: \\boxed{33} or \\boxed{34}", 0.0),
    ):
        assert math_answer.verdict(completion, "34") == verdict


def test_judged_from_a_thread_and_from_an_event_loop():
    found = []
    thread = threading.Thread(target=lambda: found.append(math_answer.verdict("Answer: 2x", "x+x")))
    thread.start()
    thread.join()

    async def judge():
        return math_answer.verdict("Answer: 2x", "x+x")

    assert [*found, asyncio.run(judge())] == [1.0, 1.0]


def test_without_sympy_plain_answers_are_judged_and_others_say_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert math_answer.verdict("Answer: 34.0", "34") == 1.0
    assert math_answer.verdict("34", "34") == 0.0
    with pytest.raises(RewardError, match=r"needs the package sympy .*jaxrl_llm\[math\]"):
        math_answer.verdict("Answer: 2x", "x+x")


def test_no_verdict_where_no_worker_starts(monkeypatch):
    workers = math_rewards.Workers("no_such_module:function", count=1, cpu_s=1.0)
    monkeypatch.setattr(math_rewards, "_workers", lambda cpu_s: workers)
    assert math_answer.verdict("Answer: 2x", "x+x") is None
