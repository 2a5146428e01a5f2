"""Every path of a plan follows one rule: `~` and `$NAME` are expanded, and only the plan's own text is a pattern."""

from glob import escape
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


SPELLINGS = {
    "run.folder": "$NAME/here",
    "checkpoint.folder": "~/here",
    "data.tokenizer": "${NAME}/here",
    "model.weights": "$HOME/here",
    "data.files.0": "~/here",
}


def test_home_and_environment_are_expanded(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "a $home [1]"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NAME", str(home))
    (tmp_path / "plan.toml").write_text(text)
    plan = load_plan(tmp_path / "plan.toml", [f"{key}='{path}'" for key, path in SPELLINGS.items()])
    (tmp_path / "resolved.toml").write_text(plan.to_toml())
    for each in (plan, load_plan(tmp_path / "resolved.toml")):
        assert each.checkpoint
        data, weights = each.data.config, each.model.config.weights
        paths = {str(path) for path in (each.run.folder, each.checkpoint.config.folder, data.tokenizer, weights)}
        assert paths == {str(home / "here")}
        assert data.files == (Path(escape(str(home / "here"))),)


def test_a_name_that_is_not_set_is_an_error_with_its_place(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "plan.toml").write_text(f"source_folder = '$NOWHERE/x'\n{text}")
    paths = ("$NOWHERE/x", "${NOWHERE}", "a/$EMPTY", "~no_such_user/x", "$NOWHERE")
    with pytest.raises(PlanError) as caught:
        load_plan(tmp_path / "plan.toml", [f"{key}='{path}'" for key, path in zip(SPELLINGS, paths, strict=True)])
    problems = [problem for problem in caught.value.diagnostics if problem.code == "wrong-value"]
    places = [f"{tmp_path / 'plan.toml'}:1:17", *(f"--set #{number}" for number in range(1, 6))]
    assert [str(problem.place) for problem in problems] == places
    words = ("the environment variable `", "has no home folder")
    assert all(any(text in problem.message for text in words) for problem in problems)
