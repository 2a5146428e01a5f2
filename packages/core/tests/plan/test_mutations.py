"""Whatever becomes of a plan's text, the outcome is a plan or diagnostics: never another error."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sley_core.errors import EXIT_OK, EXIT_PLAN_INVALID, EXIT_PLUGIN, Diagnostic, PlanError, PluginError, SleyError
from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan, plan_from_text
from sley_core.plan.loader import Loader
from sley_core.plan.write import sections
from sley_testing.plans import loader_of, small_plan

LOADER = loader_of({})

BASES: list[dict[str, Any]] = [
    small_plan(
        plan=1,
        run={"name": "small", "steps": 20, "device": "cpu", "folder": "runs"},
        model__tie_embeddings=True,
        data={"use": "data.text", "files": ["text.txt"], "sequence": 8, "documents": "cut"},
        loss={"use": "core.cross_entropy", "label_smoothing": 0.1},
        optimizer__betas=[0.9, 0.95],
        optimizer__groups=[{"match": "*.bias", "lr": 1e-3}, {"match": "embed.*", "freeze": True}],
        learning_rate={"use": "core.cosine", "warmup_steps": 2},
        parallel={"dp": 2, "pp": 1},
        activations={"use": "core.recompute", "fraction": 0.5},
        gradient_handlers=[{"use": "core.each"}],
        metrics=[{"use": "core.jsonl"}],
        profile={"steps": [2, 3]},
    ),
    {
        "run": {"name": "own", "steps": 3},
        "model": {"factory": "own:layers", "options": {"depth": 2, "names": ["a", {"b": 1.5}]}},
        "data": {"factory": "own:data", "fields": {"x": {"dtype": "float32"}, "y": {"dtype": "int64", "ids": "label"}}},
        "loss": {"factory": "own:loss"},
        "batch": {"global_size": 4, "micro_size": 1},
        "optimizer": {"factory": "torch.optim:NAdam", "lr": 0.1, "options": {"eps": 1e-8}},
        "parallel": {"dp": "auto"},
        "evaluation": {"every": 2, "steps": 1},
        "limits": {"start_timeout_s": 5.0},
        "scheduler_hooks": [],
    },
]

WORDS = st.sampled_from(
    re.findall(r"\S+", "run steps use factory options core.each models.llama dp.bucketed auto fp16 pp dp sp wp groups 0 plan")
)
STRINGS = st.one_of(WORDS, st.text(st.characters(exclude_categories=["Cs"]), max_size=10))
SCALARS = st.one_of(
    STRINGS,
    st.integers(-3, 20),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.dates(),
    st.sampled_from([2**63 - 1, -(2**63), 2**63, 10**30]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(STRINGS, inner, max_size=3)), max_leaves=5
)


def containers(value: Any) -> list[Any]:
    """Every table and array that has something in it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return ([value] if inner else []) + [found for item in inner for found in containers(item)]


def mutate_tables(draw: Any, tables: dict[str, Any]) -> None:
    where = draw(st.sampled_from(containers(tables)))
    key = draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
    match draw(st.sampled_from(["drop", "rename", "change", "nest", "move", "add"])):
        case "drop":
            del where[key]
        case "rename" if isinstance(where, dict):
            where[draw(st.one_of(STRINGS, st.just(f"{key}s"), st.just(key[:-1])))] = where.pop(key)
        case "change":
            where[key] = draw(VALUES)
        case "nest":
            where[key] = draw(st.sampled_from([[where[key]], {str(key): where[key]}, [where[key]] * 2]))
        case "move":
            target = draw(st.sampled_from([one for one in containers(tables) if isinstance(one, dict)]))
            target[str(key)] = deepcopy(where[key])
        case "add" if isinstance(where, dict):
            where[draw(STRINGS)] = draw(VALUES)
        case _:
            where[key] = draw(SCALARS)


def mutate_text(draw: Any, text: str) -> str:
    at: int = draw(st.integers(0, len(text)))
    until: int = min(len(text), at + draw(st.integers(0, 12)))
    depth: int = draw(st.sampled_from([3, 30, 31, 32, 33, 40, 200]))
    inserted: str = draw(st.one_of(STRINGS, st.sampled_from("[]{}\"'=.,#\n\r\0\t")))
    texts = [
        *(text, text[:at], text[:at] + text[until:], text[:at] + inserted + text[at:], text + text[at:until]),
        f"{text[:at]}\nx = {'[' * depth}{']' * depth}\n{text[at:]}",
    ]
    return draw(st.sampled_from(texts))


@st.composite
def broken_plans(draw: Any) -> str:
    tables = deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(0, 3))):
        if containers(tables):
            mutate_tables(draw, tables)
    try:
        text = "\n".join(sections(tables))
    except ValueError:  # a key can hold only what a TOML writer can write
        text = ""
    return mutate_text(draw, text)


