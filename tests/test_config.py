# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Configs are found, loaded, overridden, printed and compared; every mistake is one ConfigError."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

import jaxrl_llm.config as configs
from jaxrl_llm.errors import ConfigError


class Mode(enum.Enum):
    SYNC = 1
    ASYNC = 2


@dataclasses.dataclass(frozen=True)
class Algo:
    """The algorithm.

    Attributes:
        kl_coef: weight of the KL penalty;
            0 means off.
        clip: half-width of the
            trust region, or None.
        loss: the objective.
    """

    kl_coef: float = 0.0
    clip: float | None = 0.2
    loss: Literal["clip", "cispo"] = "clip"

    def __post_init__(self) -> None:
        if self.kl_coef < 0:
            raise ConfigError("algo.kl_coef is negative", got=self.kl_coef, expected="0 or more")


@dataclasses.dataclass(frozen=True)
class Train:
    steps: int = 10  # optimiser steps
    stop_ids: tuple[int, ...] = (198, 2)
    """Token ids that end a completion."""
    betas: tuple[float, float] = (0.9, 0.99)  # Adam's β
    shuffle: bool = True  # draw a new order each epoch
    out: pathlib.Path = pathlib.Path("runs")  # where the run lies
    note: str | None = None  # free text
    words: tuple[str, ...] = ()  # stop words
    pairs: tuple[tuple[int, int], ...] = ()  # pairs that are shown
    mode: Mode = Mode.SYNC  # how sampling and training take turns
    undocumented: int = 0


def length(rollouts: list[Any]) -> list[float]:
    return [0.0 for _ in rollouts]


@dataclasses.dataclass(frozen=True)
class Run:
    algo: Algo = Algo()
    train: Train = Train()
    rewards: Mapping[str, Callable] = dataclasses.field(default_factory=lambda: {"length": length})
    batch_size: int = 8  # prompts a step

    def __post_init__(self) -> None:
        if self.batch_size % 2 and self.algo.loss == "cispo":
            raise ConfigError("cispo wants an even batch_size", got=self.batch_size)


def write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


GOOD = """'''First line.

Second paragraph.
'''
import dataclasses

@dataclasses.dataclass(frozen=True)
class C:
    x: int = 1  # the number

def get_config():
    return C()
"""


# --- find ---


def test_find_looks_in_the_working_directory_then_configs_then_the_package(tmp_path, monkeypatch):
    shipped = tmp_path / "package"
    monkeypatch.setattr(configs, "packaged_configs", lambda: shipped)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    third = write(shipped / "grpo.py", GOOD)
    assert configs.find_config("grpo.py") == third
    assert configs.find_config("configs/grpo.py") == third
    second = write(work / "configs" / "grpo.py", GOOD)
    assert configs.find_config("grpo.py") == second
    first = write(work / "grpo.py", GOOD)
    assert configs.find_config("grpo.py") == first
    assert configs.find_config("grpo") == first
    assert configs.find_config(str(third)) == third


def test_find_names_the_available_configs_and_a_near_miss(tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "packaged_configs", lambda: tmp_path / "package")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "package" / "grpo.py", GOOD)
    write(tmp_path / "configs" / "dapo.py", GOOD)
    with pytest.raises(ConfigError) as error:
        configs.find_config("grop.py")
    assert "Did you mean grpo.py?" in str(error.value)
    assert "one of dapo.py, grpo.py" in str(error.value)
    with pytest.raises(ConfigError):
        configs.find_config("")


def test_the_package_ships_its_configs_folder():
    folder = configs.packaged_configs()
    assert folder is not None
    assert folder.name == "configs"


# --- load ---


def test_load_returns_the_docstring_and_the_config(tmp_path):
    doc, config = configs.load_config(write(tmp_path / "good.py", GOOD))
    assert doc == "First line.\n\nSecond paragraph."
    assert config.x == 1
    assert [field.meaning for field in configs.fields(config)] == ["the number"]


