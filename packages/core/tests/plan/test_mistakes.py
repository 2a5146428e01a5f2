"""All that is wrong with a plan is said at once, in order, in words."""

from __future__ import annotations

import pytest

from sley_core.errors import EXIT_PLAN_INVALID, EXIT_PLUGIN, PlanError, PluginError, SleyError
from sley_core.plan.load import plan_from_text
from sley_core.plan.loader import Loader
from sley_testing.plans import loader_of


def messages(text: str, loader: Loader) -> list[str]:
    """Every problem of a plan, in the order reported, as `code line:column message | hint`."""
    with pytest.raises(SleyError) as caught:
        plan_from_text(text, loader=loader)
    return [
        f"{found.code} {found.place.line}:{found.place.column} {found.message} | {found.hint}"
        for found in caught.value.diagnostics
        if found.place
    ]


def test_tables_and_keys_that_there_are_none_of(text: str, loader: Loader) -> None:
    broken = text.replace("steps = 20", "stepz = 20").replace("[batch]", "[bacth]").replace("plan = 1", "paln = 1")
    broken += '[optimizer.groups]\n[[modell]]\nuse = "x"\n'
    assert messages(broken, loader) == [
        "missing-table 0:0 the plan needs a table [batch] with `global_size`, `micro_size` | None",
        "unknown-key 1:1 `paln` is not a key of a plan | did you mean `plan`?",
        "missing-key 3:1 [run] needs `steps`, an integer of at least 1 | Optimizer steps to take.",
        "unknown-key 5:1 `stepz` is not a key of [run] | did you mean `steps`?",
        "unknown-table 18:2 `bacth` is not a table of a plan | did you mean `batch`?",
        "wrong-type 28:1 `optimizer.groups` must be an array, each a table, not a table | None",
        "unknown-table 29:3 `modell` is not a table of a plan | did you mean `model`?",
    ]


