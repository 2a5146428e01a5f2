"""A gradient store over a few layers, and the calls that an executor would make."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from sley_core.actions.action import Kind, actions_of, loop, sequential
from sley_core.actions.lower import lower
from sley_core.engine.buffers import Planner, by_reduce_group, loose
from sley_core.engine.gradients import GradientStore
from sley_core.engine.reduction import Reduction
from sley_core.engine.registry import Param, ParameterRegistry
from sley_core.engine.step_state import StepState
from sley_core.model.layers import Layer


class Harness:
    """A store over some layers in one chunk, and the calls that an executor would make."""

    def __init__(self, planner: Planner, modules: tuple[nn.Module, ...], dtype: torch.dtype) -> None:
        self.planner = planner
        self.layers = [Layer(f"l{at}", module) for at, module in enumerate(modules)]
        self.state = StepState()
        self.registry = ParameterRegistry([self.layers])
        self.store = GradientStore(self.registry, dtype, torch.device("cpu"), Reduction({}, self.state), planner)
        self.ready: list[str] = []
        self.during: list[bool] = []
        self.store.on_ready.append(self._note)

    def _note(self, param: Param) -> None:
        self.ready.append(param.name)
        self.during.append(self.state.action is not None)

    def step(self, losses: Sequence[Callable[[], Tensor]], fail_at: int | None = None) -> dict[str, Tensor]:
        """One optimizer step over `losses`, functions that give each micro-batch's loss."""
        self.ready, self.during = [], []
        (steps,) = lower([sequential(len(losses))], loop(1), len(losses))
        actions = actions_of(steps)
        self.state.begin(self.state.step + 1, actions, len(losses), 0)
        self.store.begin_step()
        for action in actions:
            if action.kind is Kind.CHUNK_DONE:
                self.store.chunk_done(action.chunk)
            elif action.kind is Kind.BACKWARD:
                self.state.enter(action)
                losses[action.micro]().backward()
                if fail_at == action.micro:
                    raise ValueError("as asked")
                self.state.leave(action)
        return {param.name: self.store.gradient(param).clone() for param in self.store.params}


@pytest.fixture(params=[by_reduce_group, loose], ids=["buffers", "loose"])
def store_of(request: pytest.FixtureRequest) -> Callable[..., Harness]:
    """`store_of(*modules, dtype=fp32)`: a harness of a store over these layers.

    Everything holds whether gradients lie in buffers or, where nobody reduces, where autograd made them.
    """

    def store_of(*modules: nn.Module, dtype: torch.dtype = torch.float32) -> Harness:
        return Harness(request.param, modules, dtype)

    return store_of
