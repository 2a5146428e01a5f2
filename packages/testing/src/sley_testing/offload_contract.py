"""Tests what every offload manager must pass; the tests of a plugin inherit them.

    class TestMine(OffloadManagerContract):
        offload = {"use": "mine.manager"}

A small decoder in bf16, with masters, is trained in one process on a device that chooses at random when copies happen
(`drawn_copies`): memory that has not been copied yet is NaN, and a missing wait is an error, whether or not it did harm.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import StateError
from sley_core.memory.state import COPIED, Part, Where
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.drawn_copies import DrawnDevice
from sley_testing.parity import same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.runs import fail_once, weights

Bits = dict[tuple[str, str], Tensor]

NUM_STEPS = 2
PLAN = small_plan(model__num_layers=1, batch__micro_size=4, precision__compute="bf16")  # two micro-batches


class OffloadManagerContract:
    """Tests an offload manager: inherit, set `offload` to a table of `[[offload]]`, and pytest does the rest. plan: what else
    the plan must have, as `small_plan` takes it. orders: the number of random orders of copies.
    """

    offload: ClassVar[dict[str, Any]]
    plan: ClassVar[dict[str, Any]] = {}
    orders: ClassVar[int] = 2

    def test_round_trip_preserves_all_bits(self, texts: Path) -> None:
        """Between all steps, with copies in random orders: the host's copies are right, and no bit of the training changes."""
        with _running(changed(PLAN, **self.plan), texts) as run:
            rows = [run.step() for _ in range(NUM_STEPS)]
            wanted = _bits(run, COPIED)
        for order in range(self.orders):
            with self._running(texts, order) as run:
                for row in rows:
                    found = run.step()
                    assert found["loss"] == row["loss"], f"order {order}, step {row['step']}: another loss than without offload"
                    self._leave_and_come(run)
                _assert_same(wanted, _bits(run, COPIED), f"order {order}, after {NUM_STEPS} steps")

    def test_use_of_offloaded_part_is_refused(self, texts: Path) -> None:
        """A step names the part that is away, and succeeds once it is back."""
        with self._running(texts) as run:
            run.step()
            for part in self._by_call(run):
                run.memory.offload(part).wait()
                refusal = None
                try:
                    run.step()
                except Exception as error:  # any, to be looked at
                    refusal = error
                ended = "is taken" if refusal is None else f"ends with {type(refusal).__name__}: {refusal}"
                is_refused = isinstance(refusal, StateError) and refusal.diagnostics[0].code == "memory-away"
                assert is_refused, f"a step while {part} are away is not refused: it {ended}"
                is_named = part.replace("_", " ") in str(refusal)
                assert is_named, f"the refusal of a step without {part} does not name it: {refusal}"
                run.memory.onload(part)
            run.step()

    def test_second_call_is_no_op(self, texts: Path) -> None:
        """Offloading what is away, or onloading what is here, is counted as a call that had nothing to do."""
        with self._running(texts) as run:
            run.step()
            (manager,) = run.memory.managers
            for part in self._by_call(run):
                before = _bits(run, [part]) if part in COPIED else {}
                for move in (run.memory.offload, run.memory.onload):
                    move(part).wait()
                    idle = manager.moved(part).num_no_ops
                    move(part).wait()
                    more = manager.moved(part).num_no_ops - idle
                    assert more == 1, f"{part}: a second {move.__name__} counts {more} times as one with nothing to do"
                _assert_same(before, _bits(run, [part]) if part in COPIED else {}, "after two calls of each kind")

    def test_manager_reports_its_moves(self, texts: Path) -> None:
        """It reports where a part is, what was copied, and how much memory the device has got back."""
        with self._running(texts) as run:
            run.step()
            (manager,) = run.memory.managers
            for part in self._by_call(run):
                held = run.memory.bytes[part]
                run.memory.offload(part).wait()
                where, moved = run.memory.where[part], manager.moved(part)
                assert where is Where.AWAY, f"{part} that have left are said to be {where.value}"
                assert moved.given_back >= held, f"{part} had {held} bytes, and {moved.given_back} are said to be given back"
                if part in COPIED:
                    assert moved.copied_out >= held, f"{part}: {moved.copied_out} of {held} bytes are said to be copied"
                run.memory.onload(part).wait()
                where = run.memory.where[part]
                assert where is Where.HERE, f"{part} that have come back are said to be {where.value}"

    def test_run_closes_while_memory_is_offloaded(self, texts: Path) -> None:
        """Layers are ordinary modules then, with their weights."""
        with self._running(texts, closes=False) as run:
            run.step()
            wanted = weights(run)
            if self._by_call(run):
                run.memory.offload()
            run.close()
            gone = [param.name for param in run.registry if not param.parameter.untyped_storage().nbytes()]
            assert not gone, f"after the run these weights have no memory: {gone[:3]}"
            other = [param.name for param in run.registry if not torch.equal(param.parameter, wanted[param.name])]
            assert not other, f"after the run these weights have other bits: {other[:3]}"

    def test_offload_after_failed_step(self, texts: Path) -> None:
        """The next step then has the numbers that it has without a failure."""
        rows = []
        for tables in (PLAN, changed(PLAN, offload=[self.offload])):
            with _running(changed(tables, **self.plan), texts, None if tables is PLAN else 3) as run:
                run.step()
                fail_once(run)
                if tables is not PLAN:
                    self._leave_and_come(run)
                rows.append(run.step())
        plain, moved = rows
        assert moved["loss"] == plain["loss"], f"after a failed step: the loss is {moved['loss']}, not {plain['loss']}"
        assert moved["grad_norm"] == plain["grad_norm"], f"after a failed step: the norm is not {plain['grad_norm']}"

    def _running(self, texts: Path, order: int = 0, *, closes: bool = True) -> AbstractContextManager[Run]:
        """Returns a context manager that gives a run with the manager."""
        return _running(changed(PLAN, offload=[self.offload], **self.plan), texts, order, closes=closes)

    def _by_call(self, run: Run) -> list[Part]:
        """Returns the parts that move by call alone, and hold memory now; pools and messages are trimmed, not moved."""
        (manager,) = run.memory.managers
        return [
            part
            for part, where in run.memory.where.items()
            if where is Where.HERE and part in manager.parts and part not in ("pools", "messages") and run.memory.bytes[part]
        ]

    def _leave_and_come(self, run: Run) -> None:
        """Sends away what moves by call, looks at the host's copies, and brings it back."""
        parts = self._by_call(run)
        copied = [part for part in parts if part in COPIED]
        before = _bits(run, copied)
        if not parts:
            return
        run.memory.offload(*parts).wait()
        for part in parts:
            left = run.memory.bytes[part]
            assert not left, f"{part} are away, and {left} bytes of them are still on the device"
        _assert_same(before, _bits(run, copied), "while they are away, on the host")
        run.memory.onload(*parts)
        run.memory.require("the contract", parts)
        _assert_same(before, _bits(run, copied), "when they are back")


