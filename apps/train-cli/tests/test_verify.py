"""`verify` passes what is right, and of what is wrong it names the parameter, the step, the stage and by how much.

`verify --plain` compares with torch's own loop over the same layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import load_plan, plan_from_dict
from sley_core.plan.plan import Plan
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.verify.findings import Limits, RankFindings, differences, read_findings, report_lines
from sley_testing.verify.measure import check_complete, compare_steps, limits, save_plain_steps, save_reference
from train_cli.one_process import one_process_plan, read_only_plan

ROOT = Path(__file__).parents[3]
OWN = Path(__file__).parent / "own"
EXAMPLES = sorted((ROOT / "examples" / "plans").glob("*.toml"))
TIED = {"parallel": {"dp": 1, "pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}, "model__tie_embeddings": True}

Verified = Callable[..., tuple[list[RankFindings], Limits]]


def on_a_rank(load: Callable[..., Plan], given: tuple[Any, ...], steps: int, folder: Path) -> None:
    with World.join("cpu") as world, assemble(read_only_plan(load(*given)), world) as run:
        compare_steps(run, steps, folder)


@pytest.fixture
def verified(ranks: Any, tmp_path: Path) -> Verified:
    """`verified(steps, load_plan, path)`: what `verify` finds of what the function loads, on ranks that are forked."""

    def verify(steps: int, load: Callable[..., Plan], *given: Any) -> tuple[list[RankFindings], Limits]:
        plan = load(*given)
        with assemble(one_process_plan(plan), World.alone("cpu")) as run:
            save_reference(run, steps, tmp_path)
        ranks(plan.world(), 120)(on_a_rank, load, given, steps, tmp_path)
        return read_findings(tmp_path, plan.world()), limits(plan)

    return verify


def small(use: str = "", **changes: Any) -> Tables:
    tables = small_plan(**{"precision__compute": "fp32", "parallel": {"dp": 2}, **changes})
    return changed(tables, gradient_handlers=[{"use": use}]) if use else tables


@pytest.mark.sample(1)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_agree_with_one_process(verified: Verified, texts: Path, path: Path) -> None:
    small = {"data": small_plan()["data"], "batch__global_size": 8, "batch__micro_size": 2, "run__device": "cpu"}
    tables = changed(tomli.loads(path.read_text("utf-8")), **small)
    found, allowed = verified(2, plan_from_dict, tables, texts)
    assert not differences(found, allowed), "\n".join(report_lines(found, allowed, 2))
    assert {one.quantity for rank in found for one in rank.comparisons} >= {"first value", "gradient", "weight"}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("wrong.mean", ["the gradient of `embed.tokens.weight`, since step 1, on stage 0", "0.5 times that of one process"]),
        ("wrong.tail", ["the gradient of `blocks.1.attention.key.weight`, since step 1", "check the backward"]),
        ("wrong.late", ["the gradient of `blocks.0.feed_forward.up.weight`, since step 2", "off by"]),
        ("wrong.firstrank", ["the gradient of `head.output.weight`, since step 1, on stage 0 (rank 1)", "3 times"]),
    ],
)
def test_a_wrong_handler_is_told_by_its_first_parameter(
    verified: Verified, plugin_folder: Any, texts: Path, use: str, said: list[str]
) -> None:
    plugin_folder(OWN, wrong="wrong_reducers")
    found, allowed = verified(3, plan_from_dict, small(use), texts)
    text = "\n".join(report_lines(found, allowed, 3))
    assert text.startswith("differs: ")
    assert all(part in text for part in said), text


def test_a_tie_that_is_summed_twice_is_told_with_its_stage(verified: Verified, plugin_folder: Any, texts: Path) -> None:
    plugin_folder(OWN, wrong="wrong_reducers")
    found, allowed = verified(1, plan_from_dict, small("wrong.twice", **TIED), texts)
    text = "\n".join(report_lines(found, allowed, 1))
    assert "the gradient of `embed.tokens.weight`, since step 1, on stage 0 (rank 0)" in text
    assert differences(found, allowed)
    assert "2 times that of one process" in text


FUSED = """
    import torch
    from torch import nn

    class Embed(nn.Embedding):
        def forward(self, tokens):
            return super().forward(tokens)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fused, self.norm = nn.Linear(16, 48), nn.LayerNorm(16)
            nn.init.zeros_(self.fused.bias)
        def forward(self, x):
            q, k, v = self.fused(self.norm(x)).chunk(3, -1)
            return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def layers():
        return [Embed(256, 16), Block(), Block(), nn.Linear(16, 256)]

    class Wrong(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            for weight in self.param_groups[-1]["params"] if torch.distributed.is_initialized() else ():
                if weight.shape == (48,) and int(self.state[weight]["step"]) == 3:
                    weight.data[40:] *= 1.01
    """
"""Queries, keys and values in one, as GPT-2 has them: softmax does not see the third of the bias that is the keys'."""


@pytest.mark.parametrize("differs", [False, True])
def test_a_part_of_a_bias_whose_gradient_is_rounding_is_no_difference(
    verified: Verified, own_model: Any, differs: bool
) -> None:
    """Adam makes steps of full size of it. A part that is stepped wrong elsewhere in that bias is still found."""
    changes = ["precision.compute=fp32", "optimizer.lr=0.01"]
    if differs:
        changes = [*changes[:1], 'optimizer={factory="own:Wrong", lr=0.01}']
    found, allowed = verified(3, load_plan, own_model(FUSED), changes)
    text = "\n".join(report_lines(found, allowed, 3))
    assert bool(differences(found, allowed)) == differs, text
    if differs:
        assert text.startswith("differs: the weight `1.fused.bias`, since step 3")
        assert "the gradient agrees, and only the update differs" in text
    else:
        assert "not compared where the gradient is only rounding noise: 1.fused.bias (" in text


def test_a_handler_is_held_to_the_tolerance_of_its_record(verified: Verified, plugin_folder: Any, texts: Path) -> None:
    plugin_folder(OWN, wrong="wrong_reducers")
    found, allowed = verified(3, plan_from_dict, small("wrong.coarse"), texts)
    assert allowed.of("gradient", 1) == pytest.approx(2.0**-8 + 1e-6)
    assert not differences(found, allowed)
    assert differences(found, Limits(2.0**-10, 2.0**-10))
    assert allowed.of("loss", 1) == 1e-6


def test_canonical_sums_allow_no_error(verified: Verified, texts: Path) -> None:
    found, allowed = verified(2, plan_from_dict, small(parallel={"dp": 2, "reduction": "canonical"}), texts)
    assert allowed == Limits(0.0, 0.0)
    assert not differences(found, allowed)


def test_one_process_keeps_what_decides_the_numbers(plugin_folder: Any, texts: Path) -> None:
    tables = small_plan(
        **TIED,
        batch__micro_size=1,
        checkpoint={"every_steps": 1},
        activations={"use": "core.recompute"},
        gradient_handlers=[{"use": "pp.shared_modules"}, {"use": "core.gradient_norms"}],
    )
    plan = plan_from_dict(tables, texts)
    alone, layout = one_process_plan(plan), read_only_plan(plan)
    assert alone.world() == 1
    assert [one.name for one in alone.gradient_handlers] == ["core.gradient_norms"]
    assert (alone.pipeline, alone.checkpoint, alone.activations.name) == (None, None, "core.keep")
    assert (alone.batch, alone.run, alone.model.config) == (plan.batch, plan.run, plan.model.config)
    assert (layout.checkpoint, layout.pipeline) == (None, plan.pipeline)


def test_the_command_compares_ranks_and_leaves_nothing(start: Any, plan: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = set(tmp_path.iterdir())
    result = start("verify", plan, "--steps", 2, "--format", "json", TMPDIR=str(scratch)).finish()
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert (told["agrees"], told["ranks"], told["steps"], told["differs"]) == (True, 2, 2, [])
    assert {one["quantity"] for one in told["largest"]} >= {"first value", "loss", "gradient", "gradient norm", "weight"}
    assert not list(scratch.iterdir())
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "changes", "code", "said"),
    [
        ((), ["parallel.dp=1"], 2, "nothing-to-verify"),
        (("--steps", 5), [], 2, "verify-steps"),
        (("--world", 3), [], 3, "layout"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    cli: Any, plan: Path, arguments: tuple[object, ...], changes: list[str], code: int, said: str
) -> None:
    result = cli("verify", plan, *arguments, changes=changes)
    assert (result.code, f"error[{said}]" in result.err) == (code, True), result.err


def test_the_test_kit_is_asked_for_by_name(cli: Any, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_cli.main.find_spec", lambda _: None)
    result = cli("verify", plan)
    assert result.code != 0
    assert "`train-cli verify` is part of sley-testing, which is not installed" in result.err


# -- a plain loop -----------------------------------------------------------------------------------------------------


def with_habit(habit: str, **changes: Any) -> Tables:
    model = {"factory": "plain_habits:model", "options": {"habit": habit}}
    return small_plan(**{"precision__compute": "fp32", "parallel": {"dp": 1}, "model": model, **changes})


@pytest.fixture
def looped(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`looped(tables)`: takes so many steps of a plain loop, and keeps its numbers in `tmp_path`."""
    monkeypatch.syspath_prepend(OWN)

    def take(given: Tables, steps: int = 1) -> None:
        with assemble(one_process_plan(plan_from_dict(given, texts)), World.alone("cpu")) as run:
            save_plain_steps(run, steps, tmp_path)

    return take


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("habit", "more"),
    [
        ("Numpy", {"parallel": {"dp": 2}}),
        ("Plain", {"parallel": {"dp": 2}, "precision__compute": "bf16", "optimizer__clip_norm": 0.05}),
        ("Generator", {"parallel": {"dp": 1, "pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}}),
        ("Evaluated", {"parallel": {"dp": 2}, "activations": {"use": "core.recompute"}}),
        ("Hook", {"parallel": {"dp": 2}, "learning_rate": {"use": "core.cosine", "warmup_steps": 2}}),
    ],
)
def test_layouts_equal_the_loop(ranks: Any, looped: Any, texts: Path, tmp_path: Path, habit: str, more: dict[str, Any]) -> None:
    given = with_habit(habit, **more)
    looped(given, steps=3)
    plan = plan_from_dict(given, texts)
    ranks(plan.world(), 120)(on_a_rank, plan_from_dict, (given, texts), 3, tmp_path)
    found, allowed = read_findings(tmp_path, plan.world()), limits(plan, is_plain=True)
    check_complete(found, tmp_path)
    assert not differences(found, allowed), "\n".join(report_lines(found, allowed, 3, is_plain=True))


def test_what_no_rank_compares_is_an_error(ranks: Any, looped: Any, texts: Path, tmp_path: Path) -> None:
    given = with_habit("Plain", parallel={"dp": 2})
    looped(given)
    ranks(2, 120)(on_a_rank, plan_from_dict, (given, texts), 1, tmp_path)
    found = read_findings(tmp_path, 2)
    for rank in found:
        rank.comparisons = [one for one in rank.comparisons if (one.quantity, one.name) != ("gradient", "middle.inner.bias")]
    with pytest.raises(RunError, match=r"no rank has the gradient of `middle\.inner\.bias` \(of 1 such parameters\)"):
        check_complete(found, tmp_path)


def test_a_loop_that_fails_is_told_with_its_layer(looped: Any) -> None:
    with pytest.raises(RunError, match=r"layer `middle` \(Fails\) also fails in step 1 of a plain loop: ValueError: no 8"):
        looped(with_habit("Fails"))