def test_a_table_that_names_a_record_and_is_missing_says_which_there_are(text: str, loader: Loader) -> None:
    start, end = text.index("[optimizer]"), text.index("[parallel]")
    assert messages(text[:start] + text[end:], loader) == [
        "missing-table 0:0 the plan needs a table [optimizer] with `use` or `factory` | core has `core.adamw`, `core.sgd`"
    ]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("steps = 5", "did you mean `run.steps`?"),
        ("every = 5", "did you mean `evaluation.every`?"),
        ("lr = 1e-3", "did you mean `optimizer.lr`?"),
        ("use = 'core.sgd'", "its keys are "),
    ],
)
def test_a_key_of_a_table_that_stands_above_all_leads_to_its_table(text: str, loader: Loader, line: str, hint: str) -> None:
    """As `--set steps=5` puts it there. Where several tables have it, or none, all keys are listed."""
    (told,) = messages(f"{line}\n{text}", loader)
    key = line.partition(" ")[0]
    assert told.startswith(f"unknown-key 1:1 `{key}` is not a key of a plan | {hint}"), told


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "steps = 20",
            "steps = true",
            "wrong-type 5:9 `run.steps` must be an integer of at least 1, not the boolean true | None",
        ),
        (
            "steps = 20",
            'steps = "20"',
            'wrong-type 5:9 `run.steps` must be an integer of at least 1, not the string "20" | write 20 without quotes',
        ),
        ("steps = 20", "steps = 20.0", "wrong-type 5:9 `run.steps` must be an integer of at least 1, not 20.0 | None"),
        ("steps = 20", "steps = 0", "out-of-range 5:9 `run.steps` must be an integer of at least 1, not 0 | None"),
        ("steps = 20", "steps = []", "wrong-type 5:9 `run.steps` must be an integer of at least 1, not an empty array | None"),
        (
            "steps = 20",
            "steps = 1979-05-27",
            "wrong-type 5:9 `run.steps` must be an integer of at least 1, not a date or time | None",
        ),
        ("dp = 2", "dp = 0", 'out-of-range 27:6 `parallel.dp` must be an integer of at least 1 or "auto", not 0 | None'),
        (
            "dp = 2",
            'dp = "atuo"',
            'wrong-value 27:6 `parallel.dp` must be an integer of at least 1 or "auto", not the string "atuo" | '
            "did you mean `auto`?",
        ),
        ("lr = 3e-3", "lr = nan", "out-of-range 24:6 `optimizer.lr` must be a number above 0, not nan | None"),
        ("lr = 3e-3", "lr = true", "wrong-type 24:6 `optimizer.lr` must be a number above 0, not the boolean true | None"),
        (
            "lr = 3e-3",
            "lr = 1\nbetas = [0.9, 1.5]",
            "out-of-range 25:15 `optimizer.betas.1` must be a number of at least 0 and below 1, not 1.5 | None",
        ),
        (
            "lr = 3e-3",
            "lr = 1\nbetas = [0.9]",
            "out-of-range 25:9 `optimizer.betas` must be an array of 2, each a number of at least 0 and below 1, "
            "not an array of 1 | None",
        ),
        (
            'source = "python-stdlib"\n',
            'source = "python-stdlib"\nseparator = ""\n',
            'out-of-range 16:13 `data.separator` must be a string that is not empty, not the string "" | None',
        ),
        (
            "lr = 3e-3",
            'lr = 1\ngroups = [{match = "a"}, {mtach = "b"}]',
            "missing-key 25:26 `core.adamw` needs `groups.1.match`, a string that is not empty | A pattern on parameter names",
        ),
        (
            'name = "small"',
            'name = "../up"',
            "wrong-value 4:8 `run.name` must be a name of up to 100 letters, digits, `.`, `_` and `-`, not the string "
            '"../up" | None',
        ),
        ('use = "models.llama"', 'use = "llama"', 'wrong-value 8:7 `model.use` must be the name of a record, "plugin.record"'),
        ('use = "models.llama"', "use = 3", 'wrong-type 8:7 `model.use` must be the name of a record, "plugin.record", not 3'),
        ('use = "models.llama"', 'use = "core.lama"', "unknown-record 8:7 plugin `core` (sley-core "),
        ('use = "models.llama"', 'use = "cor.llama"', "plugin-unknown 8:7 there is no plugin `cor` | did you mean `core`?"),
        (
            'use = "models.llama"',
            'use = "pp.llama"',
            "plugin-missing 8:7 plugin `pp` is not installed | install sley-pp, in a clone of Sley's repository: "
            "`pip install -e packages/pp`",
        ),
        (
            "steps = 20",
            'steps = 20\ndevice = "gpu"',
            'wrong-value 6:10 `run.device` must be "auto", "cpu" or "cuda", not the string "gpu" | did you mean `cuda`?',
        ),
        (
            "steps = 20",
            'steps = 20\n[precision]\ncompute = "float32"',
            'wrong-value 7:11 `precision.compute` must be "fp32", "bf16", "fp16" or "fp64", not the string "float32" | '
            "did you mean `fp32`?",
        ),
        (
            "lr = 3e-3",
            'lr = 3e-3\ngroups = [{ match = "emb.*", betas = [0.9, 0.95] }]',
            "unknown-key 25:30 `betas` is not a key of `optimizer.groups.0` | its keys are ",
        ),
        (
            "[parallel]",
            '[learning_rate]\nfactory = "own:rate"\n\n[parallel]',
            "no-factory 27:1 [learning_rate] takes no `factory`: a learning-rate schedule comes from a plugin, by its name | "
            "`use` one, or install a plugin of your own that offers a learning-rate schedule",
        ),
        (
            'use = "models.llama"\n',
            "",
            'missing-key 7:1 [model] needs `use`, the name of a model | sley-models has "models.llama"',
        ),
        ('use = "models.llama"', 'use = "models.llama"\nfactory = "a:b"', "use-and-factory 9:1 [model] has both"),
        ('source = "python-stdlib"\n', "", "wrong-value 13:1 `data.text`: one of `source` and `files` is needed | None"),
        ("plan = 1", "plan = 2", "plan-format 1:8 `plan` is the format of the plan, 1, not 2 | None"),
        ("plan = 1", "plan = true", "plan-format 1:8 `plan` is the format of the plan, 1, not the boolean true | None"),
        ("plan = 1", "source_folder = 1", "wrong-type 1:17 `source_folder` must be a string, not 1 | None"),
        ("plan = 1", "batch = 1", "wrong-type 1:9 `batch` must be a table, not 1 | None"),
        ("plan = 1", "metrics = {}", "wrong-type 1:11 `metrics` must be an array of tables, not a table | "),
        ("plan = 1", 'metrics = ["core.jsonl"]', "wrong-type 1:12 `metrics` must be a table, not the string"),
        ("plan = 1", "activations = 1", "wrong-type 1:15 `activations` must be a table, not 1 | None"),
        ("plan = 1", "evaluation = []", "wrong-type 1:14 `evaluation` must be a table, not an empty array | None"),
    ],
)
def test_what_can_be_wrong_with_a_value(text: str, loader: Loader, old: str, new: str, expected: str) -> None:
    assert old in text
    if new.startswith("batch"):
        text = text.replace("[batch]", "[batch_]")
    found = messages(text.replace(old, new, 1), loader)
    assert any(line.startswith(expected) for line in found), found