@contextmanager
def _running(tables: dict[str, Any], texts: Path, order: int | None = None, *, closes: bool = True) -> Iterator[Run]:
    """Gives the run of a plan in this process. order: of drawn copies; None for a plain CPU. closes: when the block ends."""
    plan = plan_from_dict(tables, texts)
    if order is None:
        with assemble(plan, World.alone("cpu")) as run:
            yield run
        return
    device, was_frozen = DrawnDevice(order=order), gc.get_freeze_count()
    if not was_frozen:  # keeps the collector from what is there already
        gc.freeze()
    try:
        with device.watching(), World.alone(device) as world:
            run = assemble(plan, world)
            try:
                yield run
            finally:
                if closes:
                    run.close()
    finally:
        if not was_frozen:
            gc.unfreeze()


def _bits(run: Run, parts: Sequence[Part]) -> Bits:
    """Returns copies of every tensor of `parts` by part and name, from wherever it is."""
    return {(part, name): value.clone() for part in parts for name, value in run.memory.host(part)}


def _assert_same(wanted: Bits, found: Bits, when: str) -> None:
    assert wanted.keys() == found.keys(), f"{when}: {sorted(wanted.keys() ^ found.keys())[:3]} are there once and not again"
    wrong = [f"{part} {name}" for (part, name), value in wanted.items() if not same_bits(value, found[part, name])]
    assert not wrong, f"{when}: {len(wrong)} of {len(wanted)} tensors have other bits: {', '.join(wrong[:3])}"