def test_a_config_imports_the_reward_beside_it(tmp_path):
    write(tmp_path / "my_reward_beside.py", "def exact(rollouts):\n    return []\n")
    text = GOOD.replace(
        "import dataclasses\n", "import dataclasses\nfrom my_reward_beside import exact\n", 1
    )
    text = text.replace("    x: int = 1  # the number", "    x: object = exact")
    _, config = configs.load_config(write(tmp_path / "user.py", text))
    assert configs.to_dict(config) == {"x": "my_reward_beside:exact"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = (\n", "bad.py:1: SyntaxError"),
        ("\nimport not_a_module_at_all\n", "bad.py:2: ModuleNotFoundError"),
        ("def get_config():\n    return 1 / 0\n", "bad.py:2: ZeroDivisionError"),
        ("raise SystemExit(3)", "bad.py:1: SystemExit"),
        ("x = 1\n", "no function get_config()"),
        ("def get_config():\n    return {'a': 1}\n", "must return a dataclass"),
        (GOOD.replace("frozen=True", "frozen=False"), "C is not frozen"),
        (
            GOOD.replace("C()", "C('one')"),
            "config field 'x' has the wrong type · got 'one' · expected int",
        ),
        (GOOD.replace("C()", "C(True)"), "config field 'x' has the wrong type"),
        (GOOD.replace("C()", "C(y=2)"), "bad.py:12: TypeError"),
        (
            "import json\ndef get_config():\n    return json.loads('{')\n",
            "bad.py:3: JSONDecodeError",
        ),
    ],
)
def test_a_bad_config_file_is_one_line_with_file_and_line(tmp_path, text, expected):
    with pytest.raises(ConfigError) as error:
        configs.load_config(write(tmp_path / "bad.py", text))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_or_foreign_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError):
        configs.load_config(tmp_path / "nowhere.py")
    with pytest.raises(ConfigError):
        configs.load_config(write(tmp_path / "data.json", "{}"))
    binary = tmp_path / "binary.py"
    binary.write_bytes(b"\x00\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.py"):
        configs.load_config(binary)


def test_validation_errors_of_the_dataclasses_pass_unchanged(tmp_path):
    text = "from jaxrl_llm.errors import ConfigError\n"
    text += "def get_config():\n    raise ConfigError('mine', got=3)\n"
    with pytest.raises(ConfigError) as error:
        configs.load_config(write(tmp_path / "own.py", text))
    assert str(error.value) == "mine · got 3"


