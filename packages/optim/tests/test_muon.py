"""`optim.muon` gives each parameter its algorithm, and has the update of torch's classes in every layout."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_testing.contract import SQUARES
from sley_testing.optimizer_contract import OptimizerContract
from sley_testing.parity import assert_close_gradients, assert_same_bits, train_tensors
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import record, running

MUON: Tables = {"use": "optim.muon", "lr": 0.02, "adamw": {"lr": 3e-3}}
PLAN = small_plan(
    optimizer=MUON, model__ffn_hidden=27, model__vocab_size=257, data__sequence=16, learning_rate={"use": "core.cosine"}
)
SHARDED: Tables = {"gradient_handlers": [{"use": "dp.sharded", "bucket_mb": 0.01}]}
WP: Tables = {"weights": {"use": "isp.communicator"}}
STAGES: Tables = {"pipeline": {"use": "pp.zero_bubble_h1"}}
LAYOUTS: dict[str, Tables] = {
    "sharded": {"parallel__dp": 2, **SHARDED},
    "wp and sharded": {"parallel__dp": 4, "parallel__wp": 2, **WP, **SHARDED},
    "wp": {"parallel__dp": 2, "parallel__wp": 2, **WP},
    "stages": {"parallel__dp": 1, "parallel__pp": 2, **STAGES},
    "stages and sharded": {
        "parallel__dp": 2,
        "parallel__pp": 2,
        **STAGES,
        "gradient_handlers": [*SHARDED["gradient_handlers"], {"use": "pp.shared_modules"}],
    },
}


class TestMuon(OptimizerContract):
    optimizer: ClassVar[dict[str, Any]] = MUON


def names_by_role(tables: Tables, folder: Path) -> dict[str, set[str]]:
    """Returns the names of the parameters in this rank's groups, by role."""
    with running(tables, folder) as run:
        names = {id(entry.parameter): entry.name for entry in run.stepper.update.masters.optimizer_params}
        return {
            role: {
                names[id(parameter)]
                for group in run.stepper.update.optimizer.param_groups
                if group["role"] == role
                for parameter in group["params"]
            }
            for role in ("muon", "adamw")
        }


@pytest.mark.parametrize("is_tied", [False, True])
def test_hidden_matrices_have_muon(texts: Path, is_tied: bool) -> None:
    roles = names_by_role(changed(PLAN, model__tie_embeddings=is_tied), texts)
    ends = {name.removeprefix("blocks.0.").removeprefix("blocks.1.") for name in roles["muon"]}
    assert ends == {*(f"attention.{name}.weight" for name in ("query", "key", "value", "output")), *FFN}
    assert len(roles["muon"]) == 2 * len(ends)
    assert sum("norm" in name for name in roles["adamw"]) == 5
    assert len(roles["adamw"]) == 5 + (1 if is_tied else 2), roles["adamw"]


FFN = {"feed_forward.gate.weight", "feed_forward.up.weight", "feed_forward.down.weight"}


