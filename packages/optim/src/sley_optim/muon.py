"""`optim.muon`: torch.optim.Muon for the matrices of hidden layers, and torch.optim.AdamW for all other parameters.

    embedding, output layer         AdamW, also if they are tied
    norms, biases, convolutions     AdamW
    stacks of matrices (experts)    AdamW; in a group with `optimizer = "muon"`, Muon for each matrix of the stack
    other matrices                  Muon; one rank updates each whole matrix

One torch optimizer holds all groups and states, so the learning-rate schedule and checkpoints cover both algorithms.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.api.parts import Param
from sley_core.errors import PlanError
from sley_core.records import ParameterRole
from sley_optim.plugin import Algorithm, MuonConfig

ParamGroups = Sequence[dict[str, Any]]


def assign_roles(config: MuonConfig, params: Sequence[Param]) -> Mapping[str, ParameterRole]:
    """Returns the role of each parameter of the model by name: "muon" or "adamw". If the first group of the plan that matches
    the name sets `optimizer`, this key decides the role. Otherwise, hidden matrices get "muon", and other parameters "adamw".
    Raises PlanError "muon-shape" if the key selects Muon for a parameter that is neither a matrix nor a stack of matrices.
    """
    output_layer = _find_output_layer(params)
    muon = ParameterRole("muon", config.lr, config.weight_decay, "per_matrix")
    adamw = ParameterRole("adamw", config.adamw.lr, config.adamw.weight_decay, "elementwise")
    assigned = {}
    for param in params:
        matches = (index for index, group in enumerate(config.groups) if fnmatchcase(param.name, group.match))
        index = next(matches, -1)
        algorithm = config.groups[index].optimizer if index >= 0 else None
        if algorithm is None:
            algorithm = "muon" if param is not output_layer and _is_hidden_matrix(param) else "adamw"
        elif algorithm == "muon" and len(param.shape) not in (2, 3):
            message = f"`{param.name}` has the shape {list(param.shape)}, but Muon updates only matrices and stacks of matrices"
            hint = "narrow the group's pattern, or remove `optimizer`"
            raise PlanError("muon-shape", message, path=("optimizer", "groups", index, "optimizer"), hint=hint)
        assigned[param.name] = muon if algorithm == "muon" else adamw
    return assigned


def _is_hidden_matrix(param: Param) -> bool:
    """Returns whether `param` is a matrix of a hidden layer. Excludes parameters of norms, embedding tables, and other tables
    in the first layer, such as learned positions, but not the weights of linears in the first layer.
    """
    modules = [holder.module for holder in param.holders]
    is_linear = any(isinstance(module, nn.Linear) for module in modules)
    is_in_first_layer = any(holder.chunk == 0 for holder in param.holders)
    return (
        len(param.shape) == 2 and param.decays and not any(map(_is_embedding, modules)) and (is_linear or not is_in_first_layer)
    )


def _is_embedding(module: nn.Module) -> bool:
    """Returns whether `module` is an embedding, judged by torch's classes and by the name of its class."""
    is_torch = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return is_torch or type(module).__name__.lower().endswith(("embedding", "embeddings"))


def _find_output_layer(params: Sequence[Param]) -> Param | None:
    """Returns the weight of the model's last linear, or None for a model without linears."""
    linears = [
        (holder.chunk, any(map(_is_embedding, (other.module for other in param.holders))), index)
        for index, param in enumerate(params)
        for holder in param.holders
        if isinstance(holder.module, nn.Linear) and len(param.shape) == 2
    ]
    return params[max(linears)[-1]] if linears else None  # in the last layer: the tied table, or else the last linear


class Muon(torch.optim.Optimizer):
    """Updates groups whose `role` is "muon" with torch.optim.Muon, and groups whose `role` is "adamw" with torch.optim.AdamW.
    lr: the default learning rate of the groups. muon_options, adamw_options: the options of the two classes, except the
    learning rate and the weight decay, which are options of the groups.
    """

    def __init__(self, groups: ParamGroups, lr: float, muon_options: dict[str, Any], adamw_options: dict[str, Any]) -> None:
        self.muon_options = muon_options
        self.adamw_options = adamw_options
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "role": "muon"})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # runs pass no closure
        """Runs a step of both algorithms. closure: ignored. Each step creates temporary torch optimizers, which use the groups
        and states of this optimizer.
        """
        if groups := self._select_groups("adamw"):
            for group in groups:
                self._drop_other_states(group, "exp_avg")
            adamw = torch.optim.AdamW(groups, **self.adamw_options)
            adamw.state = self.state
            adamw.step()
        for group in self._select_groups("muon"):
            self._drop_other_states(group, "momentum_buffer")
            self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Updates the matrices of a group, and each matrix of its stacks, with torch.optim.Muon."""
        buffers: dict[Tensor, Tensor] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            stacks = map(_split_into_matrices, (parameter, parameter.grad, state["momentum_buffer"]))
            for matrix, gradient, buffer in zip(*stacks, strict=True):
                matrix.grad = gradient
                buffers[matrix] = buffer
        if buffers:
            muon = torch.optim.Muon([{**group, "params": list(buffers)}], **self.muon_options)
            for matrix, buffer in buffers.items():
                muon.state[matrix]["momentum_buffer"] = buffer
            muon.step()  # type: ignore[no-untyped-call]

    def _drop_other_states(self, group: Mapping[str, Any], key: str) -> None:
        """Removes the states of parameters that the other algorithm updated before a checkpoint was loaded, so that their new
        states start at zero. key: the name of a state of the group's algorithm.
        """
        for parameter in group["params"]:
            if key not in self.state.get(parameter, {key: None}):
                self.state[parameter].clear()

    def _select_groups(self, role: Algorithm) -> ParamGroups:
        return [{**group} for group in self.param_groups if group["role"] == role and group["params"]]


def _split_into_matrices(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a detached view of the matrix, or of each matrix of a stack."""
    yield from [tensor.detach()] if tensor.ndim == 2 else tensor.detach().unbind()


def build(config: MuonConfig, groups: ParamGroups, device: torch.device) -> Muon:
    """Returns the optimizer of a plan's table `config`. Splits groups without a role, which do not come from a plan's model, so
    that Muon updates their matrices, and AdamW their other parameters.
    """
    split_groups = []
    for group in groups:
        if "role" in group:
            split_groups.append(group)
            continue
        for role in ("muon", "adamw"):
            parameters = [parameter for parameter in group["params"] if (parameter.ndim == 2) == (role == "muon")]
            split_groups.append({**group, "params": parameters, "role": role})
    muon_options = config.model_dump(include={"momentum", "nesterov", "eps", "ns_steps"})
    muon_options |= {"ns_coefficients": tuple(config.ns_coefficients), "adjust_lr_fn": config.adjust_lr}
    # On a CPU, the fused kernel rounds the last elements of a tensor differently, so groups may require `foreach`.
    is_fused = device.type in ("cpu", "cuda") and not any(group.get("foreach") for group in groups)
    adamw_options = {"betas": tuple(config.adamw.betas), "eps": config.adamw.eps, "fused": is_fused}
    return Muon(split_groups, config.lr, muon_options, adamw_options)
