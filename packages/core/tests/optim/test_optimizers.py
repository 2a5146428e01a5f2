"""Optimizers, their groups and tables: the fast form equals the loop, and a factory is checked before it is stepped."""

import inspect
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_core.optim.config import ELEMENTWISE, PER_MATRIX, AdamWConfig, FactoryOptimizerConfig, SGDConfig
from sley_core.optim.optimizers import UNIFORM_ROUNDING, build_adamw, build_from_factory, build_sgd, compiler_free_class

CPU = torch.device("cpu")
SHAPES = [(7, 5), (5,), (3, 4, 2), (0, 3)]


class NotOurs(torch.optim.SGD):
    """An optimizer of a user's; takes an option of its own, and anything else."""

    def __init__(self, params: Any, lr: float, tag: str = "", **options: Any) -> None:
        if tag == "bad":
            raise KeyError("tag")
        self.tag = tag
        super().__init__(params, lr=lr, **options)


HERE = f"{__name__}:NotOurs"


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def groups(of: list[nn.Parameter], decay: float = 0.1) -> list[dict[str, Any]]:
    common = {"lr": 0.1, "initial_lr": 0.1}
    return [{"params": of[::2], "weight_decay": decay, **common}, {"params": of[1::2], "weight_decay": 0.0, **common}]


Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def stepped(build: Build, dtype: torch.dtype, *, some_without_gradients: bool = False) -> list[Tensor]:
    """The parameters after eight steps; `some_without_gradients`: the second and third have none at first, and in between."""
    trained = parameters(dtype)
    optimizer = build(groups(trained))
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        for at, parameter in enumerate(trained):
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
            is_left_out = some_without_gradients and at in (1, 2) and step not in (2, 3, 6) and not (at == 2 and step > 4)
            parameter.grad = None if is_left_out else gradient
        optimizer.step()
    return [parameter.detach() for parameter in trained]


ADAMW = AdamWConfig(lr=0.1, betas=(0.8, 0.9), eps=1e-6)
SGDS = [SGDConfig(lr=0.1), SGDConfig(lr=0.1, momentum=0.9, dampening=0.1), SGDConfig(lr=0.1, momentum=0.9, nesterov=True)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("config", [ADAMW, *SGDS], ids=["adamw", "plain", "momentum", "nesterov"])
def test_fused_forms_equal_the_loop(config: AdamWConfig | SGDConfig, dtype: torch.dtype, tolerance: float) -> None:
    """Also where first gradients come later: momentum begins with those, undampened, while the others' goes on."""
    options = config.model_dump(include={"betas", "eps", "momentum", "dampening", "nesterov"})
    kind = torch.optim.AdamW if config is ADAMW else torch.optim.SGD
    named = {"lr": 0.1, "factory": f"torch.optim:{kind.__name__}", "options": {"fused": True, **options}}
    ours = build_adamw if config is ADAMW else build_sgd
    for some_without_gradients in (False, True):
        slow, *fast = (
            stepped(build, dtype, some_without_gradients=some_without_gradients)
            for build in (
                lambda of: kind(of, lr=0.1, foreach=False, fused=False, **options),
                lambda of: ours(config, of, CPU),
                lambda of: build_from_factory(FactoryOptimizerConfig.model_validate(named), of, CPU),
            )
        )
        for found in fast:
            torch.testing.assert_close(found, slow, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("device", "options", "is_fused"), [("cpu", {}, True), ("cpu", UNIFORM_ROUNDING, False), ("meta", {}, False)]
)
def test_the_fastest_form_is_taken_where_nothing_else_is_said_and_there_is_a_kernel(device, options, is_fused):
    for build, config in ((build_adamw, ADAMW), (build_sgd, SGDS[0])):
        of = [group | options for group in groups([nn.Parameter(torch.empty(2, 2, device=device))])]
        optimizer = build(config, of, torch.device(device))
        assert {bool(group["fused"]) for group in optimizer.param_groups} == {is_fused}
        assert device == "cpu" or all(group["foreach"] for group in optimizer.param_groups)


def test_a_factory_gets_groups_rate_and_options_that_it_knows() -> None:
    config = FactoryOptimizerConfig(lr=0.1, factory="torch.optim:NAdam", options={"betas": [0.5, 0.6]})
    fast = stepped(lambda of: build_from_factory(config, of, CPU), torch.float64)
    slow = stepped(lambda of: torch.optim.NAdam(of, betas=(0.5, 0.6)), torch.float64)
    torch.testing.assert_close(fast, slow, rtol=0, atol=0)
    rprop = FactoryOptimizerConfig(lr=0.1, factory="torch.optim:Rprop")
    without_decay = build_from_factory(rprop, groups(parameters(torch.float32), decay=0.0), CPU)
    assert all("weight_decay" not in group for group in without_decay.param_groups)


@pytest.mark.parametrize(
    ("path", "options", "key", "message"),
    [
        ("no_such_module:Adam", {}, "import", "no_such_module:Adam"),
        ("torch.optim:Adamm", {}, "import", "torch.optim:Adamm"),
        ("torch.optim:Adam.no_such", {}, "import", "torch.optim:Adam.no_such"),
        ("torch.nn:Linear", {}, "factory", "must be a subclass"),
        ("torch:sum", {}, "factory", "must be a subclass"),
        ("torch.optim:LBFGS", {}, "factory", "evaluates the loss again"),
        ("torch.optim:Adam", {"beta": 0.9}, "factory", "beta"),
        ("torch.optim:Adam", {"betas": [2.0, 2.0]}, "factory", "beta"),
        ("torch.optim:Adam", {"eps": "small"}, "factory", "TypeError"),
        ("torch.optim:Muon", {}, "factory", "2D"),
        ("torch.optim:Adam", {"lr": 0.1}, "options", "`lr` must be a key of"),
        ("torch.optim:Adam", {"weight_decay": 0.1}, "options", "`weight_decay` must be a key of"),
        ("torch.optim:Rprop", {}, "weight_decay", "0.1"),
        (HERE, {"tag": "bad"}, "factory", "KeyError"),
    ],
)
def test_a_class_that_does_not_fit(path: str, options: dict[str, Any], key: str, message: str) -> None:
    config = FactoryOptimizerConfig(lr=0.1, factory=path, options=options)
    with pytest.raises(PlanError) as error:
        build_from_factory(config, groups(parameters(torch.float32), decay=0.1 if key == "weight_decay" else 0.0), CPU)
    (diagnostic,) = error.value.diagnostics
    code, key = ("factory-import", "factory") if key == "import" else ("optimizer-factory", key)
    assert (diagnostic.code, diagnostic.path) == (code, ("optimizer", key))
    assert message in diagnostic.message


SIZE = 200


def stepped_part(build, config, first: int, last: int, options: dict) -> list[Tensor]:
    """Elements `first` to `last` of weight and states after three steps, of an optimizer that has these alone."""
    generator = torch.Generator().manual_seed(1)
    weight, *gradients = (torch.randn(SIZE, generator=generator) for _ in range(4))
    parameter = torch.nn.Parameter(weight[first:last].clone())
    groups = [{"params": [parameter], "lr": 1e-2, "initial_lr": 1e-2, "weight_decay": 0.1, **options}]
    optimizer = build(config, groups, CPU)
    for gradient in gradients:
        parameter.grad = gradient[first:last].clone()
        optimizer.step()
    states = optimizer.state[parameter].values()
    return [parameter.detach(), *(state for state in states if isinstance(state, Tensor) and state.ndim)]


@pytest.mark.parametrize(
    ("build", "config"),
    [(build_adamw, AdamWConfig(lr=1e-2)), (build_sgd, SGDConfig(lr=1e-2, momentum=0.9))],
    ids=["adamw", "sgd"],
)
def test_a_part_of_a_tensor_is_stepped_as_the_whole(build, config):
    whole = stepped_part(build, config, 0, SIZE, UNIFORM_ROUNDING)
    for first, last in [(0, 1), (0, 7), (3, 64), (5, 71), (64, 103), (100, 199), (1, 200)]:
        part = stepped_part(build, config, first, last, UNIFORM_ROUNDING)
        assert all(torch.equal(one[first:last], other) for one, other in zip(whole, part, strict=True)), (first, last)


def stepped_rows(kind, cuts):
    """A matrix [6, 4] in one parameter, or in rows of several, after five steps with gradients of very different sizes."""
    torch.manual_seed(0)
    whole = torch.randn(6, 4, dtype=torch.float64)
    parts = [nn.Parameter(part.clone()) for part in whole.split(cuts)]
    optimizer = kind(parts, lr=0.1)
    for step in range(5):
        gradient = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).exp()
        for part, own in zip(parts, gradient.split(cuts), strict=True):
            part.grad = own.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


