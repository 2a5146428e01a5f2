"""A small model with tied and frozen parameters, and runs of it whose averages the tests compare."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sley_core.checkpointing import WEIGHTS, checkpoint_files, load_plan_and_weights
from sley_core.weight_files.read import WeightFiles
from sley_testing.contract import SQUARES, WIDTH, Squares, TanhLinear, contract_plan
from sley_testing.parity import full_tensors, tensor_bytes
from sley_testing.plain import PlainLoop, decay_groups
from sley_testing.plans import Tables
from sley_testing.runs import running
from sley_trainer.run import Run

Tensors = dict[str, Tensor]

STEPS, SIZE, MICRO, HIDDEN = 6, 4, 2, 37
LR, DECAY = 0.05, 0.75
EMA = {"use": "optim.ema", "decay": DECAY}
MEAN = {"use": "optim.mean", "last": 4}


class Middle(nn.Module):
    """Has a frozen parameter, and others of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.up.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def layers(is_tied: bool = True) -> list[tuple[str, nn.Module]]:
    first, last = TanhLinear(WIDTH, WIDTH), TanhLinear(WIDTH, WIDTH)
    if is_tied:
        last.weight = first.weight
    return [("first", first), ("middle", Middle()), ("last", last)]


def averaging_plan(averaging: Mapping[str, Any] | None = EMA, **tables: Any) -> Tables:
    averaging_table = {} if averaging is None else {"averaging": dict(averaging)}
    return contract_plan(
        __name__,
        loss=SQUARES,
        batch={"global_size": SIZE, "micro_size": MICRO},
        **{
            "optimizer": {"use": "core.adamw", "lr": LR, "weight_decay": 0.1, "betas": [0.5, 0.5]},
            "data": {"factory": "sley_testing.contract:Data"},
            "run": {"name": "average", "steps": STEPS, "device": "cpu", "seed": 3},
            **averaging_table,
            **tables,
        },
    )


def batches() -> list[Tensors]:
    """Returns the global batch of each step."""
    generator = torch.Generator().manual_seed(11)
    x, y = torch.randn(2, STEPS, SIZE, WIDTH, generator=generator, dtype=torch.float64)
    return [{"x": x[step], "y": y[step]} for step in range(STEPS)]


@dataclass
class RunResult:
    """Holds one rank's results of a run. files: the saved weights in full precision. exported: the weights in the run's last
    checkpoint, as exports read them. loss: of an evaluation of the first batch. bits: of the weights and all states. values:
    the master weights, or the weights without masters, after each step.
    """

    first: Tensors = field(default_factory=dict)
    values: list[Tensors] = field(default_factory=list)
    files: Tensors = field(default_factory=dict)
    exported: Tensors = field(default_factory=dict)
    loss: float = 0.0
    bits: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def train(
    tables: Tables,
    folder: Path,
    *,
    save: Mapping[int, str] | None = None,
    load: str = "",
    before_step: Callable[[Run], None] = lambda run: None,
) -> RunResult:
    """Takes the steps of the plan and returns the results. All ranks call it with the same folder.

    save: the names of checkpoints to save, by step. load: the name of the checkpoint to resume from. before_step: is called
    with the run before each step.
    """
    result = RunResult()
    with running(tables) as run:
        result.first = {param.name: param.parameter.detach().clone() for param in run.registry}
        if load:
            restored = run.load_checkpoint(folder / load)
            assert restored is not None
            result.notes = list(restored.notes)
        for batch in batches()[run.num_steps_done :]:
            before_step(run)
            run.step({name: value[run.rows] for name, value in batch.items()})
            tensors = full_tensors(run)
            result.values.append(
                {name.removeprefix(WEIGHTS): value for name, value in tensors.items() if name.startswith(WEIGHTS)}
            )
            if save and run.num_steps_done in save:
                run.save_checkpoint(folder / save[run.num_steps_done])
        result.bits = {name: tensor_bytes(value) for name, value in full_tensors(run).items()}
        result.loss = run.evaluate({name: value[run.rows] for name, value in batches()[0].items()})
        run.save_weights(folder / "weights", precision="full")
        path = run.save_checkpoint(folder / f"last {next(_numbers)}")
        result.files = read_tensors(WeightFiles(folder / "weights"))
        reader = checkpoint_files(run.plan.loader)
        assert reader is not None
        checkpoint = reader.open(path)
        assert checkpoint is not None
        result.exported = read_tensors(load_plan_and_weights(checkpoint)[1])
        final_bits = {name: tensor_bytes(value) for name, value in full_tensors(run).items()}
        assert final_bits == result.bits, "an evaluation has changed the run"
    return result


_numbers = count()  # of runs in this process, the same on all ranks


def read_tensors(source: Any) -> Tensors:
    return {name: source.tensor(name).clone() for name in source.names}


def average_plainly(averaging: Mapping[str, Any], first: Tensors) -> Tensors:
    """Returns the parameters of torch's AveragedModel after a plain loop with the plan's optimizer and batches."""
    loop = PlainLoop(
        [(name, module.double()) for name, module in layers()],
        Squares(),
        optimizer=lambda parameters: torch.optim.AdamW(
            decay_groups([pair for pair in parameters if pair[1].requires_grad], 0.1), lr=LR, betas=(0.5, 0.5)
        ),
    )
    loop.load(first)
    values = []
    for batch in batches():
        loop.step([{name: value[row : row + MICRO] for name, value in batch.items()} for row in range(0, SIZE, MICRO)])
        values.append(loop.weights)
    return average_with_torch(averaging, values)


def average_with_torch(averaging: Mapping[str, Any], values: Sequence[Tensors]) -> Tensors:
    """Returns the parameters of torch's AveragedModel over the `values` after each step."""
    is_mean = averaging["use"] == "optim.mean"
    module = nn.ParameterList(value.clone() for value in values[-1].values())
    averaged = AveragedModel(module, multi_avg_fn=None if is_mean else get_ema_multi_avg_fn(averaging["decay"]))
    start = STEPS - averaging["last"] if is_mean else 0
    for tensors in values[start :: averaging.get("every", 1)]:
        for parameter, value in zip(module, tensors.values(), strict=True):
            parameter.data.copy_(value)
        averaged.update_parameters(module)
    return dict(zip(values[-1], (value.detach() for value in averaged.parameters()), strict=True))


def train_and_resume(plans: Sequence[Tables], folder: Path) -> list[tuple[RunResult, RunResult, RunResult]]:
    """Trains the plans one after another on the same ranks. Returns, for each plan, the results of the whole run, of a resume
    from its checkpoint of step 3, and of a resume from the checkpoint of the previous plan.
    """
    for index in range(len(plans)):
        (folder / str(index)).mkdir(exist_ok=True, parents=True)
    results = [train(tables, folder / str(index), save={3: "third"}) for index, tables in enumerate(plans)]
    return [
        (results[index], *(train(tables, folder / str(source % len(plans)), load="third") for source in (index, index - 1)))
        for index, tables in enumerate(plans)
    ]
