"""`hf.lora`: low-rank adapters from peft (Hu et al. 2021) in the layers of any model, and their export.

The weight of an adapted linear module is frozen, and its name becomes, for example, `q_proj.base_layer.weight`. The module gets
the matrices A, `q_proj.lora_A.default.weight` [r, in], and B, `q_proj.lora_B.default.weight` [out, r]. Its output becomes
base(x) + (alpha / r) B A x. A run is exported as a peft folder with only the adapters, or as the weights of the model with the
adapters merged into them.
"""

import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sley_core.api.data import TOKEN_FIELDS, DataContext, DataInfo
from sley_core.api.files import TensorInfo, TensorReader
from sley_core.api.model import Model
from sley_core.api.parts import open_dataset
from sley_core.api.plan import Plan
from sley_core.errors import PlanError, PluginError, RunError, SleyError, UsageError, install_hint
from sley_hf.plugin import CONFIG_NAME, LoraConfig

ADAPTER_NAME = "default"
"""The name of the adapter in peft's modules."""

ADAPTER_NAME_PART = ".lora_"
"""The part of a name that marks a parameter of an adapter."""

BASE_NAME_PART = ".base_layer."
"""The part of a name that marks a frozen parameter of an adapted module."""


def build_adapter(config: LoraConfig, layer_names: Sequence[str]) -> Callable[[nn.Module, str], None]:
    """Returns a function `adapt(module, name)` that adds adapters to a layer in place. layer_names: the names of all layers,
    with the head last. Raises PluginError "plugin-import" if peft is missing. The function raises the errors of
    `find_target_modules`.
    """
    try:
        import peft
    except ImportError as error:
        message, hint = f"`hf.lora` needs peft: {error}", install_hint("hf", "lora")
        raise PluginError("plugin-import", message, path=("adapters",), hint=hint) from error

    def adapt(layer: nn.Module, name: str) -> None:
        trained = [parameter for path, parameter in layer.named_parameters(name) if matches_pattern(path, config.train)]
        trained += [parameter for parameter in layer.parameters() if parameter.requires_grad]  # set by a tied layer
        targets = find_target_modules(config, layer, name, is_head=name == layer_names[-1])
        if targets:
            peft.inject_adapter_in_model(build_peft_config(config, targets, layer.modules()), layer, ADAPTER_NAME)
        for parameter in trained:
            parameter.requires_grad_(True)

    return adapt


def find_target_modules(config: LoraConfig, layer: nn.Module, name: str, *, is_head: bool) -> list[str]:
    """Returns the paths, within the layer `name`, of the modules that get adapters. is_head: whether this layer is the model's
    last. Raises PlanError "model-adapters" if the plan names a module that peft cannot adapt, or a stacked parameter of
    experts, since peft would replace that parameter during each forward.
    """
    if config.targets == "all-linear":
        linears = [path for path, module in layer.named_modules() if isinstance(module, nn.Linear | Conv1D)]
        return [] if is_head else [path for path in linears if path]
    targets = []
    for path, module in layer.named_modules():
        if path and matches_pattern(f"{name}.{path}", config.targets):
            if not isinstance(module, nn.Linear | nn.Embedding | Conv1D):
                raise _build_target_error(f"`{name}.{path}` is a {type(module).__name__}, which cannot have an adapter")
            targets.append(path)
    for path, parameter in layer.named_parameters(name):
        if parameter.ndim == 3 and matches_pattern(path, config.targets):
            raise _build_target_error(f"`{path}` contains the weights of all experts, so it cannot have an adapter")
    return targets


def _build_target_error(message: str) -> PlanError:
    hint = "list only linear layers and embeddings; to train other parameters in full, list them in `train`"
    return PlanError("model-adapters", message, path=("adapters", "targets"), hint=hint)


def build_peft_config(config: LoraConfig, targets: Sequence[str], modules: Iterable[nn.Module]) -> Any:
    """Returns the `peft.LoraConfig` for modules with the names `targets`. modules: these modules, and possibly more."""
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


def matches_pattern(path: str, patterns: Sequence[str]) -> bool:
    """Returns whether `path` matches one of `patterns`: the end of a path (from a dot on), or a glob for the whole path."""
    return any(path == pattern or path.endswith(f".{pattern}") or fnmatchcase(path, pattern) for pattern in patterns)


class MergedWeights:
    """Reads the weights of a run with its adapters merged into them, under the names of the model without adapters. source: the
    weights and adapters of the run. adapted: the modules with adapters, on meta, by the names of their weights. Raises
    UsageError "export-format" for an adapter of a tied weight, since the adapter changes only one of the weight's two uses.
    """

    def __init__(self, plan: Plan, source: TensorReader) -> None:
        self._source = source
        self.adapted = _build_adapted_modules(plan)
        self._names = {name.replace(BASE_NAME_PART, "."): name for name in source.names if ADAPTER_NAME_PART not in name}
        for name in self.adapted:
            if name not in self._names:
                raise _build_format_error(f"the adapter of {name!r} cannot be merged: this weight is tied to another one")

    @property
    def names(self) -> Sequence[str]:
        return list(self._names)

    def info(self, name: str) -> TensorInfo:
        return self._source.info(self._names[name])

    @torch.no_grad()
    def tensor(self, name: str) -> Tensor:
        """Returns the tensor `name` in its stored dtype, with its adapter merged into it in at least fp32."""
        stored = self._source.tensor(self._names[name])
        if name not in self.adapted:
            return stored
        module = deepcopy(self.adapted[name])
        prefix = name.removesuffix(".weight")
        for path, holder in module.named_modules():
            for attribute, _ in list(holder.named_parameters(recurse=False)):
                value = self._source.tensor(".".join(filter(None, (prefix, path, attribute))))
                holder._parameters[attribute] = nn.Parameter(value.to(torch.promote_types(value.dtype, torch.float32)))
        module.merge()
        merged = cast(Tensor, module.get_base_layer().weight)
        return merged.detach().to(stored.dtype)