OVERRIDES = st.lists(
    st.one_of(
        st.builds("{}.{}={}".format, WORDS, WORDS, WORDS),
        st.builds("run.{}={}".format, WORDS, STRINGS),
        st.sampled_from(["run.steps=0", "optimizer.groups.2.match=x", "metrics.0.use=core.csv", "parallel.dp=7", "="]),
        STRINGS,
    ),
    max_size=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    (folder / "text.txt").write_text("a text of some length for a small plan " * 20)
    return folder


@pytest.mark.parametrize("tables", BASES)
def test_the_plans_are_valid_before_they_are_mutated(folder: Path, tables: dict[str, Any]) -> None:
    plan = plan_from_text("\n".join(sections(tables)), folder=folder, loader=LOADER)
    assert check_plan(plan, plan.world()) == []


def try_plan(load: Callable[[], Any]) -> None:
    exit_code = EXIT_OK
    try:
        plan = load()
        found = tuple(check_plan(plan, min(plan.world(), 1 << 20)))
        again = plan_from_text(plan.to_toml(), loader=LOADER)
        assert (again, again.digest, again.to_toml()) == (plan, plan.digest, plan.to_toml())
    except SleyError as error:
        found = error.diagnostics
        exit_code = error.exit_code
    assert exit_code in (EXIT_OK, EXIT_PLAN_INVALID, EXIT_PLUGIN)
    assert found or not exit_code
    for one in found:
        assert re.fullmatch("[a-z0-9-]+", one.code), one
        assert one.place, one
        assert one.message, one
        assert not one.message.endswith("."), one
        own_words = re.sub(r"`.*`|\".*\"", "", one.message)
        assert not re.search(r"Traceback|<class|pydantic|\bNone\b|Input should", own_words), one
        assert len(one.message) < 500, one
        if one.place.line and one.source_line is not None:
            assert 1 <= one.place.column <= len(one.source_line) + 1, one


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    text=broken_plans(),
    overrides=OVERRIDES,
    at=st.integers(0, 2000),
    byte=st.one_of(st.none(), st.binary(min_size=1, max_size=2)),
)
def test_any_plan(folder: Path, text: str, overrides: list[str], at: int, byte: bytes | None) -> None:
    """As text, or as a file of which a byte is another."""
    if byte is None:
        try_plan(lambda: plan_from_text(text, "plan.toml", folder, overrides, loader=LOADER))
        return
    path = folder / "plan.toml"
    content = text.encode()
    path.write_bytes(content[:at] + byte + content[at + 1 :])
    try_plan(lambda: load_plan(path, overrides, loader=LOADER))


# -- mistakes by name --------------------------------------------------------------------------------------------------


def problems(text: str, loader: Loader, **more: Any) -> tuple[Diagnostic, ...]:
    with pytest.raises(SleyError) as caught:
        plan_from_text(text, loader=loader, **more)
    return caught.value.diagnostics


def codes(text: str, loader: Loader) -> list[str]:
    return [f"{found.code} {found.place.line}:{found.place.column}" for found in problems(text, loader) if found.place]


LLAMA, LR, STEPS = 'use = "models.llama"', "lr = 3e-3", "steps = 20"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (STEPS, "steps = true", "wrong-type 5:9"),
        (STEPS, 'steps = "20"', "wrong-type 5:9"),
        (STEPS, "steps = 0", "out-of-range 5:9"),
        (STEPS, "steps = 1979-05-27", "wrong-type 5:9"),
        (STEPS, 'steps = 20\ndevice = "gpu"', "wrong-value 6:10"),
        (STEPS, "steps = 0x" + "f" * 9000, "out-of-range 5:9"),
        ("dp = 2", 'dp = "atuo"', "wrong-value 27:6"),
        (LR, "lr = nan", "out-of-range 24:6"),
        (LR, "lr = 1\nbetas = [0.9, 1.5]", "out-of-range 25:15"),
        (LR, "lr = 1\nbetas = [0.9]", "out-of-range 25:9"),
        (LR, 'lr = 1\ngroups = [{match = "a"}, {mtach = "b"}]', "missing-key 25:26"),
        (LR, 'lr = 3e-3\ngroups = [{ match = "emb.*", betas = [0.9, 0.95] }]', "unknown-key 25:30"),
        ('name = "small"', 'name = "../up"', "wrong-value 4:8"),
        (LLAMA, 'use = "llama"', "wrong-value 8:7"),
        (LLAMA, "use = 3", "wrong-type 8:7"),
        (LLAMA, 'use = "core.lama"', "unknown-record 8:7"),
        (LLAMA, 'use = "cor.llama"', "plugin-unknown 8:7"),
        (LLAMA, 'use = "pp.llama"', "plugin-missing 8:7"),
        (f"{LLAMA}\n", "", "missing-key 7:1"),
        (LLAMA, f'{LLAMA}\nfactory = "a:b"', "use-and-factory 9:1"),
        ("[parallel]", '[activations]\nfactory = "own:kept"\n\n[parallel]', "no-factory 27:1"),
        ('source = "python-stdlib"\n', "", "wrong-value 13:1"),
        ("plan = 1", "plan = true", "plan-format 1:8"),
        ("plan = 1", "source_folder = 1", "wrong-type 1:17"),
        ("[batch]", "[batch_]", "missing-table 0:0"),
        ("plan = 1", "metrics = {}", "wrong-type 1:11"),
        ("plan = 1", 'metrics = ["core.jsonl"]', "wrong-type 1:12"),
        ("plan = 1", "evaluation = []", "wrong-type 1:14"),
        ("plan = 1", "stepz = 20", "unknown-key 1:1"),
        ("plan = 1", "[modle]", "unknown-table 1:2"),
        ("plan = 1", "y = [1]\nx = " + "[" * 40 + "]" * 40, "too-deep 2:5"),
        ("[parallel]", '[link]\nuse = "mine.l"\n[parallel]', "table-without-effect 26:1"),
    ],
)
def test_a_mistake_has_its_code_and_place(text: str, loader: Loader, old: str, new: str, expected: str) -> None:
    assert old in text
    assert expected in codes(text.replace(old, new, 1), loader)


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        (STEPS, "stepz = 20", "did you mean `steps`?"),
        ("plan = 1", "steps = 20", "did you mean `run.steps`?"),
        (STEPS, 'steps = 20\n[precision]\ncompute = "float32"', "did you mean `fp32`?"),
        (STEPS, 'steps = "20"', "write 20 without quotes"),
        ("dp = 2", "dp = 2\nhost_memory = false", "did you mean `cross_memory_attach`?"),
        ("[model]", "[model]\ncompile = { dynamik = true }", "did you mean `dynamic`?"),
    ],
)
def test_a_hint_names_the_closest(text: str, loader: Loader, old: str, new: str, hint: str) -> None:
    assert hint in [found.hint for found in problems(text.replace(old, new, 1), loader)]


