"""Tests where memory is, which calls are refused there, their errors, and the measured cost of moves."""

import math

import pytest
import torch
from odd_parts import PLAN, Points
from parking import BETWEEN, EVERYTHING, offload_and_onload, run_steps, running, state_digest

from sley_core.comm.device import CopyStream
from sley_core.errors import RunError, StateError, UsageError
from sley_testing.plans import small_plan

AWAY = {**PLAN, "precision": {"compute": "bf16"}, "offload": EVERYTHING}
BATCH = {name: torch.stack([Points()[at][name] for at in range(4)]) for name in ("x", "y")}

pytestmark = pytest.mark.timeout(120)


def test_calls_of_layers_by_hand_are_refused_while_weights_are_away():
    """Tests a layer and a module within it. After an onload no hook is left."""
    with running(AWAY) as run:
        run.step()
        layer = run.layers[0].module
        for part in ("weights", "buffers"):
            run.memory.offload(part)
            for call in (lambda: layer(BATCH["x"]), lambda: layer.linear(BATCH["x"])):
                with pytest.raises(StateError, match=f"a layer's forward needs the run's {part}, but they are offloaded"):
                    call()
            run.memory.onload(part)
        layer(BATCH["x"])
        assert not layer._forward_pre_hooks
        run.memory.offload("optimizer_states")
        layer(BATCH["x"])


def test_evaluations_need_only_weights_and_buffers(texts):
    """Master weights, states and gradients stay on the host."""
    evaluation = {"every": 100, "steps": 1}
    tables = small_plan(batch__global_size=2, precision__compute="bf16", evaluation=evaluation, offload=EVERYTHING)
    with running(tables, texts) as run:
        run.step()
        batch = run.feed.next()
        wanted, loss, outputs = run.evaluate(), run.evaluate(batch), run.predict(batch)
        run.memory.offload()
        for call in (run.evaluate, lambda: run.evaluate(batch), lambda: run.predict(batch)):
            with pytest.raises(StateError, match="n needs the run's weights, but they are offloaded"):
                call()
        run.memory.onload("weights", "buffers")
        assert (run.evaluate(), run.evaluate(batch)) == (wanted, loss)
        assert torch.equal(run.predict(batch), outputs)
        sizes = run.memory.bytes
        assert (sizes["masters"], sizes["optimizer_states"], sizes["gradients"]) == (0, 0, 0)
        report = run.memory.report
        assert report["masters"].copied_in == report["optimizer_states"].copied_in == 0
        state = {name: value.clone() for name, value in run.memory.host("weights")}
        with pytest.raises(StateError, match="loading weights needs the run's masters"):
            run.load_weights(state)
        run.memory.onload()
        run.step(batch)


def test_gradients_are_freed_and_never_copied():
    with running(AWAY) as run:
        run.step()
        param = run.store.params[0]
        run.memory.offload("gradients")
        with pytest.raises(RunError, match=r"(?s)gradients-freed.*run\.memory\.offload"):
            run.store.gradient(param)
        run.memory.onload()
        moved = run.memory.report["gradients"]
        assert (moved.copied_out, moved.copied_in, moved.host_bytes) == (0, 0, 0)
        run.step()
        assert run.store.gradient(param).isfinite().all()


def test_moves_within_a_step_or_an_evaluation_are_refused(texts):
    """A module's hook asks for moves, and later steps are not changed by it."""
    tables = small_plan(batch__global_size=2, evaluation={"every": 100, "steps": 1}, offload=EVERYTHING)
    with running(tables, texts) as run:
        refused = []

        def leave(*_):
            for call in (run.memory.offload, run.memory.onload):
                with pytest.raises(RunError, match="step-running") as error:
                    call()
                refused.append(str(error.value))

        hook = run.layers[0].module.register_forward_hook(leave)
        run.step()
        run.evaluate()
        run.predict(run.feed.next())
        run.feed.restore({"samples": 2})
        hook.remove()
        assert any("a step is still running" in text for text in refused)
        assert any("an evaluation is still running" in text for text in refused)
        found = state_digest(run)
    with running(small_plan(batch__global_size=2), texts) as run:
        run.step()
        assert state_digest(run) == found


def test_a_listener_must_onload_what_it_offloads():
    """`train` checks this before each step."""
    with running({**PLAN, "offload": EVERYTHING}) as run:
        run.listeners.append(lambda row: offload_and_onload(run))
        assert run.train() == "finished"
        assert run.memory.report["weights"].copied_out > 0
    with running({**PLAN, "offload": EVERYTHING}) as run:
        run.listeners.append(lambda row: run.memory.offload("optimizer_states"))
        with pytest.raises(StateError, match=r"(?s)needs the run's optimizer states.*onload\(\"optimizer_states"):
            run.train()
        assert run.num_steps_done == 1


def test_parts_without_a_manager_are_refused_by_name():
    with running({**PLAN, "offload": [{"use": "memory.weights"}]}) as run:
        with pytest.raises(UsageError, match=r"(?s)no offload manager in the plan moves the run's masters.*memory\.everything"):
            run.memory.offload("masters")
        with pytest.raises(UsageError, match="has no part 'moments'"):
            run.memory.onload("moments")


def test_an_offload_before_the_first_step():
    """There are no states and no gradients yet."""
    tables = {**PLAN, "precision": {"compute": "bf16"}}
    with running({**tables, "offload": EVERYTHING}) as run:
        offload_and_onload(run)
        assert run.memory.report["optimizer_states"].copied_out == 0
        for _ in range(3):
            run.step()
        found = state_digest(run)
    assert found == run_steps(tables, None, 3)[0]


def test_a_missing_copy_is_detected(monkeypatch):
    """With poisoned memory, a missing copy makes the next loss NaN."""
    monkeypatch.setattr(CopyStream, "copy", lambda stream, target, source: None)
    with pytest.raises(Exception, match="not-finite"):
        run_steps({**PLAN, "offload": EVERYTHING}, None, 2, moves=True)


# -- what moving has cost ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offload", "parts"),
    [
        (EVERYTHING, ("weights", "buffers", "masters", "optimizer_states")),
        (BETWEEN, ("optimizer_states",)),
        ([{"use": "memory.host_optimizer"}], ("masters", "optimizer_states")),
    ],
    ids=["everything", "between steps", "on the host"],
)
def test_a_row_has_bytes_seconds_and_rate_of_each_part(offload, parts):
    """The sums over all parts are those of the run. Parts that are freed and not copied have no metrics."""
    with running({**PLAN, "precision": {"compute": "bf16"}, "offload": offload}) as run:
        for _ in range(2):
            run.step()
            if offload is EVERYTHING:
                offload_and_onload(run)
        row = {name.removeprefix("offload/"): value for name, value in run.step().items() if "offload/" in name}
        moving = {name.removesuffix("_gb_per_s") for name in row if name.endswith("_gb_per_s")} - {"gb_per_s"}
        assert moving == {*parts} | ({"handlers"} if offload is EVERYTHING else set())
        for part in parts:
            assert row[f"{part}_gb"] > 0, part
            assert row[f"{part}_s"] > 0, part
            assert math.isclose(row[f"{part}_gb_per_s"], row[f"{part}_gb"] / row[f"{part}_s"]), part
        for name in ("gb", "s"):
            assert math.isclose(row[name], sum(row[f"{part}_{name}"] for part in moving))
        if offload is EVERYTHING:
            size = run.memory.bytes["weights"] / 1e9
            assert row["weights_gb"] == pytest.approx(2 * size), "one cycle, out and in"