# --- override ---


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (["--algo.kl_coef=0.01"], "algo.kl_coef", 0.01),
        (["--config.algo.kl_coef=0.01"], "algo.kl_coef", 0.01),
        (["--algo.kl_coef", "0.01"], "algo.kl_coef", 0.01),
        (["--algo.kl-coef=1"], "algo.kl_coef", 1.0),
        (["--algo.clip=None"], "algo.clip", None),
        (["--algo.clip=0.3"], "algo.clip", 0.3),
        (["--algo.loss=cispo"], "algo.loss", "cispo"),
        (["--train.steps", "-3"], "train.steps", -3),
        (["--train.stop_ids=7,8,9"], "train.stop_ids", (7, 8, 9)),
        (["--train.stop_ids", "7", "8"], "train.stop_ids", (7, 8)),
        (["--train.stop_ids=(7, 8)"], "train.stop_ids", (7, 8)),
        (["--train.stop_ids="], "train.stop_ids", ()),
        (["--train.betas=0.8,0.95"], "train.betas", (0.8, 0.95)),
        (["--train.shuffle=False"], "train.shuffle", False),
        (["--train.shuffle=false"], "train.shuffle", False),
        (["--train.out=/tmp/x"], "train.out", pathlib.Path("/tmp/x")),
        (["--train.note=a=b, c"], "train.note", "a=b, c"),
        (["--train.note=--dashes"], "train.note", "--dashes"),
        (["--train.note="], "train.note", ""),
        (["--train.words", "x,y", "z"], "train.words", ("x,y", "z")),
        (["--train.words=\n"], "train.words", ("\n",)),
        (["--train.words=\n, a"], "train.words", ("\n", " a")),
        (["--train.words=['\\n', 'a,b']"], "train.words", ("\n", "a,b")),
        (["--train.words=[x]"], "train.words", ("x",)),
        (["--train.words="], "train.words", ()),
        (["--train.pairs=((1, 2), (3, 4))"], "train.pairs", ((1, 2), (3, 4))),
        (["--train.pairs=1,2,3,4"], "train.pairs", ((1, 2), (3, 4))),
        (["--train.pairs=[]"], "train.pairs", ()),
        (["--train.mode=ASYNC"], "train.mode", Mode.ASYNC),
        (["--batch_size=4", "--batch-size=6"], "batch_size", 6),
    ],
)
def test_an_override_sets_exactly_its_field(args, name, value):
    changed = configs.apply_overrides(Run(), args)
    before = {field.name: field.value for field in configs.fields(Run())}
    after = {field.name: field.value for field in configs.fields(changed)}
    assert after[name] == value
    assert type(after[name]) is type(value)
    assert {key: after[key] for key in after if key != name and key != "rewards"} == {
        key: before[key] for key in before if key != name and key != "rewards"
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--algo.kl_coeff=1"], "unknown config field 'algo.kl_coeff'. Did you mean algo.kl_coef?"),
        (["--kl_coef=1"], "unknown config field 'kl_coef'. Did you mean algo.kl_coef?"),
        (["--train.kl_coef=1"], "unknown config field 'train.kl_coef'. Did you mean algo.kl_coef?"),
        (["--kl_cof=1"], "unknown config field 'kl_cof'. Did you mean algo.kl_coef?"),
        (["--zzz=1"], "unknown config field 'zzz' · try: --help lists every field"),
        (
            ["--algo=1"],
            "config field 'algo' is a group · expected one of its fields: algo.kl_coef, ",
        ),
        (
            ["--algo.kl_coef=abc"],
            "config field 'algo.kl_coef' has the wrong type · got 'abc' · expected float",
        ),
        (["--algo.kl_coef=nan"], "got 'nan' · expected float"),
        (["--algo.kl_coef="], "got '' · expected float"),
        (["--algo.kl_coef"], "has no value"),
        (["--algo.kl_coef", "1", "2"], "got '1 2' · expected float"),
        (["--algo.clip=x"], "got 'x' · expected float | None"),
        (["--algo.loss=ppo"], "got 'ppo' · expected one of 'clip', 'cispo'"),
        (["--train.steps=1.5"], "got '1.5' · expected int"),
        (["--train.stop_ids=1,x"], "got '1,x' · expected int, …"),
        (["--train.pairs=1,2,3"], "got '1,2,3' · expected (int, int), …"),
        (["--train.betas=0.1"], "got '0.1' · expected (float, float)"),
        (["--train.shuffle"], "config field 'train.shuffle' has no value · expected bool"),
        (["--train.shuffle=maybe"], "got 'maybe' · expected bool"),
        (["--train.mode=TURNS"], "expected one of SYNC, ASYNC"),
        (["--rewards=x"], "'rewards' is chosen in the config file, not on the command line"),
        (["algo.kl_coef=1"], "unexpected argument · got 'algo.kl_coef=1' · expected --field=value"),
        (["--"], "unexpected argument"),
        (["--algo.kl_coef=-1"], "algo.kl_coef is negative · got -1.0"),
        (["--batch_size=3", "--algo.loss=cispo"], "cispo wants an even batch_size"),
    ],
)
def test_a_wrong_override_is_one_line(args, message, capfd):
    with pytest.raises(ConfigError) as error:
        configs.apply_overrides(Run(), args)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_overrides_are_applied_together_before_validation():
    changed = configs.apply_overrides(Run(batch_size=3), ["--algo.loss=cispo", "--batch_size=4"])
    assert (changed.algo.loss, changed.batch_size) == ("cispo", 4)


def test_no_override_returns_the_config_itself():
    run = Run()
    assert configs.apply_overrides(run, []) is run


# --- print ---


def test_meanings_come_from_attributes_strings_and_comments():
    meanings = {field.name: field.meaning for field in configs.fields(Run())}
    assert meanings["algo.kl_coef"] == "weight of the KL penalty; 0 means off."
    assert meanings["algo.clip"] == "half-width of the trust region, or None."
    assert meanings["algo.loss"] == "the objective."
    assert meanings["train.steps"] == "optimiser steps"
    assert meanings["train.stop_ids"] == "Token ids that end a completion."
    assert meanings["train.betas"] == "Adam's β"
    assert meanings["batch_size"] == "prompts a step"
    assert meanings["train.undocumented"] == ""


