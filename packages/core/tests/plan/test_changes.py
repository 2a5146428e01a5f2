"""What may differ between the plan of a checkpoint and that of the run that goes on from it."""

from __future__ import annotations

import pytest

from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.write import changes, refuse_changes
from sley_testing.plans import small_plan


def text(folder, **changed):
    return plan_from_dict(small_plan(**changed), folder).to_toml()


def test_equal_plans_have_no_changes(texts):
    assert changes(text(texts), text(texts, run__name="another")) == []


def test_layout_and_rates_may_change_and_are_told(texts):
    found = changes(text(texts), text(texts, parallel={"dp": 2}, optimizer__lr=0.5))
    refuse_changes(found)
    assert [one.path for one in found] == [("parallel", "dp"), ("optimizer", "lr")]
    assert str(found[1]).endswith("-> 0.5")


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"model__num_layers": 3}, "model.num_layers"),
        ({"data__sequence": 8}, "data.sequence"),
        ({"run__seed": 99}, "run.seed"),
        ({"optimizer": {"use": "core.sgd", "lr": 0.1}}, "optimizer.use"),
    ],
)
def test_what_makes_other_numbers_is_refused_with_both_values(texts, changed, key):
    with pytest.raises(PlanError, match="resume-differs") as found:
        refuse_changes(changes(text(texts), text(texts, **changed)))
    (first, *_) = found.value.diagnostics
    assert f"`{key} = " in first.message
    assert "the plan has" in first.message


def test_another_record_is_told_without_each_key_that_only_one_of_them_has(texts):
    with pytest.raises(PlanError) as found:
        refuse_changes(changes(text(texts), text(texts, model={"factory": "mine:layers", "options": {"width": 8}})))
    assert [one.message for one in found.value.diagnostics] == [
        'the checkpoint\'s run had `model.use = "models.llama"`, the plan has nothing',
        'the checkpoint\'s run had no `model.factory`, the plan has "mine:layers"',
    ]


def test_a_key_that_one_plan_lacks(texts):
    found = changes(text(texts), text(texts, evaluation={"every": 5, "steps": 1}))
    assert [(one.before, one.is_refused) for one in found] == [("nothing", False)] * len(found)
    assert found
