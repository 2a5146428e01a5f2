"""`hf.lora`: low-rank adapters of peft (Hu et al. 2021) in the layers of any model.

A linear keeps its weight, now `q_proj.base_layer.weight`, which is frozen, and gets `q_proj.lora_A.default.weight` [r, in] and
`q_proj.lora_B.default.weight` [out, r]; its output becomes base(x) + alpha / r B A x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn
from transformers.pytorch_utils import Conv1D

from sley_core.errors import PlanError, PluginError

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

    from sley_hf.plugin import LoraConfig

ADAPTER = "default"
"""The name of the adapter in peft's modules."""


def adapters(config: LoraConfig, layer_names: Sequence[str]) -> Callable[[nn.Module, str], None]:
    """Returns a function that adds adapters to the module of a layer. Raises PluginError "plugin-import" without peft."""
    try:
        import peft
    except ImportError as error:
        hint = """install sley-hf[lora]; in a clone of Sley's repository, run `pip install -e "packages/hf[lora]"`"""
        raise PluginError("plugin-import", f"`hf.lora` needs peft: {error}", path=("adapters",), hint=hint) from error

    def adapt(layer: nn.Module, name: str) -> None:
        trained = [parameter for path, parameter in layer.named_parameters(name) if matches(path, config.train)]
        trained += [parameter for parameter in layer.parameters() if parameter.requires_grad]  # by a tied layer
        targets = target_modules(config, layer, name, is_head=name == layer_names[-1])
        if targets:
            peft.inject_adapter_in_model(peft_config(config, targets, layer.modules()), layer, ADAPTER)
        for parameter in trained:
            parameter.requires_grad_(True)

    return adapt


def target_modules(config: LoraConfig, layer: nn.Module, name: str, *, is_head: bool) -> list[str]:
    """Returns the paths, within the layer `name`, of the modules that get adapters.

    Raises PlanError "model-adapters" for a named module that peft cannot adapt, and for a named parameter of stacked experts:
    peft's adapter of it replaces the parameter during each forward.
    """
    if config.targets == "all-linear":
        linears = [path for path, module in layer.named_modules() if isinstance(module, nn.Linear | Conv1D)]
        return [] if is_head else [path for path in linears if path]
    targets = []
    for path, module in layer.named_modules():
        if path and matches(f"{name}.{path}", config.targets):
            if not isinstance(module, nn.Linear | nn.Embedding | Conv1D):
                raise _target_error(f"`{name}.{path}` is a {type(module).__name__}, which cannot have an adapter")
            targets.append(path)
    for path, parameter in layer.named_parameters(name):
        if parameter.ndim == 3 and matches(path, config.targets):
            raise _target_error(f"`{path}` is one parameter of all experts, which cannot have an adapter")
    return targets


def _target_error(message: str) -> PlanError:
    hint = "name linears and embeddings; `train` names parameters that are trained in full"
    return PlanError("model-adapters", message, path=("adapters", "targets"), hint=hint)


def peft_config(config: LoraConfig, targets: Sequence[str], modules: Iterable[nn.Module]) -> PeftConfig:
    """Returns the config of peft with these `target_modules`, which are among `modules`."""
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        use_dora=config.dora,
        target_modules=list(targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in modules),
    )


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Returns whether `path` matches one of `patterns`: the last names of the path, or a pattern for the whole path."""
    return any(path == pattern or path.endswith(f".{pattern}") or fnmatchcase(path, pattern) for pattern in patterns)