def test_help_lists_every_field_with_type_value_and_meaning():
    run = configs.apply_overrides(Run(), ["--algo.kl_coef=0.5"])
    text = configs.help_text(run, "What it does.\n\nHow.")
    assert text.startswith("What it does.\n\nHow.")
    assert "--algo.kl_coef = 0.5   (float)\n        weight of the KL penalty; 0 means off." in text
    assert "--train.stop_ids = [198, 2]   (int, …)" in text
    assert "--algo.loss = 'clip'   (one of 'clip', 'cispo')" in text
    assert "(set in the config file)" in text
    for field in configs.fields(run):
        assert f"--{field.name} = " in text


PARTIAL = functools.partial(length, rollouts=2)


@dataclasses.dataclass(frozen=True)
class Odd:
    a: Any = float("inf")
    b: Any = PARTIAL
    c: Any = dataclasses.field(default_factory=object)
    d: Any = frozenset({"y", "x"})
    e: Any = Mode.ASYNC


def test_to_dict_is_json_and_the_same_in_every_process():
    stored = configs.to_dict(Run())
    assert json.loads(json.dumps(stored, allow_nan=False)) == stored
    assert stored["rewards"] == {"length": f"{__name__}:length"}
    assert stored["train"]["stop_ids"] == [198, 2]
    odd = configs.to_dict(Odd())
    assert json.dumps(odd, allow_nan=False)
    assert odd == configs.to_dict(Odd())
    assert odd["a"] == "inf"
    assert odd["b"] == f"{__name__}:length(rollouts=2)"
    assert odd["c"] == "builtins:object"
    assert odd["d"] == ["x", "y"]
    assert odd["e"] == "ASYNC"


def test_diff_names_what_changed():
    old = configs.to_dict(Run())
    new = configs.to_dict(
        configs.apply_overrides(Run(), ["--algo.kl_coef=0.01", "--train.steps=5"])
    )
    assert configs.diff(old, old) == []
    assert configs.diff(old, new) == ["algo.kl_coef: 0.0 → 0.01", "train.steps: 10 → 5"]
    assert configs.diff({"a": {"b": 1}}, {"a": {"c": 2}}) == [
        "a.b: 1 → (absent)",
        "a.c: (absent) → 2",
    ]
    assert configs.diff({"a": {}}, {"a": {"x": 1}}) == ["a: {} → (absent)", "a.x: (absent) → 1"]


def test_print_config_aligns_and_marks_what_differs():
    changed = configs.apply_overrides(Run(), ["--algo.kl_coef=0.01"])
    lines = configs.print_config(changed, Run()).splitlines()
    marked = [line for line in lines if line.startswith("*")]
    assert len(marked) == 1
    assert marked[0].split() == ["*", "algo.kl_coef", "0.01"]
    rows = [line for line in lines if line]
    names = [line[2:].split()[0] for line in rows]
    assert names[:2] == ["batch_size", "algo.kl_coef"]
    assert names[-1] == "rewards.length"
    assert len({line.index(line[2:].split()[1], len(line[2:].split()[0])) for line in rows}) == 1
    assert "*" not in configs.print_config(changed)


def test_the_import_costs_no_trainer():
    code = (
        "import jaxrl_llm.config, sys; print([m for m in sys.modules if m == 'jax' or '.tr' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@dataclasses.dataclass(frozen=True)
class Adapter:
    rank: int = 16


@dataclasses.dataclass(frozen=True)
class Fit:
    """A group that is off, and a setting that it does not go with."""

    moves: int = 2
    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None and self.moves:
            raise ConfigError("both", expected="one")


def test_a_group_that_is_off_is_made_before_anything_is_validated():
    for args in (["--adapter.rank=4", "--moves=0"], ["--moves=0", "--adapter.rank=4"]):
        assert configs.apply_overrides(Fit(), args) == Fit(0, Adapter(4))
    with pytest.raises(ConfigError, match="both"):
        configs.apply_overrides(Fit(), ["--adapter.rank=4"])
    assert configs.apply_overrides(Fit(), ["--moves=1"]).adapter is None
