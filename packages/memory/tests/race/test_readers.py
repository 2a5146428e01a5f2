"""Tests that each reader of a run's memory waits for it, after moves that no caller has awaited."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sley_checkpoint.reader import read
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.drawn_copies import DrawnDevice
from sley_testing.plans import Tables, changed, small_plan
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

PLAN = small_plan(model__num_layers=1, batch__micro_size=4, precision__compute="bf16", evaluation={"every": 100, "steps": 1})
OFFLOADS = {
    "everything": [{"use": "memory.everything", "bucket_mb": 0.004}],
    "on the host": [{"use": "memory.host_optimizer", "bucket_mb": 0.004}, {"use": "memory.weights"}],
    "between steps": [
        {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.01},
        {"use": "memory.everything", "parts": ["weights", "buffers", "masters", "gradients"], "bucket_mb": 0.004},
    ],
}


def checkpoint(run: Run, folder: Path) -> Any:
    found = read(run.save_checkpoint(folder / "checkpoint"))
    return {name: found[name] for name in found}


def saved(run: Run, folder: Path) -> Any:
    run.save_weights(folder / "weights", precision="working")
    (file,) = (folder / "weights").glob("*.safetensors")
    return load_file(file)


def called(run: Run, _: Path) -> Any:
    tokens = torch.arange(6).reshape(1, 6)
    return {"output": run.layers[0].module(tokens).detach()}


READERS: dict[str, Callable[[Run, Path], Any]] = {
    "a checkpoint": checkpoint,
    "working weights": saved,
    "a call of a layer": called,
}

ORDERS = (0, 2, 19, 20)
"""Of copies: in the last three they happen as late as they may, or nearly so."""


@contextmanager
def one_step(tables: Tables, folder: Path, order: int | None) -> Iterator[Run]:
    """Yields the run of a plan after a step and a write to a weight, on a device with a drawn order of copies, or on a
    plain CPU if `order` is None.
    """
    device = None if order is None else DrawnDevice(copy_seed=order)
    with (
        nullcontext() if device is None else device.watching(),
        World.alone(device or "cpu") as world,
        assemble(plan_from_dict(tables, folder), world) as run,
    ):
        masters = run.stepper.update.masters
        for _, master in masters.named_tensors() if device and masters.device else ():
            device.mark_host_memory(master)
        run.step()
        with torch.no_grad():
            run.registry.params[0].parameter.copy_(torch.full(run.registry.params[0].shape, 0.5))
        yield run


@pytest.mark.sample(2)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("orders", [ORDERS[::2], ORDERS[1::2]])
def test_a_reader_waits(offload: str, reader: str, orders: tuple[int, ...], texts: Path, tmp_path: Path) -> None:
    with one_step(PLAN, texts, None) as run:
        wanted = READERS[reader](run, tmp_path / "here")
    for order in orders:
        with one_step(changed(PLAN, offload=OFFLOADS[offload]), texts, order) as run:
            draw = random.Random(order)
            stays_away = reader == "a checkpoint" and draw.random() < 0.5
            for moves in (run.memory.offload, *(() if stays_away else (run.memory.onload,))):
                moved = moves()
                if draw.random() < 0.2:
                    moved.wait()
            found = READERS[reader](run, tmp_path / str(order))
        assert found.keys() == wanted.keys()
        other = [name for name, value in wanted.items() if not torch.equal(value, found[name])]
        assert not other, f"order {order}: other bits in {other[:3]}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("order", ORDERS)
def test_a_failed_update_leaves_no_copy_in_flight(order: int, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next step would write gradients that are being copied to the host, or use the host memory of other
    buckets.
    """
    with one_step(changed(PLAN, offload=OFFLOADS["on the host"]), texts, order) as run:
        optimizer = run.stepper.update.optimizer
        take, calls = optimizer.step, []

        def fail() -> None:
            calls.append(take())
            if len(calls) == 2:
                raise ValueError("as asked")

        monkeypatch.setattr(optimizer, "step", fail)
        with pytest.raises(ValueError, match="as asked"):
            run.step()
        monkeypatch.undo()
        if order:
            run.registry.params[0].parameter.requires_grad_(False)
        run.step()
