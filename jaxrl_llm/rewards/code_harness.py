# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Runs beside a model-written program, in its process, in the sandbox: trusted with nothing.

This file alone is copied into the sandbox, so it imports the standard library only, and little of
it, for it starts many times a second. It is told what to call and never what to expect; what it
reports is data for the parent to compare, and a report that is missing or malformed counts against
the program.

    python3 harness.py calls   RESULTS    imports candidate.py, makes the calls of cases.json
    python3 harness.py program RESULTS    runs candidate.py as a program
    python3 harness.py build   RESULTS    runs the build command of recipe.json, then the program's
    python3 harness.py judge   RESULTS    evaluates the conditions of cases.json, no candidate near

`encode` and `decode` carry Python values as JSON without losing their types.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import SourceFileLoader

_PLAIN_INT = 1 << 53
_MOST_ITEMS = 10_000


def encode(value):
    """A value as JSON: plain scalars and lists as they are, the rest as `{"type": content}`.

    Raises TypeError for what is not built of None, bool, int, float, complex, str, bytes, list,
    tuple, dict, set and frozenset, or a range, an iterator (its first items), a view of a dict, a
    deque, a Decimal or a Fraction. Subclasses (named tuples, counters, …) are encoded as these.
    """
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        value = int(value)
        return value if abs(value) < _PLAIN_INT else {"int": hex(value)}
    if isinstance(value, float):
        value = float(value)
        return value if value - value == 0 else {"float": repr(value)}  # inf and nan are not JSON
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, set | frozenset):
        kind = "set" if isinstance(value, set) else "frozenset"
        return {kind: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    return _encode_rarer(value)


def _encode_rarer(value):
    name = type(value).__name__
    if isinstance(value, range):
        return {"range": [encode(part) for part in (value.start, value.stop, value.step)]}
    if name in ("Decimal", "Fraction"):
        return {name: str(value)}
    if name in ("deque", "dict_keys", "dict_values", "dict_items"):
        return {name: [encode(item) for item in value]}
    if hasattr(type(value), "__next__"):
        return {"iterator": _first_items(value)}
    raise TypeError(f"a value of type {name} can't be compared")


def _first_items(iterator):
    """[items, whether these are all]: it may have no end, or raise after some."""
    items = []
    try:
        for item in iterator:
            if len(items) == _MOST_ITEMS:
                return [items, False]
            items.append(encode(item))
    except Exception:  # whatever the candidate raises is its own failure
        return [items, False]
    return [items, True]


def decode(value):
    """The value that `encode` encoded."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*map(decode, content))
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "tuple":
        return tuple(map(decode, content))
    if kind in ("set", "frozenset"):
        return (set if kind == "set" else frozenset)(map(decode, content))
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    return _decode_rarer(kind, content)


def _decode_rarer(kind, content):
    if kind == "range":
        return range(*map(decode, content))
    if kind == "iterator":
        return _again(*content)
    if kind == "dict_keys":
        return dict.fromkeys(map(decode, content)).keys()
    if kind == "dict_values":
        return dict(enumerate(map(decode, content))).values()
    if kind == "dict_items":
        return dict(map(decode, content)).items()
    if kind in ("deque", "Decimal", "Fraction"):
        import collections
        import decimal
        import fractions

        if kind == "deque":
            return collections.deque(map(decode, content))
        return (decimal.Decimal if kind == "Decimal" else fractions.Fraction)(content)
    raise ValueError(f"unknown type {kind!r}")


def _again(items, complete):
    """An iterator over encoded items, which fails where nobody knows how it went on."""
    yield from map(decode, items)
    if complete is not True:
        raise ValueError("the program's iterator has no end, or raised")


def _read(name):
    with open(name, encoding="utf-8") as file:
        return json.load(file)


def _report(results, *row):
    results.write(json.dumps(row) + "\n")
    results.flush()


def _compile_candidate():
    loader = SourceFileLoader("candidate", "candidate.py")
    loader.get_code("candidate")  # raises SyntaxError before anything of it has run
    return loader


def _target(namespace, dotted):
    """A function, or a method of a fresh instance of a class."""
    first, *rest = dotted.split(".")
    target = namespace[first]
    if rest and isinstance(target, type):
        target = target()
    for name in rest:
        target = getattr(target, name)
    return target


def _calls(results):
    job = _read("cases.json")
    loader = _compile_candidate()
    _report(results, "compiled")
    module = sys.modules["candidate"] = type(sys)("candidate")
    module.__file__ = "candidate.py"
    loader.exec_module(module)
    namespace = dict(module.__dict__)
    exec(job.get("setup", ""), namespace)  # the task's own text, not the model's
    for index, case in enumerate(job["cases"]):
        try:
            if "expressions" in case:
                value = [encode(eval(text, namespace)) for text in case["expressions"]]
            else:
                arguments = decode(case["args"]), decode(case["kwargs"])
                value = encode(_target(namespace, case["call"])(*arguments[0], **arguments[1]))
        except Exception as error:
            _report(results, "error", index, f"{type(error).__name__}: {error}"[:200])
        else:
            _report(results, "value", index, value)


def _program(results):
    import runpy

    _compile_candidate()
    _report(results, "compiled")
    results.close()
    sys.argv = ["candidate.py"]
    runpy.run_path("candidate.py", run_name="__main__")


def _build(results):
    import subprocess

    recipe = _read("recipe.json")
    for command in recipe["build"]:
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2).returncode != 0:
            sys.exit(1)
    _report(results, "compiled")
    results.close()
    os.execvp(recipe["run"][0], recipe["run"])


def _judge(results):
    job = _read("cases.json")
    _report(results, "compiled")
    namespace = {}
    exec(job.get("setup", ""), namespace)
    for index, case in enumerate(job["cases"]):
        try:
            names = {f"_value_{i}": decode(value) for i, value in enumerate(case["values"])}
            holds = bool(eval(case["condition"], {**namespace, **names}))
        except Exception as error:
            _report(results, "error", index, f"{type(error).__name__}: {error}"[:200])
        else:
            _report(results, "value", index, holds)


if __name__ == "__main__":
    main = {"calls": _calls, "program": _program, "build": _build, "judge": _judge}[sys.argv[1]]
    main(os.fdopen(int(sys.argv[2]), "w", encoding="utf-8"))