def test_mistakes_come_in_the_order_of_the_file_and_then_of_overrides(text: str, loader: Loader) -> None:
    found = problems(
        text.replace("dp = 2", "dq = 2"), loader, overrides=["run.stepz=5", "parallel.pp=two", "evaluation.steps=3"]
    )
    assert [(one.code, str(one.place), one.source_line) for one in found] == [
        ("unknown-key", "plan.toml:27:1", "dq = 2"),
        ("unknown-key", "--set #1", "run.stepz=5"),
        ("wrong-type", "--set #2", "parallel.pp=two"),
        ("missing-key", "--set #3", "evaluation.steps=3"),
    ]


def test_references_to_records_that_there_are_not(text: str, loader: Loader) -> None:
    text += '[[scheduler_hooks]]\nuse = "handlers.borrower"\npool = "pools.arna"\nmore = ["nothing.x", "plain"]\n'
    assert codes(text, loader) == ["unknown-record 30:8", "plugin-unknown 31:9", "unknown-name 31:22"]


def test_a_missing_plugin_is_reported_once_and_decides_the_exit_code(text: str, loader: Loader) -> None:
    text += '[[gradient_handlers]]\nuse = "pp.ties"\n[[gradient_handlers]]\nuse = "pp.more"\n'
    with pytest.raises(PluginError) as caught:
        plan_from_text(text.replace(STEPS, "steps = 0"), loader=loader)
    assert [found.code for found in caught.value.diagnostics] == ["out-of-range", "plugin-missing"]
    assert caught.value.exit_code == EXIT_PLUGIN
    with pytest.raises(PlanError) as invalid:
        plan_from_text(text.replace("[[gradient_handlers]]", "[[gradient_handlerz]]"), loader=loader)
    assert invalid.value.exit_code == EXIT_PLAN_INVALID


def test_tables_without_a_mistake_are_checked_against_each_other_and_the_files(text: str, loader: Loader) -> None:
    wrong = text.replace("hidden = 16", "hiden = 16").replace("micro_size = 2", "micro_size = 3")
    wrong = wrong.replace('source = "python-stdlib"', 'files = ["nowhere.txt"]')
    wrong += '\n[profile]\nsteps = [3, 21]\n\n[precision]\ngradients = "fp64"\n'
    assert {found.code for found in problems(wrong, loader)} == {
        *("unknown-key", "missing-key", "batch-does-not-divide", "beyond-the-run", "precision-unsupported", "data-missing")
    }
    for dp in ('"2"', '"auto"'):  # a batch is not checked against a number of ranks that is wrong, or not known yet
        assert "batch-does-not-divide" not in {found.code for found in problems(wrong.replace("dp = 2", f"dp = {dp}"), loader)}


def test_control_characters_are_not_shown(text: str, loader: Loader) -> None:
    text = text.replace("plan = 1", '"\\u001b[2J" = 1\t# \x7f'.replace("\x7f", "\N{RIGHT-TO-LEFT OVERRIDE}"))
    (found,) = problems(text, loader)
    assert found.message == "`?[2J` is not a key of a plan"
    assert found.source_line == '"\\u001b[2J" = 1 # ?'
