"""A resolved plan written as text loads to an equal plan, wherever the text lies."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.errors import PlanError, format_path
from sley_core.plan.load import load_plan, plan_from_dict, plan_from_text
from sley_core.plan.plan import Plan
from sley_core.plan.write import check_changes, compare_plans
from sley_core.table import escape_path
from sley_data.files import find_files
from sley_testing.plans import loader_of, small_plan

LOADER = loader_of({})

STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.one_of(
        STRINGS,
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.booleans(),
        st.datetimes(min_value=datetime(1900, 1, 1)),
        st.dates(min_value=date(1900, 1, 1)),
        st.times(min_value=time(1)),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(STRINGS, inner, max_size=3)),
    max_leaves=8,
)
PATHS = ["a.txt", "./b/*.txt", "/absolute/c", "../up/d", "e é/f"]


@settings(max_examples=30, deadline=None)
@given(
    options=st.dictionaries(STRINGS, VALUES, max_size=4),
    files=st.lists(st.sampled_from(PATHS), min_size=1),
    lr=st.floats(1e-30, 1e30),
    steps=st.integers(1, 2**62),
    folder=st.sampled_from([None, Path("/some/folder"), Path("relative")]),
)
def test_round_trip(options: dict[str, Any], files: list[str], lr: float, steps: int, folder: Path | None) -> None:
    model = {"factory": "my.code:layers", "options": options}
    tables = small_plan(model=model, data__files=files, optimizer__lr=lr, run__steps=steps, evaluation={"every": 3})
    plan = plan_from_dict(tables, folder, loader=LOADER)
    text = plan.to_toml()
    assert tomli.loads(text) == plan.tables
    again = plan_from_text(text, folder=Path("/elsewhere") if folder else None, loader=LOADER)
    assert again == plan
    assert (again.digest, again.to_toml()) == (plan.digest, text)


def test_a_resolved_plan_stands_anywhere(tmp_path: Path, text: str) -> None:
    (tmp_path / "plans").mkdir()
    path = tmp_path / "plans" / "plan.toml"
    path.write_text(text.replace('source = "python-stdlib"', 'files = ["corpus/*.txt", "../more.txt"]'))
    plan = load_plan(path)
    resolved = tmp_path / "plan.toml"
    resolved.write_text(plan.to_toml())
    again = load_plan(resolved)
    assert again == plan
    assert again.folder == tmp_path / "plans"
    assert again.data.config.files == (tmp_path / "plans/corpus/*.txt", tmp_path / "plans/../more.txt")
    assert 'files = ["corpus/*.txt", "../more.txt"]' in plan.to_toml()


def test_the_digest_is_of_what_runs(make: Callable[..., Plan], tables: dict[str, Any], text: str) -> None:
    digest = make().digest
    assert plan_from_text(text + "[loss]\n", folder=Path("/somewhere")).digest == digest
    assert plan_from_dict({**dict(reversed(tables.items())), "precision": {"compute": "fp32"}}).digest == digest
    assert make(run={**tables["run"], "seed": 1}).digest != digest


def resolved(folder: Path, **changed: Any) -> str:
    return plan_from_dict(small_plan(**changed), folder).to_toml()


def test_layout_and_rates_may_change_when_a_run_resumes(texts: Path) -> None:
    assert compare_plans(resolved(texts), resolved(texts, run__name="another")) == []
    found = compare_plans(
        resolved(texts), resolved(texts, parallel={"dp": 2}, optimizer__lr=0.5, evaluation={"every": 5, "steps": 1})
    )
    check_changes(found)
    assert [one.path for one in found[:2]] == [("parallel", "dp"), ("optimizer", "lr")]
    assert {one.before for one in found[2:]} == {"nothing"}


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        ({"model__num_layers": 3}, ["model.num_layers"]),
        ({"data__sequence": 8}, ["data.sequence"]),
        ({"run__seed": 99}, ["run.seed"]),
        ({"optimizer": {"use": "core.sgd", "lr": 0.1}}, ["optimizer.use"]),
        ({"model": {"factory": "mine:layers", "options": {"width": 8}}}, ["model.use", "model.factory"]),
    ],
)
def test_a_change_that_makes_other_numbers_is_refused(texts: Path, changed: Any, keys: list[str]) -> None:
    with pytest.raises(PlanError, match="resume-differs") as caught:
        check_changes(compare_plans(resolved(texts), resolved(texts, **changed)))
    assert [format_path(found.path) for found in caught.value.diagnostics] == keys


# -- paths -------------------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("how", ["plan", "source_folder", "extends", "resolved", "environment"])
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
        "extends": f"extends = '../{escape_path(name)}/plan.toml'",
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
    assert "the environment has no `" in found.message or "has no home folder" in found.message


@pytest.mark.parametrize("key", ["extends", "source_folder"])
def test_paths_to_plans_too(tmp_path: Path, key: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "plan.toml").write_text(f"{key} = '$NOWHERE/x'\n{text}")
    with pytest.raises(PlanError, match="the environment has no `NOWHERE`"):
        load_plan(tmp_path / "plan.toml")
