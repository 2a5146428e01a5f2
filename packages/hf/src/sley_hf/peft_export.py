"""Exports a run with `hf.lora`: its adapters as a folder of peft, or its weights with the adapters merged in."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from sley_core.api.data import TOKEN_FIELDS, DataContext, DataInfo
from sley_core.api.parts import open_dataset
from sley_core.errors import RunError, SleyError, UsageError
from sley_hf.lora import ADAPTER, adapters, matches, peft_config
from sley_hf.plugin import CONFIG

if TYPE_CHECKING:
    from sley_core.api.files import TensorKind, TensorReader
    from sley_core.api.model import Model
    from sley_core.api.plan import Plan
    from sley_hf.plugin import LoraConfig

LORA = ".lora_"
BASE = ".base_layer."


class MergedWeights:
    """The weights in `source` of a run with adapters, under the names and with the values of the model without them.

    Raises UsageError "export-format" for an adapter of a tied weight, whose other use it does not change.
    """

    def __init__(self, plan: Plan, source: TensorReader) -> None:
        self._source = source
        self.adapted = _adapted_modules(plan)
        self._names = {name.replace(BASE, "."): name for name in source.names if LORA not in name}
        for name in self.adapted:
            if name not in self._names:
                raise _format_error(f"the adapter of {name!r} cannot be merged: its weight is tied to another one")

    @property
    def names(self) -> Sequence[str]:
        return list(self._names)

    def kind(self, name: str) -> TensorKind:
        return self._source.kind(self._names[name])

    @torch.no_grad()
    def tensor(self, name: str) -> Tensor:
        """Returns a tensor in its own dtype; adapters are added in at least fp32."""
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


def _adapted_modules(plan: Plan) -> dict[str, Any]:
    """Returns the modules with adapters, on meta, by the name that their weight has without them.

    Raises UsageError "export-format" for an embedding that is tied to the head.
    """
    assert plan.adapters is not None, plan
    try:
        info = open_dataset(plan.data, DataContext(plan.run.seed)).info
    except SleyError:  # the data may be gone; a model that started from weights knows its vocabulary
        info = DataInfo(TOKEN_FIELDS)
    model: Model = cast(Any, plan.model.record).load()(cast(Any, plan.model.config).without_weights(), info)
    adapt = adapters(plan.adapters.config, [layer.name for layer in model.layers])
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
            raise _format_error(f"the adapter of {min(tied)!r} cannot be exported: its weight is tied to another one")
    return modules


def export_adapter(plan: Plan, source: TensorReader, names: Mapping[str, str], base: Path | None, out: Path) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` of peft into the new folder `out`.

    The adapters are then loaded with the transformers model in `base`, if it is one, and compared with the run's weights.
    names: transformers' name of each weight of the model without adapters. Raises UsageError "export-format" for adapters and
    trained weights that peft cannot have, and RunError "export-differs".
    """
    assert plan.adapters is not None, plan
    config: LoraConfig = plan.adapters.config
    merged = MergedWeights(plan, source)
    tensors: dict[str, Tensor] = {}
    targets: dict[str, None] = {}
    modules_to_save: dict[str, None] = {}
    for name in source.names:
        prefix, lora, suffix = name.partition(LORA)
        weight = f"{prefix}.weight" if lora else name.replace(BASE, ".")
        if not lora and not matches(weight, config.train):
            continue
        if lora:
            module = names[weight].removesuffix(".weight")
            targets[module] = None
            path = f"{LORA}{suffix}".replace(f".{ADAPTER}", "")
            tensors[f"base_model.model.{module}{path.replace('magnitude_vector.weight', 'magnitude_vector')}"] = source.tensor(
                name
            )
        elif BASE in name or weight not in names:
            raise _format_error(f"{name!r} is trained and has an adapter, or is unknown to transformers")
        else:
            modules_to_save[names[weight].rpartition(".")[0]] = None
    for name, hf_name in names.items():  # peft saves whole modules
        if hf_name.rpartition(".")[0] in modules_to_save:
            tensors[f"base_model.model.{hf_name}"] = source.tensor(name)
    base_layers = (module.get_base_layer() for module in merged.adapted.values())
    peft = peft_config(config, _shortest_names(list(targets), names.values()), base_layers)
    peft.modules_to_save = list(modules_to_save) or None
    peft.task_type, peft.inference_mode = "CAUSAL_LM", True
    has_base = base is not None and (base / CONFIG).is_file()
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
    """Raises RunError "export-differs" unless peft makes the weights `merged` from the model in `base` and the adapters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft asks for it
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder))
    state = cast(Any, model).merge_and_unload().state_dict()
    for name, hf_name in names.items():
        expected, actual = merged.tensor(name), state[hf_name]
        limit = 4 * torch.finfo(expected.dtype).eps * expected.abs().max()
        if (actual - expected.float()).abs().max() > limit:
            message = f"the adapters in `{folder}` are wrong: with them, {hf_name!r} differs from {name!r} of the run"
            raise RunError("export-differs", message, hint=f"check that `{base}` is the folder from which the run started")


def _shortest_names(targets: Sequence[str], weights: Any) -> list[str]:
    """Returns the last part of the targets' names where every module that ends with it is a target, else whole names."""
    modules = {name.rpartition(".")[0] for name in weights}
    excluded = {name.rpartition(".")[2] for name in modules - set(targets)}
    ends = ((target.rpartition(".")[2], target) for target in targets)
    return list(dict.fromkeys(target if end in excluded else end for end, target in ends))


def _format_error(message: str) -> UsageError:
    return UsageError("export-format", message, hint="use `--format safetensors`, which works for any model")
