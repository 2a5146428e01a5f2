"""`--set` puts TOML values anywhere into a plan, and what is wrong with one is said at `--set #n`."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_text
from sley_core.plan.read import apply

BEFORE: dict[str, Any] = {"run": {"name": "x"}, "gradient_handlers": [{"use": "core.each"}], "odd key": {"1": 2}}


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("run.steps=4", ("run", "steps"), 4),
        (" run.steps = 4 ", ("run", "steps"), 4),
        ('run.name="a=b"', ("run", "name"), "a=b"),
        ("run.name=first", ("run", "name"), "first"),
        ("run.name=two words", ("run", "name"), "two words"),
        ("model.factory=a.b:c", ("model", "factory"), "a.b:c"),
        ("data.tokenizer=./a/b-1.json", ("data", "tokenizer"), "./a/b-1.json"),
        ("model.compile=true", ("model", "compile"), True),
        ("optimizer.betas=[0.9, 0.99]", ("optimizer", "betas"), [0.9, 0.99]),
        ("gradient_handlers.0.bucket_mb=50", ("gradient_handlers", 0, "bucket_mb"), 50),
        ("gradient_handlers.1.use=x.y", ("gradient_handlers", 1, "use"), "x.y"),
        ("gradient_handlers=[]", ("gradient_handlers",), []),
        ("metrics.0.use=core.jsonl", ("metrics", 0, "use"), "core.jsonl"),
        ('"odd key".1=3', ("odd key", "1"), 3),
        ("a.b.c=1", ("a", "b", "c"), 1),
        ("data.when=1979-05-27", ("data", "when"), __import__("datetime").date(1979, 5, 27)),
    ],
)
def test_a_value_is_set(text: str, path: tuple[str | int, ...], value: Any) -> None:
    tables = deepcopy(BEFORE)
    assert apply(tables, text) == path
    for part in path:
        tables = tables[part]  # type: ignore[index]
    assert tables == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "run.steps",
        "=4",
        "run..steps=4",
        "run.steps=",
        'run.name="open',
        "run.steps=[1",
        "run.steps=1\nrun.seed=2",
        "run.steps=1\n[x]",
        "a\n[b]\nc=1",
        "run.name.first=x",
        "gradient_handlers.2.use=x",
        "gradient_handlers.use=x",
        "gradient_handlers.-1.use=x",
        "run.name='a' 'b'",
        "a=" + "9" * 5000 + "'",
        "data.tokenizer=a\udcff",
    ],
)
def test_what_cannot_be_set(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        apply(deepcopy(BEFORE), text)
    assert [found.code for found in caught.value.diagnostics] == ["set-invalid"]


def test_all_bad_overrides_are_reported(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_text(text, overrides=["run", "run.steps=5", "=="])
    assert [str(found.place) for found in caught.value.diagnostics] == ["--set #1", "--set #3"]