def test_references_that_lead_nowhere(text: str, loader: Loader) -> None:
    text += '[[scheduler_hooks]]\nuse = "handlers.borrower"\npool = "pools.arna"\nmore = ["nothing.x", "plain"]\n'
    assert messages(text, loader) == [
        "unknown-record 30:8 plugin `pools` (given 0) has no memory pool `arna` | did you mean `pools.arena`?",
        "plugin-unknown 31:9 there is no plugin `nothing` | install the package that has it, by custom `sley-nothing`; "
        "the plugins here are `core`, `checkpoint`, `data`, `handlers`, `models`, `pools`",
        'unknown-name 31:22 the plan has no table [pools.plain] | add it with `use`, or name a memory pool as "plugin.record"',
    ]


def test_a_broken_plugin_is_reported_once_and_decides_the_exit_code(text: str, loader: Loader) -> None:
    text += '[[gradient_handlers]]\nuse = "pp.ties"\n[[gradient_handlers]]\nuse = "pp.more"\n'
    with pytest.raises(PluginError) as caught:
        plan_from_text(text.replace("steps = 20", "steps = 0"), loader=loader)
    assert [found.code for found in caught.value.diagnostics] == ["out-of-range", "plugin-missing"]
    assert caught.value.exit_code == EXIT_PLUGIN
    with pytest.raises(PlanError) as invalid:
        plan_from_text(text.replace("[[gradient_handlers]]", "[[gradient_handlerz]]"), loader=loader)
    assert invalid.value.exit_code == EXIT_PLAN_INVALID


MANY = range(5_000)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("[run]\n", "[run]\n" + "".join(f"k{at} = 1\n" for at in MANY), "and 4,900 more problems of [run]"),
        ("[run]\n", "".join(f"k{at} = 1\n" for at in MANY) + "[run]\n", "and 4,900 more problems of the plan"),
        ("[run]\n", "".join(f"[k{at}]\n" for at in MANY) + "[run]\n", "and 4,900 more problems of the plan"),
        ("[run]\n", f"[profile]\nsteps = [{'3.5, ' * len(MANY)}]\n[run]\n", None),
        ("[run]\n", f"[profile]\nsteps = [{'9223372036854775808, ' * len(MANY)}]\n[run]\n", "more problems of the plan"),
        ("[run]\n", "[[metrics]]\nuse = 3\n" * len(MANY) + "[run]\n", "4,900 more of `metrics` were not looked at"),
    ],
    ids=["keys", "top", "tables", "items", "integers", "list"],
)
def test_a_plan_with_more_mistakes_than_anybody_reads(text: str, before: str, after: str, told: str | None) -> None:
    """Each shows its line, which may be the whole of a large plan: all of them would take for ever."""
    found = messages(text.replace(before, after, 1), loader_of({}))
    assert len(found) <= 102, len(found)
    if told is not None:
        assert any(told in one for one in found), found[-2:]
        assert "more-problems" in found[-1], found[-1]


def test_tables_without_a_mistake_are_checked_against_each_other_in_a_plan_that_has_one(text: str, loader: Loader) -> None:
    """Found only after the other mistake was mended, once: whoever writes a plan had as many rounds as mistakes."""
    wrong = text.replace("hidden = 16", "hiden = 16").replace("micro_size = 2", "micro_size = 3")
    wrong += '\n[timeline]\nstep = 21\n\n[precision]\ngradients = "fp64"\n'
    with pytest.raises(PlanError) as caught:
        plan_from_text(wrong, loader=loader)
    assert {one.code for one in caught.value.diagnostics} == {
        "unknown-key",
        "missing-key",
        "batch-does-not-divide",
        "beyond-the-run",
        "precision-unsupported",
    }


def test_data_that_is_not_there_is_told_beside_other_mistakes(text: str, loader: Loader) -> None:
    wrong = text.replace("hidden = 16", "hiden = 16").replace('source = "python-stdlib"', 'files = ["nowhere.txt"]')
    with pytest.raises(PlanError) as caught:
        plan_from_text(wrong, loader=loader)
    assert {one.code for one in caught.value.diagnostics} == {"unknown-key", "missing-key", "data-missing"}


@pytest.mark.parametrize(("micro", "dp"), [('"3"', "2"), ("3", '"2"'), ("3", '"auto"')])
def test_what_depends_on_a_mistake_is_not_told_beside_it(text: str, loader: Loader, micro: str, dp: str) -> None:
    """A batch is judged by sizes that are known: not by a table with a mistake, nor by ranks that only the start counts."""
    wrong = text.replace("hidden = 16", "hiden = 16").replace("micro_size = 2", f"micro_size = {micro}")
    with pytest.raises(PlanError) as caught:
        plan_from_text(wrong.replace("dp = 2", f"dp = {dp}"), loader=loader)
    assert "batch-does-not-divide" not in {one.code for one in caught.value.diagnostics}
