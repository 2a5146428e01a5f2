"""Weights that are written after assembly are what the next step starts from, in every precision and layout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sley_checkpoint.reader import read
from sley_core.comm.world import World
from sley_core.engine.shards import gather_full_tensors
from sley_core.errors import RunError, UsageError
from sley_testing.runs import running, weights
from sley_trainer.run import Run

PRECISIONS = ["fp32", "bf16", "fp16"]


def given(run: Run) -> dict[str, torch.Tensor]:
    """Other weights for the whole model, which bf16 cannot hold."""
    generator = torch.Generator().manual_seed(1)
    return {param.name: torch.randn(param.shape, generator=generator) for param in run.registry}


def masters(run: Run) -> dict[str, torch.Tensor]:
    return {entry.name: entry.parameter.detach().clone() for entry in run.stepper.update.masters.local_params}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_loaded_weights_are_exact_and_stay(alone, small, precision):
    groups = [{"match": "blocks.*", "freeze": True}]
    with alone(small(precision__compute=precision, optimizer__lr=1e-30, optimizer__groups=groups)) as run:
        run.step()
        for param in run.registry:
            param.parameter.requires_grad_(True)
        state = given(run)
        assert run.load_weights(state) == ([], [])
        values = masters(run)
        for name, value in state.items():
            assert torch.equal(values[name].double(), value.double()), "masters hold every digit"
            assert torch.equal(run.registry[name].parameter.float(), value.to(run.registry[name].parameter.dtype).float())
        before = weights(run)
        run.step()
        after = weights(run)
        assert all(torch.equal(before[name], after[name]) for name in state)
        assert all(torch.equal(values[name], value) for name, value in masters(run).items())


WRITES: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda parameter: parameter.copy_(torch.full_like(parameter, 0.5)),
    lambda parameter: parameter.detach().fill_(0.5),
    lambda parameter: setattr(parameter, "data", torch.full_like(parameter, 0.5)),
)


@torch.no_grad()
def write_each(run: Run, write: Callable[[torch.Tensor], Any]) -> None:
    for param in run.registry:
        write(param.parameter)


def load_state_dict(run: Run) -> None:
    for layer in run.layers:
        layer.module.load_state_dict({name: torch.full_like(v, 0.5) for name, v in layer.module.state_dict().items()})


FAR = 5
"""A seed under which no first value rounds to 0.5 in bf16: writing a weight its own value leaves the master as it is."""


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_written_between_steps_is_in_all_that_is_saved_and_is_not_undone(alone, small, tmp_path, precision):
    """In weights as they are stepped, in a checkpoint, and in masters on the host; before any step has seen it."""
    for number, write in enumerate((*(partial(write_each, write=write) for write in WRITES), load_state_dict)):
        with alone(small(precision__compute=precision, run__seed=FAR, optimizer__lr=1e-6)) as run:
            run.step()
            write(run)
            run.save_weights(tmp_path / f"{number}", precision="full")
            found = [load_file(path) for path in (tmp_path / f"{number}").glob("*.safetensors")]
            found.append(dict(run.memory.host("masters")))
            saved = read(run.save_checkpoint(tmp_path / f"checkpoint {number}"))
            found.append({param.name: saved[f"weights/{param.name}"] for param in run.registry})
            names = {param.name for param in run.registry}
            for state in found:
                assert [name for name in names & state.keys() if not state[name].eq(0.5).all()] == []
            run.step()
            for param in run.registry:
                torch.testing.assert_close(param.parameter.float(), torch.full(param.shape, 0.5), rtol=0, atol=1e-3)
            for value in masters(run).values():
                torch.testing.assert_close(value, torch.full_like(value, 0.5), rtol=0, atol=1e-4)


def test_masters_of_what_was_not_written_keep_their_digits(alone, small):
    with alone(small(precision__compute="bf16", optimizer__lr=1e-30)) as run:
        run.step()
        before = masters(run)
        name = "blocks.0.norm.weight"
        with torch.no_grad():
            for param in run.registry:
                param.parameter.view(-1)[0] = 0.75
        run.step()
        after = masters(run)
        assert after[name][0] == 0.75
        for key, value in before.items():
            torch.testing.assert_close(after[key].view(-1)[1:], value.view(-1)[1:], rtol=0, atol=1e-20)


@pytest.mark.parametrize("as_pairs", [False, True])
def test_what_does_not_fit_is_refused_by_name(alone, small, as_pairs):
    with alone(small(precision__compute="bf16")) as run:
        before = weights(run)
        state = given(run)
        name = run.registry.names[0]

        def load(state: dict[str, Any], **options: Any) -> Any:
            return run.load_weights(state.items() if as_pairs else state, **options)

        for wrong, says in [
            ({key: value for key, value in state.items() if key != name}, rf"'{name}' is missing"),
            (state | {"elsewhere.weight": torch.zeros(1)}, "'elsewhere.weight' is unknown"),
            (state | {name: torch.zeros(2, 2)}, rf"'{name}' must have the shape \[16, 8\], but has \[2, 2\]"),
            (state | {name: state[name].int()}, rf"'{name}' must be floating-point, but is torch.int32"),
            (state | {name: state[name].to("meta")}, rf"'{name}' is on meta"),
            (state | {name: 3}, rf"'{name}' must be a tensor, but is a int"),
        ]:
            with pytest.raises(RunError, match=says) as raised:
                load(wrong)
            assert raised.value.diagnostics[0].code == "weights-mismatch"
            if not as_pairs:
                assert all(torch.equal(value, before[key]) for key, value in weights(run).items())
        part = {name: state[name], "elsewhere.weight": torch.zeros(1)}
        assert load(part, strict=False) == (run.registry.names[1:], ["elsewhere.weight"])
        assert torch.equal(masters(run)[name], state[name])

        def broken() -> Any:
            yield name, state[name]
            raise OSError("the file ends here")

        with pytest.raises(RunError, match="the weights could not be read: OSError: the file ends here"):
            run.load_weights(broken())


def test_it_is_refused_in_the_middle_of_a_step_and_after_the_end(alone, small):
    class During:
        def begin_step(self, step: Any) -> None:
            run.load_weights({})

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    with alone(small()) as run:
        run.stepper.handlers.append(During())
        with pytest.raises(RunError, match=r"step-running.*a step is still running"):
            run.step()
        run.stepper.handlers.clear()
        run.step()
        with pytest.raises(UsageError, match="weights cannot be saved with the precision 'half'"):
            run.save_weights("weights", precision="half")
    with pytest.raises(RunError, match="closed"):
        run.load_weights({})


def load_on_ranks(tables, folder, differ):
    """Rows and weights of a run that loads, and the code of the error where the last rank is given other values."""
    with running(tables, folder) as run:
        run.step()
        state = given(run)
        name = run.registry.names[0]
        code = None
        if differ:
            try:
                run.load_weights(state | {name: state[name] + run.world.rank})
            except RunError as error:
                code = error.diagnostics[0].code
        run.load_weights(state)
        row = run.step()
        found = gather_full_tensors({param: param.parameter for param in run.registry}, run.groups)
        return code, row["loss"], {param.name: value for param, value in found.items()}


def test_replicas_load_alike_or_are_told(ranks, own, small):
    tables = small(precision__compute="bf16", optimizer__lr=1e-3)
    with World.alone("cpu"):
        _, loss, values = load_on_ranks(tables, own, differ=False)
    for code, rank_loss, found in ranks(2)(load_on_ranks, tables, own, True):
        assert code == "weights-differ"
        assert rank_loss == pytest.approx(loss, rel=2**-7)
        for name, value in values.items():
            torch.testing.assert_close(found[name], value, rtol=2**-6, atol=2**-6)
