"""Tests that `verify` accepts correct plans and reports the parameter, step and stage of an error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli

from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import load_plan, plan_from_dict
from sley_core.plan.plan import Plan
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.verify import (
    Limits,
    RankFindings,
    check_all_compared,
    compare_steps,
    compute_limits,
    find_differences,
    read_findings,
    report_lines,
    save_reference,
)
from sley_trainer.assemble import assemble
from train_cli.saved_run import one_process_plan, read_only_plan

OWN = Path(__file__).parent / "own"
EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "plans").glob("*.toml"))
TIED = {"parallel": {"dp": 1, "pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}, "model__tie_embeddings": True}

Verified = Callable[..., tuple[list[RankFindings], Limits]]


def compare_on_rank(load: Callable[..., Plan], args: tuple[Any, ...], steps: int, folder: Path) -> None:
    with World.join("cpu") as world, assemble(read_only_plan(load(*args)), world) as run:
        compare_steps(run, steps, folder)


@pytest.fixture
def verified(ranks: Any, tmp_path: Path) -> Verified:
    """Returns `verified(steps, load_plan, path)`, which returns the findings and limits of `verify` on forked ranks."""

    def verify(steps: int, load: Callable[..., Plan], *args: Any) -> tuple[list[RankFindings], Limits]:
        plan = load(*args)
        with assemble(one_process_plan(plan), World.alone("cpu")) as run:
            save_reference(run, steps, tmp_path)
        ranks(plan.world_size(), 120)(compare_on_rank, load, args, steps, tmp_path)
        return read_findings(tmp_path, plan.world_size()), compute_limits(plan)

    return verify


def small(use: str = "", **changes: Any) -> Tables:
    tables = small_plan(**{"precision__compute": "fp32", "parallel": {"dp": 2}, **changes})
    return changed(tables, gradient_handlers=[{"use": use}]) if use else tables


@pytest.mark.sample(1)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_agree_with_one_process(verified: Verified, texts: Path, path: Path) -> None:
    small = {"data": small_plan()["data"], "batch__global_size": 8, "batch__micro_size": 2, "run__device": "cpu"}
    tables = changed(tomli.loads(path.read_text("utf-8")), **small)
    findings, allowed = verified(2, plan_from_dict, tables, texts)
    assert not find_differences(findings, allowed), "\n".join(report_lines(findings, allowed, 2))
    quantities = {comparison.quantity for rank in findings for comparison in rank.comparisons}
    assert quantities >= {"first value", "gradient", "weight"}


EMBEDDING = "the gradient of `embed.tokens.weight`, since step 1,"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("use", "changes", "messages"),
    [
        ("wrong.mean", {}, [f"{EMBEDDING} on stage 0", "0.5 times the value of one process"]),
        ("wrong.twice", TIED, [f"{EMBEDDING} on stage 0 (rank 0)", "2 times the value of"]),
        ("wrong.late", {}, ["the gradient of `blocks.0.feed_forward.up.weight`, since step 2", "relative error"]),
    ],
)
def test_handler_bug_is_reported_with_first_parameter(
    verified: Verified, install_plugins: Any, texts: Path, use: str, changes: Tables, messages: list[str]
) -> None:
    install_plugins(OWN, wrong="wrong_reducers")
    findings, allowed = verified(2, plan_from_dict, small(use, **changes), texts)
    text = "\n".join(report_lines(findings, allowed, 2))
    assert find_differences(findings, allowed)
    assert text.startswith("differs: ")
    assert all(message in text for message in messages), text


FUSED = """
    import torch
    from torch import nn
    from sley_testing.habits import Embed

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
"""A model with fused queries, keys and values, as in GPT-2. Softmax ignores the bias of the keys."""


