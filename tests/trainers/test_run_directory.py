# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What stays the same for the whole of a run: its date, its model, the places that it names."""

from __future__ import annotations

import datetime

import pytest
from tiny_model import write_tiny_model

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoint.base_facts import base_facts, changes
from jaxrl_llm.errors import RunDirectoryError
from jaxrl_llm.rewards.process import ProcessRewardModel
from jaxrl_llm.rewards.reward_model import RewardModel
from jaxrl_llm.train import main
from jaxrl_llm.trainers.critic import CriticConfig
from jaxrl_llm.trainers.run_directory import RunDirectory
from jaxrl_llm.trainers.settings import ModelSource
from jaxrl_llm.trainers.supervised_settings import RowConfig


def opened(path, fresh=False):
    return RunDirectory(path, {"a": 1}, diff=lambda old, new: [], seed=0, fresh=fresh)


def facts_of(directory, facts):
    directory.keep("base.json", facts, changes, "the model m")


def begun(run, facts):
    """A run that was begun with these facts, and whose process has ended."""
    first = opened(run)
    facts_of(first, facts)
    first.begin()
    first._lock.close()


def test_the_date_of_a_run_is_that_of_its_beginning(tmp_path):
    run = tmp_path / "run"
    begun(run, {"weights": "1"})
    (run / "date.txt").write_text("2024-02-29T23:59:58\n")
    again = opened(run)
    assert again.date == datetime.datetime(2024, 2, 29, 23, 59, 58)
    again._lock.close()
    new = opened(run, fresh=True)
    assert datetime.datetime.now() - new.date < datetime.timedelta(minutes=5)
    new._lock.close()
    (run / "date.txt").write_text("yesterday")
    with pytest.raises(RunDirectoryError, match=r"date of the run is damaged.*date\.txt"):
        opened(run)


def test_facts_that_changed_stop_a_resume_and_no_new_run(tmp_path):
    run = tmp_path / "run"
    begun(run, {"weights": "1", "config": {"eps": 0.5}})
    again = opened(run)
    facts_of(again, {"weights": "1", "config": {"eps": 0.5}})
    with pytest.raises(RunDirectoryError, match=r"began with · got other weights; eps: 0\.5 →"):
        facts_of(again, {"weights": "2", "config": {"eps": 0.25}})
    again._lock.close()
    fresh = opened(run, fresh=True)
    facts_of(fresh, {"weights": "2"})
    fresh.begin()
    fresh._lock.close()
    (run / "base.json").unlink()  # a run of an earlier version
    facts_of(opened(run), {"weights": "3"})


def test_a_run_that_was_killed_before_its_config_was_written_starts_anew(tmp_path):
    run = tmp_path / "run"
    begun(run, {"weights": "1"})
    (run / "config.json").unlink()
    (run / "versions.json").unlink()
    (run / "command.txt").unlink()
    facts_of(opened(run), {"weights": "2"})


def test_places_are_kept_whole(tmp_path, monkeypatch):
    write_tiny_model(tmp_path / "org" / "name")
    (tmp_path / "mine.jinja").write_text("x")
    monkeypatch.chdir(tmp_path)
    whole = str(tmp_path / "org" / "name")
    assert ModelSource(path="org/name").path == whole
    assert ModelSource(path="./org/name/").path == whole
    assert CriticConfig(path="org/name").path == whole
    assert RewardModel("org/name").path == whole
    assert ProcessRewardModel("org/name").path == whole
    assert RowConfig(chat_template="mine.jinja").chat_template == str(tmp_path / "mine.jinja")
    (tmp_path / "tiny-random").mkdir()
    (tmp_path / "plain").write_text("x")
    for name in ("tiny-random", "smollm2-135m-instruct", "org/other", "", "~nobody/x", "a\0b"):
        assert ModelSource(path=name).path == name
    assert RowConfig(chat_template="plain").chat_template == "plain"
    assert CriticConfig().path is None


def test_a_resume_with_another_base_is_one_line(tmp_path, capsys, monkeypatch):
    """The command is the same; only what lies at the path is another model."""
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "base")
    _, config = configs.load_config(configs.find_config("sft.py"))
    overrides = ["--model.path=base", "--rows.chat_template=plain", "--train.seed=1"]
    config = configs.apply_overrides(config, overrides)
    assert config.model.path == str(tmp_path / "base")
    directory = RunDirectory(tmp_path / "run", configs.to_dict(config), diff=configs.diff, seed=1)
    facts_of(directory, base_facts("base"))
    directory.begin()
    directory._lock.close()
    write_tiny_model(tmp_path / "base", seed=1)
    assert main(["--config=sft.py", *overrides, "--run-dir=run"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "not the one that the run began with" in error
    assert "other weights" in error
