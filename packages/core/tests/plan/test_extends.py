"""A plan that extends another has its values, places and paths, and what it changes itself; nothing is mixed in silence."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from sley_core.errors import PlanError
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan

ROPE = "rope_scaling = {factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position_embeddings = 64}"
METRICS = '[[metrics]]\nuse = "core.jsonl"\n'


@pytest.fixture
def base(text: str) -> str:
    text = text.replace("heads = 2\n", f"heads = 4\n{ROPE}\n").replace("lr = 3e-3\n", "lr = 3e-3\nbetas = [0.9, 0.95]\n")
    return text.replace('source = "python-stdlib"', 'files = ["texts/*.txt", "more.txt"]') + METRICS * 2


@pytest.fixture
def write(tmp_path: Path):
    """`write(name=text, ...)`: files of a folder, `a__b` for a/b.toml; returns that of the first."""

    def write(**files: str) -> Path:
        paths = [tmp_path / f"{name.replace('__', '/')}.toml" for name in files]
        for path, text in zip(paths, files.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text), "utf-8")
        return paths[0]

    return write


def origin(plan: Plan, *path: str | int) -> tuple[str, int]:
    place = plan.document.origin(path)
    assert place is not None, path
    return Path(place.file).name, place.line


def test_tables_merge_key_by_key_and_lists_are_replaced(write, base: str) -> None:
    path = write(
        plan="""\
        extends = "base.toml"
        [run]
        name = "wide"
        [model]
        hidden = 32
        rope_scaling = {factor = 2.0}
        [data]
        files = ["own.txt"]
        [[metrics]]
        use = "core.jsonl"
        """,
        base=base,
    )
    plan = load_plan(path)
    assert (plan.run.name, plan.run.steps) == ("wide", 20)
    assert (plan.model.config.hidden, plan.model.config.heads) == (32, 4)
    assert (plan.model.config.rope_scaling.factor, plan.model.config.rope_scaling.high_freq_factor) == (2.0, 4.0)
    assert plan.data.config.files == (path.parent / "own.txt",)
    assert [one.name for one in plan.metrics] == ["core.jsonl"]
    assert origin(plan, "run", "name") == ("plan.toml", 3)
    assert origin(plan, "run", "steps") == ("base.toml", 5)
    assert origin(plan, "optimizer", "lr") == ("base.toml", 25)
    assert origin(plan, "data", "files") == ("plan.toml", 8)
    assert "extends" not in plan.to_toml()


def test_set_stands_above_both(write, base: str) -> None:
    path = write(plan='extends = "base.toml"\n[run]\nname = "a"\n', base=base)
    plan = load_plan(path, ["optimizer.lr=5e-4", "run.name=b", "data.files.0=x.txt"])
    assert (plan.optimizer.config.lr, plan.run.name) == (5e-4, "b")
    assert plan.origin(("optimizer", "lr")) == "--set #1"
    assert plan.data.config.files == (path.parent / "x.txt", path.parent / "more.txt")
    with pytest.raises(PlanError, match=r"unknown-key.*extends"):
        load_plan(path, ["extends=other.toml"])


def test_a_table_that_names_another_record_is_all_its_own(write, base: str) -> None:
    path = write(plan='extends = "base.toml"\n[optimizer]\nuse = "core.sgd"\nlr = 0.5\n', base=base)
    config = load_plan(path).optimizer.config
    assert (config.lr, hasattr(config, "betas")) == (0.5, False)
    path.write_text('extends = "base.toml"\n[optimizer]\nuse = "core.sgd"\n', "utf-8")
    with pytest.raises(PlanError, match=r"missing-key.*lr"):
        load_plan(path)
    path.write_text('extends = "base.toml"\n[model]\nfactory = "own:layers"\n', "utf-8")
    assert load_plan(path).model.name == "own:layers"


def test_paths_start_at_the_file_that_says_them(write, base: str, tmp_path: Path) -> None:
    path = write(plans__mine__plan='extends = "../base.toml"\n[data]\nheld_out_files = ["own.txt"]\n', plans__base=base)
    config = load_plan(path, ["data.files.1=set.txt"]).data.config
    mine, base = tmp_path / "plans" / "mine", tmp_path / "plans"
    assert config.held_out_files == (mine / "own.txt",)
    assert [Path(file).resolve() for file in config.files] == [base / "texts/*.txt", mine / "set.txt"]


def test_a_run_s_resolved_plan_can_be_extended(write, base: str, tmp_path: Path) -> None:
    write(data__base=base)
    runs = tmp_path / "runs" / "first"
    runs.mkdir(parents=True)
    (runs / "plan.toml").write_text(load_plan(tmp_path / "data" / "base.toml").to_toml(), "utf-8")
    plan = load_plan(write(next='extends = "runs/first/plan.toml"\n[run]\nname = "second"\n'))
    assert plan.folder == tmp_path
    assert [Path(file) for file in plan.data.config.files] == [tmp_path / "data/texts/*.txt", tmp_path / "data/more.txt"]


def test_a_mistake_is_told_where_it_stands(write, base: str) -> None:
    path = write(plan='extends = "base.toml"\n[run]\nname = 5\n', base=base.replace("heads = 4", "heads = 4\nhedas = 3"))
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    found = [
        (Path(one.place.file).name, one.place.line, one.source_line)
        for one in caught.value.diagnostics
        if one.place and one.code != "data-missing"
    ]
    assert sorted(found) == [("base.toml", 12, "hedas = 3"), ("plan.toml", 3, "name = 5")]


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ('extends = "none.toml"\n', "extends-missing", 1),
        ('\n\nextends = "."\n', "extends-missing", 3),
        ('extends = "plan.toml"\n', "extends-cycle", 1),
        ('extends = "loop.toml"\n', "extends-cycle", 2),
        ("extends = 5\n", "wrong-type", 1),
        ('extends = ["base.toml"]\n', "wrong-type", 1),
        ('extends = ""\n', "wrong-type", 1),
        ('extends = "broken.toml"\n', "syntax", 2),
    ],
)
def test_what_cannot_be_extended_is_refused_at_its_place(write, base: str, text: str, code: str, line: int) -> None:
    path = write(plan=text, loop='\nextends = "sub/../plan.toml"\n', broken="\n[run\n", base=base, sub__x="")
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    (found,) = caught.value.diagnostics
    assert (found.code, found.place and found.place.line) == (code, line), found
