"""Each mistake in a plan has its own code, place and hint."""

from typing import Any

import pytest

from sley_core.errors import EXIT_PLAN_INVALID, EXIT_PLUGIN, Diagnostic, PlanError, PluginError, SleyError
from sley_core.plan.load import plan_from_text
from sley_core.plan.loader import PluginLoader


def problems(text: str, loader: PluginLoader, **more: Any) -> tuple[Diagnostic, ...]:
    with pytest.raises(SleyError) as caught:
        plan_from_text(text, loader=loader, **more)
    return caught.value.diagnostics


def codes(text: str, loader: PluginLoader) -> list[str]:
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
        ("[optimizer]", "[optimizer_]", "missing-table 0:0"),
        ("[batch]", '[evaluation]\nevery = 5\n[evaluation.sets."a b"]\nuse = "data.text"\n[batch]', "wrong-name 20:18"),
        ('"data.text"', '"data.mixture"\nsources = 3', "wrong-type 15:11"),
        ("plan = 1", "metrics = {}", "wrong-type 1:11"),
        ("plan = 1", 'metrics = ["core.jsonl"]', "wrong-type 1:12"),
        ("plan = 1", "evaluation = []", "wrong-type 1:14"),
        ("plan = 1", "stepz = 20", "unknown-key 1:1"),
        ("plan = 1", "[modle]", "unknown-key 1:2"),
        ("[parallel]", '[link]\nuse = "mine.l"\n[parallel]', "table-without-effect 26:1"),
    ],
)
def test_a_mistake_has_its_code_and_place(text: str, loader: PluginLoader, old: str, new: str, expected: str) -> None:
    assert old in text
    assert expected in codes(text.replace(old, new, 1), loader)


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        (STEPS, "stepz = 20", "did you mean `steps`?"),
        ("plan = 1", "steps = 20", "did you mean `run.steps`?"),
        ("plan = 1", 'extends = "base.toml"', "a plan is one file; change its values with `--set`"),
        (STEPS, 'steps = 20\n[precision]\ncompute = "float32"', "did you mean `fp32`?"),
        (STEPS, 'steps = "20"', "write 20 without quotes"),
        ("[model]", "[model]\ncompile = { dynamik = true }", "did you mean `dynamic`?"),
    ],
)
def test_a_hint_names_the_closest(text: str, loader: PluginLoader, old: str, new: str, hint: str) -> None:
    assert hint in [found.hint for found in problems(text.replace(old, new, 1), loader)]


def test_mistakes_come_in_the_order_of_the_file_and_then_of_overrides(text: str, loader: PluginLoader) -> None:
    found = problems(
        text.replace("dp = 2", "dq = 2"), loader, overrides=["run.stepz=5", "parallel.pp=two", "evaluation.steps=3"]
    )
    assert [(one.code, str(one.place), one.source_line) for one in found] == [
        ("unknown-key", "plan.toml:27:1", "dq = 2"),
        ("unknown-key", "--set #1", "run.stepz=5"),
        ("wrong-type", "--set #2", "parallel.pp=two"),
        ("missing-key", "--set #3", "evaluation.steps=3"),
    ]


def test_a_missing_plugin_is_reported_once_and_decides_the_exit_code(text: str, loader: PluginLoader) -> None:
    text += '[[gradient_handlers]]\nuse = "pp.ties"\n[[gradient_handlers]]\nuse = "pp.more"\n'
    with pytest.raises(PluginError) as caught:
        plan_from_text(text.replace(STEPS, "steps = 0"), loader=loader)
    assert [found.code for found in caught.value.diagnostics] == ["out-of-range", "plugin-missing"]
    assert caught.value.exit_code == EXIT_PLUGIN
    with pytest.raises(PlanError) as invalid:
        plan_from_text(text.replace("[[gradient_handlers]]", "[[gradient_handlerz]]"), loader=loader)
    assert invalid.value.exit_code == EXIT_PLAN_INVALID


def test_control_characters_are_not_shown(text: str, loader: PluginLoader) -> None:
    text = text.replace("plan = 1", '"\\u001b[2J" = 1\t# \x7f'.replace("\x7f", "\N{RIGHT-TO-LEFT OVERRIDE}"))
    (found,) = problems(text, loader)
    assert found.message == "`?[2J` is not a key of a plan"
    assert found.source_line == '"\\u001b[2J" = 1 # ?'