def _build_adapted_modules(plan: Plan) -> dict[str, Any]:
    """Returns the modules with adapters, on meta, by weight name. Raises UsageError "export-format" for a tied weight."""
    from peft.tuners.lora import LoraLayer

    assert plan.adapters is not None, plan
    try:
        info = open_dataset(plan.data, DataContext(plan.run.seed)).info
    except SleyError:  # the data may no longer exist; a model that starts from weights does not need the data
        info = DataInfo(TOKEN_FIELDS)
    model: Model = cast(Any, plan.model.record).load()(cast(Any, plan.model.config).without_weights(), info)
    adapt = build_adapter(plan.adapters.config, [layer.name for layer in model.layers])
    modules: dict[str, Any] = {}
    for layer in model.layers:
        model.build_layer(layer, 0, initialises=False)
        adapt(layer.module, layer.name)
        for path, module in layer.module.named_modules(prefix=layer.name):
            if isinstance(module, LoraLayer):
                modules[f"{path}.weight"] = cast(nn.Module, module).eval().to("meta")
        layer.module = nn.Module()
    for tie in model.ties:
        if tied := modules.keys() & set(tie):
            raise _build_format_error(f"the adapter of {min(tied)!r} cannot be exported: this weight is tied to another one")
    return modules


def export_adapter(plan: Plan, source: TensorReader, names: Mapping[str, str], base: Path | None, out: Path) -> None:
    """Writes peft's files `adapter_config.json` and `adapter_model.safetensors` into the new folder `out`. names: transformers'
    name of each weight, keyed by its name in the model without adapters. base: the folder or run from which the run started, or
    None. Raises UsageError "export-format" for adapters and trained weights that peft cannot represent. If `base` is a
    transformers folder, raises RunError "export-differs" unless its model with the adapters has the run's weights.
    """
    from safetensors.torch import save_file

    assert plan.adapters is not None, plan
    config: LoraConfig = plan.adapters.config
    merged = MergedWeights(plan, source)
    tensors: dict[str, Tensor] = {}
    targets: dict[str, None] = {}
    modules_to_save: dict[str, None] = {}
    for name in source.names:
        prefix, lora, suffix = name.partition(ADAPTER_NAME_PART)
        weight = f"{prefix}.weight" if lora else name.replace(BASE_NAME_PART, ".")
        if not lora and not matches_pattern(weight, config.train):
            continue
        if lora:
            module = names[weight].removesuffix(".weight")
            targets[module] = None
            path = f"{ADAPTER_NAME_PART}{suffix}".replace(f".{ADAPTER_NAME}", "")
            path = path.replace("magnitude_vector.weight", "magnitude_vector")
            tensors[f"base_model.model.{module}{path}"] = source.tensor(name)
        elif BASE_NAME_PART in name or weight not in names:
            raise _build_format_error(
                f"{name!r} cannot be exported: it is trained and has an adapter, or transformers has no such parameter"
            )
        else:
            modules_to_save[names[weight].rpartition(".")[0]] = None
    for name, hf_name in names.items():  # peft saves whole modules
        if hf_name.rpartition(".")[0] in modules_to_save:
            tensors[f"base_model.model.{hf_name}"] = source.tensor(name)
    base_layers = (module.get_base_layer() for module in merged.adapted.values())
    peft = build_peft_config(config, _shorten_targets(list(targets), names.values()), base_layers)
    peft.modules_to_save = list(modules_to_save) or None
    peft.task_type, peft.inference_mode = "CAUSAL_LM", True
    has_base = base is not None and (base / CONFIG_NAME).is_file()
    peft.base_model_name_or_path = str(base) if has_base else None
    scratch = out.with_name(f".{out.name}.unfinished")
    scratch.mkdir(parents=True)
    peft.save_pretrained(str(scratch))
    save_file(tensors, scratch / "adapter_model.safetensors", {"format": "pt"})
    try:
        if base is not None and has_base:
            _check_adapter(base, scratch, names, merged)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_adapter(base: Path, folder: Path, names: Mapping[str, str], merged: TensorReader) -> None:
    """Raises RunError "export-differs" unless the model in `base`, with the adapters in `folder`, has the weights `merged`."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft reads it
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder))
    state = cast(Any, model).merge_and_unload().state_dict()
    for name, hf_name in names.items():
        expected, actual = merged.tensor(name), state[hf_name]
        limit = 4 * torch.finfo(expected.dtype).eps * expected.abs().max()
        if (actual - expected.float()).abs().max() > limit:
            message = f"the adapters in `{folder}` are wrong: with them, {hf_name!r} differs from {name!r} of the run"
            raise RunError("export-differs", message, hint=f"check that `{base}` is the folder from which the run started")


def _shorten_targets(targets: Sequence[str], weights: Any) -> list[str]:
    """Returns each target's name, shortened to its last part if no module other than targets ends with that part."""
    modules = {name.rpartition(".")[0] for name in weights}
    excluded = {name.rpartition(".")[2] for name in modules - set(targets)}
    ends = ((target.rpartition(".")[2], target) for target in targets)
    return list(dict.fromkeys(target if end in excluded else end for end, target in ends))


def _build_format_error(message: str) -> UsageError:
    return UsageError("export-format", message, hint="use `--format safetensors`, which works for any model")