@pytest.mark.parametrize("name", sorted(ELEMENTWISE | PER_MATRIX))
def test_an_elementwise_optimizer_is_one_that_a_cut_does_not_change(name):
    kind = getattr(torch.optim, name)
    assert torch.equal(stepped_rows(kind, [6]), stepped_rows(kind, [1, 3, 2])) == (name in ELEMENTWISE)


def test_every_class_of_torch_that_can_be_stepped_is_known():
    """A new one is unknown, and refused where it matters, until somebody has looked at it."""
    known = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    assert known - ELEMENTWISE - PER_MATRIX <= {"Optimizer", "LBFGS", "SparseAdam"}
    assert known >= ELEMENTWISE


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9, "foreach": True})]
)
def test_it_steps_as_torchs_own_with_hooks_and_closure(kind, options):
    found = []
    for each in (kind, compiler_free_class(kind)):
        parameter = torch.nn.Parameter(torch.arange(4.0))
        optimizer, called = each([parameter], lr=0.1, **options), []
        optimizer.register_step_pre_hook(lambda *_, called=called: called.append("before"))
        optimizer.register_step_post_hook(lambda *_, called=called: called.append("after"))

        def closure(parameter=parameter, optimizer=optimizer):
            optimizer.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert called == ["before", "after"] * 3
        assert type(deepcopy(optimizer)) is type(pickle.loads(pickle.dumps(optimizer.__class__([parameter])))) is kind
        found.append((losses, parameter.detach().clone(), optimizer.state_dict()["state"][0], type(optimizer).__name__))
    (losses, weights, state, name), (our_losses, our_weights, our_state, our_name) = found
    assert (our_losses, our_name) == (losses, name)
    assert torch.equal(our_weights, weights)
    assert our_state.keys() == state.keys()
    assert all(torch.equal(our_state[key], state[key]) for key in state if isinstance(state[key], torch.Tensor))