def test_update_is_that_of_torch_classes(texts: Path) -> None:
    """Gives the gradients of a run to torch.optim.Muon and torch.optim.AdamW in a loop."""
    groups = [{"match": "blocks.1.*.up.weight", "optimizer": "adamw"}, {"match": "blocks.0.*.down.weight", "lr": 0.05}]
    tables = changed(PLAN, optimizer__groups=groups)
    roles, recorded = names_by_role(tables, texts), record(tables, 3, folder=texts)
    assert "blocks.1.feed_forward.up.weight" in roles["adamw"]
    params = {name: nn.Parameter(recorded.initial_weights[name].clone()) for name in recorded.gradients[0]}
    slow = [params[name] for name in roles["muon"] if not name.endswith("0.feed_forward.down.weight")]
    muon = torch.optim.Muon([{"params": slow}, {"params": [params["blocks.0.feed_forward.down.weight"]], "lr": 0.05}], lr=0.02)
    decaying = [params[name] for name in roles["adamw"] if "norm" not in name]
    norms = [params[name] for name in roles["adamw"] if "norm" in name]
    adamw = torch.optim.AdamW(
        [{"params": decaying}, {"params": norms, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1
    )
    full_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in (muon, adamw)]
    for row, gradients in zip(recorded.rows, recorded.gradients, strict=True):
        for name, param in params.items():
            param.grad = gradients[name].clone()
        for optimizer, rates in zip((muon, adamw), full_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * row["lr"] / 0.02
            optimizer.step()
    expected = {name: param.detach() for name, param in params.items()}
    assert_close_gradients(expected, {name: recorded.weights[name] for name in expected}, 1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["wp and sharded", "stages and sharded", "sharded", "wp", "stages"])
def test_canonical_bits_are_those_of_one_process(ranks: Any, texts: Path, layout: str, compute: str) -> None:
    """With averages of the weights, which each rank keeps for its parts."""
    changes = {"model__tie_embeddings": True, "precision__compute": compute, "parallel__reduction": "canonical"}
    changes["averaging"] = {"use": "optim.ema", "decay": 0.5}
    tables = changed(PLAN, **LAYOUTS[layout], **changes)
    size = tables["parallel"]["dp"] * tables["parallel"].get("pp", 1)
    baseline = train_tensors(changed(PLAN, **changes), 2, folder=texts)
    for tensors in ranks(size, 120)(train_tensors, tables, 2, folder=texts):
        assert_same_bits(baseline, tensors)


def test_plan_may_change_the_algorithm_on_resume(texts: Path, tmp_path: Path) -> None:
    """New states begin at zero, in both directions; without it, AdamW would miss its own."""
    groups = [{"match": "blocks.0.*", "optimizer": "adamw"}]
    with running(PLAN, texts) as run:
        run.step()
        run.save_checkpoint(tmp_path / "saved")
    with running(changed(PLAN, optimizer__groups=groups), texts) as run:
        run.load_checkpoint(tmp_path / "saved")
        run.step()
        run.save_checkpoint(tmp_path / "changed")
    with running(PLAN, texts) as run:
        run.load_checkpoint(tmp_path / "changed")
        run.step()
        update = run.stepper.update
        states = {entry.name: update.optimizer.state[entry.parameter] for entry in update.masters.optimizer_params}
        assert set(states["blocks.0.feed_forward.up.weight"]) == {"momentum_buffer"}
        assert set(states["blocks.0.attention_norm.weight"]) >= {"exp_avg", "step"}


class Experts(nn.Module):
    """Applies the mean of a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 6, 6))
        self.kernel = nn.Parameter(torch.randn(1, 3, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.stack.dtype) @ (self.stack.mean(0) * self.kernel.mean())).tanh()


def experts() -> list[tuple[str, nn.Module]]:
    return [("first", Experts()), ("second", Experts())]


def experts_plan(**group: Any) -> Tables:
    return small_plan(
        model={"factory": f"{__name__}:experts"},
        data={"factory": "sley_testing.contract:Data"},
        loss=SQUARES,
        optimizer=MUON | {"groups": [group]},
    )


def test_a_group_gives_each_expert_a_muon_matrix() -> None:
    """Without the group, stacks have AdamW."""
    recorded = record(experts_plan(match="*.stack", optimizer="muon"), 1)
    for name in ("first.stack", "second.stack"):
        matrices = [nn.Parameter(matrix.clone()) for matrix in recorded.initial_weights[name]]
        for matrix, gradient in zip(matrices, recorded.gradients[0][name], strict=True):
            matrix.grad = gradient.clone()
        torch.optim.Muon(matrices, lr=0.02).step()
        assert_same_bits({name: torch.stack([matrix.detach() for matrix in matrices])}, {name: recorded.weights[name]})


def test_muon_for_other_shapes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"`first.kernel` has the shape \[1, 3, 6, 6\]") as caught:
        record(experts_plan(match="*.kernel", optimizer="muon"), 1)
    assert caught.value.diagnostics[0].code == "muon-shape"


def test_group_with_optimizer_and_freeze_is_refused(texts: Path) -> None:
    with pytest.raises(PlanError, match="`optimizer` has no effect in a group with `freeze = true`"):
        record(changed(PLAN, optimizer__groups=[{"match": "*", "freeze": True, "optimizer": "adamw"}]), 1, folder=texts)