@pytest.mark.parametrize("differs", [False, True])
def test_noise_in_part_of_a_bias_is_no_difference(verified: Verified, own_model: Any, differs: bool) -> None:
    """Adam takes full-size steps from noise. A wrong step elsewhere in the bias is still reported."""
    changes = ["precision.compute=fp32", "optimizer.lr=0.01"]
    if differs:
        changes = [*changes[:1], 'optimizer={factory="own:Wrong", lr=0.01}']
    findings, allowed = verified(3, load_plan, own_model(FUSED), changes)
    text = "\n".join(report_lines(findings, allowed, 3))
    assert bool(find_differences(findings, allowed)) == differs, text
    if differs:
        assert text.startswith("differs: the weight `1.fused.bias`, since step 3")
        assert "the gradient agrees, and only the update differs" in text
    else:
        assert "not compared, since the gradient is only rounding noise: 1.fused.bias (" in text


def test_tolerance_is_that_of_the_record_and_all_tensors_are_compared(
    verified: Verified, install_plugins: Any, texts: Path, tmp_path: Path
) -> None:
    install_plugins(OWN, wrong="wrong_reducers")
    findings, allowed = verified(2, plan_from_dict, small("wrong.coarse"), texts)
    assert allowed.limit_for("gradient", 1) == pytest.approx(2.0**-8 + 1e-6)
    assert not find_differences(findings, allowed)
    assert find_differences(findings, Limits(2.0**-10, 2.0**-10))
    assert allowed.limit_for("loss", 1) == 1e-6
    canonical = plan_from_dict(small(parallel={"dp": 2, "reduction": "canonical"}), texts)
    assert compute_limits(canonical) == Limits(0.0, 0.0)
    check_all_compared(findings, tmp_path)
    key = ("gradient", "blocks.0.attention.key.weight")
    for rank in findings:
        rank.comparisons = [item for item in rank.comparisons if (item.quantity, item.name) != key]
    message = r"no rank has the gradient of `blocks\.0\.attention\.key\.weight` \(the first of 1 such parameters\)"
    with pytest.raises(RunError, match=message):
        check_all_compared(findings, tmp_path)


def test_one_process_plan_keeps_results(install_plugins: Any, texts: Path) -> None:
    tables = small_plan(
        **TIED,
        batch__micro_size=1,
        checkpoint={"every_steps": 1},
        activations={"use": "core.recompute"},
        gradient_handlers=[{"use": "pp.shared_modules"}, {"use": "core.gradient_norms"}],
    )
    plan = plan_from_dict(tables, texts)
    single, layout = one_process_plan(plan), read_only_plan(plan)
    assert single.world_size() == 1
    assert [handler.name for handler in single.gradient_handlers] == ["core.gradient_norms"]
    assert (single.pipeline, single.checkpoint, single.activations.name) == (None, None, "core.keep")
    assert (single.batch, single.run, single.model.config) == (plan.batch, plan.run, plan.model.config)
    assert (layout.checkpoint, layout.pipeline) == (None, plan.pipeline)


def test_command_compares_ranks_and_leaves_no_files(start: Any, plan: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    initial_files = set(tmp_path.iterdir())
    result = start("verify", plan, "--steps", 2, "--format", "json", TMPDIR=str(scratch)).finish().expect(0)
    report = json.loads(result.out)
    assert (report["agrees"], report["ranks"], report["steps"], report["differs"]) == (True, 2, 2, [])
    quantities = {largest["quantity"] for largest in report["largest"]}
    assert quantities >= {"first value", "loss", "gradient", "gradient norm", "weight"}
    assert not list(scratch.iterdir())
    assert set(tmp_path.iterdir()) == initial_files


@pytest.mark.parametrize(
    ("arguments", "changes", "exit_code", "error_code"),
    [
        ((), ["parallel.dp=1"], 2, "nothing-to-verify"),
        (("--steps", 5), [], 2, "verify-steps"),
        (("--world", 3), [], 3, "layout"),
    ],
)
def test_invalid_comparison_is_refused(
    cli: Any, plan: Path, arguments: tuple[object, ...], changes: list[str], exit_code: int, error_code: str
) -> None:
    cli("verify", plan, *arguments, changes=changes).expect(exit_code, f"error[{error_code}]")


def test_missing_test_kit_is_reported(cli: Any, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_cli.main.find_spec", lambda _: None)
    assert "`train-cli verify` needs sley-testing, which is not installed" in cli("verify", plan).err
