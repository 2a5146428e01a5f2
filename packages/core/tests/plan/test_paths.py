"""Every path of a plan follows one rule: `~` and `$NAME` are expanded, and only the plan's own text is a pattern."""

from __future__ import annotations

from pathlib import Path

import pytest

from sley_core.errors import PlanError
from sley_core.plan.load import load_plan
from sley_core.table import escape_path
from sley_data.files import find_files


@pytest.fixture
def text(text: str) -> str:
    return text.replace('source = "python-stdlib"', 'files = ["corpus/*.txt"]')


def corpus(folder: Path, text: str = "right text") -> None:
    (folder / "corpus").mkdir(parents=True)
    for number in range(3):
        (folder / "corpus" / f"{number}.txt").write_text(f"{text} {number}")


def read(path: Path, *sets: str) -> set[Path]:
    files, problems = find_files(load_plan(path, sets).data.config.files, ("data", "files"))
    assert not problems
    return {file.path.parent.parent.resolve() for file in files}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ["exp[1]", "exp*", "exp?", "e[!x]p[1]", "exp[[]1]", "exp]", "$exp1", "~exp1"])
@pytest.mark.parametrize("how", ["plan", "source_folder", "resolved", "environment"])
def test_a_folder_is_no_pattern(tmp_path: Path, name: str, how: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside it lies a folder that the pattern would match."""
    own = tmp_path / name
    for folder in (tmp_path / "exp1", own, tmp_path / "other"):
        corpus(folder)
    monkeypatch.setenv("OWN", str(own))
    (own / "plan.toml").write_text(text)
    elsewhere = tmp_path / "other" / "plan.toml"
    texts = {
        "source_folder": text.replace("plan = 1", f"plan = 1\nsource_folder = '../{escape_path(name)}'"),
        "environment": text.replace("corpus/*", "$OWN/corpus/*"),
    }
    if how == "plan":
        elsewhere = own / "plan.toml"
    else:
        elsewhere.write_text(texts[how] if how in texts else load_plan(own / "plan.toml").to_toml())
    assert read(elsewhere) == {own}
    (tmp_path / "again.toml").write_text(load_plan(elsewhere).to_toml())
    assert read(tmp_path / "again.toml") == {own}


def test_the_own_text_of_a_plan_is_a_pattern(tmp_path: Path, text: str) -> None:
    for name in ("exp1", "exp2", "exp[1]"):
        corpus(tmp_path / name)
    (tmp_path / "plan.toml").write_text(text)
    assert read(tmp_path / "plan.toml", 'data.files=["exp[12]/corpus/*"]') == {tmp_path / "exp1", tmp_path / "exp2"}
    assert read(tmp_path / "plan.toml", 'data.files=["exp[[]1]/corpus/*"]') == {tmp_path / "exp[1]"}
    assert read(tmp_path / "plan.toml", 'data.files=["exp[1]/corpus/0.txt"]') == {tmp_path / "exp[1]"}


KEYS = ("run.folder", "checkpoint.folder", "data.tokenizer", "model.weights", "data.files.0")


@pytest.mark.sample(4)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("path", ["~/here", "$NAME/here", "${NAME}/here", "$HOME/here"])
def test_home_and_environment_are_expanded(
    tmp_path: Path, key: str, path: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "a $home [1]"))
    monkeypatch.setenv("NAME", str(tmp_path / "a $home [1]"))
    (tmp_path / "plan.toml").write_text(text)
    plans = [load_plan(tmp_path / "plan.toml", [f"{key}='{path}'"])]
    (tmp_path / "resolved.toml").write_text(plans[0].to_toml())
    plans.append(load_plan(tmp_path / "resolved.toml"))
    for plan in plans:
        config = plan.data.config
        found = {
            "run.folder": plan.run.folder,
            "checkpoint.folder": plan.checkpoint and plan.checkpoint.folder,
            "data.tokenizer": config.tokenizer,
            "model.weights": plan.model.config.weights,
            "data.files.0": str(config.files[0]).replace("[[]", "["),
        }
        assert str(found[key]) == str(tmp_path / "a $home [1]" / "here")


@pytest.mark.sample(4)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("path", ["$NOWHERE/x", "${NOWHERE}", "a/$EMPTY", "~no_such_user/x"])
def test_a_name_that_is_not_set_is_an_error_with_its_place(
    tmp_path: Path, key: str, path: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(PlanError) as caught:
        load_plan(tmp_path / "plan.toml", [f"{key}='{path}'"])
    (found,) = (one for one in caught.value.diagnostics if one.code == "wrong-value")
    assert str(found.place) == "--set #1"
    assert "the environment variable `" in found.message or "has no home folder" in found.message


def test_the_source_folder_too(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "plan.toml").write_text(f"source_folder = '$NOWHERE/x'\n{text}")
    with pytest.raises(PlanError, match="the environment variable `NOWHERE` is not set"):
        load_plan(tmp_path / "plan.toml")
