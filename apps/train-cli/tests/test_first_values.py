"""In every layout a run starts from the values that plain PyTorch gives the model under the run's seed, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import factory_habits
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sley_core.api.model import Model, derive
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.runs import weights

transformers = pytest.importorskip("transformers")
for plugin in ("sley_dp", "sley_pp", "sley_isp", "peft"):
    pytest.importorskip(plugin)
EXAMPLES = Path(__file__).parents[3] / "examples" / "models"
SEED, VOCAB = 11, 256
HABITS = ("listed", "tied", "sequential", "loaded", "computed", "initialised", "built", "pretrained", "adapted", "hf_llama")
TIES = {"use": "pp.shared_modules"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed"}]},
    "dp.sharded": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded"}]},
    "pp": {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}, "gradient_handlers": [TIES]},
    "wp": {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}},
    "sp": {"parallel": {"dp": 1, "sp": 2}, "sequence": {"use": "isp.all_to_all", "positions": False}},
}
PLAN = small_plan(
    run__seed=SEED, model=None, data__sequence=16, batch={"global_size": 4, "micro_size": 1}, precision__compute="fp32"
)

pytestmark = [pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"), pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state of `loaded`, and a Llama of transformers."""
    folder = tmp_path_factory.mktemp("files")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        torch.save(nn.ModuleList(factory_habits.listed(VOCAB)).state_dict(), folder / "state.pt")
        sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")
    return folder


def model_of(habit: str, files: Path) -> dict[str, Any]:
    """The table `[model]` of a plan."""
    llama = str(files / "llama")
    known: dict[str, dict[str, Any]] = {
        "pretrained": {"factory": "hf_pretrained:layers", "options": {"path": llama}},
        "adapted": {"factory": "hf_pretrained:layers", "options": {"path": llama, "lora_rank": 4}},
        "hf_llama": {"factory": "hf_llama:layers", "options": {"hidden": 16, "tie": True}},
        "loaded": {"factory": "factory_habits:loaded", "options": {"vocab_size": VOCAB, "path": f"{files}/state.pt"}},
    }
    return known.get(habit, {"factory": f"factory_habits:{habit}", "options": {"vocab_size": VOCAB}})


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def plain(table: Mapping[str, Any]) -> dict[str, Tensor]:
    """The values of all parameters and buffers, and the attribute `shift`, as plain PyTorch makes them."""
    module, _, name = table["factory"].partition(":")
    options = dict(table["options"])
    if module == "hf_llama":
        options["data"] = type("Data", (), {"vocab_size": VOCAB})
    seed_all(SEED)
    made = getattr(import_module(module), name)(**options)
    init = made.init_weights if isinstance(made, Model) else None
    if name == "built":
        layers = built_by_hand(init)
    else:
        items = made.named_children() if isinstance(made, nn.Sequential) else made
        if isinstance(made, Model):
            items = [(layer.name, layer.module) for layer in made]
        layers = dict(one if isinstance(one, tuple) else (str(at), one) for at, one in enumerate(items))
        if init is not None:
            done: set[int] = set()
            for key, layer in layers.items():
                apply(layer, key, init, done)
    found: dict[str, Tensor] = {}
    for key, layer in layers.items():
        found |= {f"{key}.{name}": value.detach().float() for name, value in layer.named_parameters()}
        found |= {f"{key}.{name}": value for name, value in layer.named_buffers()}
        if hasattr(layer, "shift"):
            found[f"{key}.shift"] = layer.shift
    return found


def apply(module: nn.Module, name: str, init: Any, done: set[int]) -> None:
    """As `nn.Module.apply`, with names, and a module that several share once."""
    for key, child in module.named_children():
        if id(child) not in done:
            apply(child, f"{name}.{key}", init, done)
    done.add(id(module))
    with torch.no_grad():
        init(module, name)


def built_by_hand(init: Any) -> dict[str, nn.Module]:
    makers = {
        "embed": lambda: factory_habits.Embed(VOCAB),
        "block.0": factory_habits.Block,
        "block.1": factory_habits.Block,
        "functional": factory_habits.Functional,
        "head": lambda: factory_habits.Head(VOCAB),
    }
    layers: dict[str, Any] = {}
    for name, make in makers.items():
        seed_all(derive(SEED, name))
        layers[name] = make()
        apply(layers[name], name, init, set())
    layers["head"].output.weight = layers["embed"].table.weight
    return layers


def first(plans: Mapping[str, Any], texts: Path) -> dict[str, dict[str, Tensor]]:
    """The same values as `plain`, of this rank's layers at the start of a run of each plan."""
    transformers.utils.logging.disable_progress_bar()
    found = {}
    for name, tables in plans.items():
        with World.join("cpu") as world, assemble(plan_from_dict(tables, texts), world) as run:
            found[name] = weights(run)
            for layer in run.layers:
                if hasattr(layer.module, "shift"):
                    found[name][f"{layer.name}.shift"] = layer.module.shift  # type: ignore[assignment]
    return found


def test_every_layout_starts_from_the_values_of_plain_pytorch(
    ranks: Any, files: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    transformers.utils.logging.disable_progress_bar()
    models = {habit: model_of(habit, files) for habit in HABITS}
    plans = {
        f"{habit} {layout}": changed(PLAN, model=table, **changes)
        for habit, table in models.items()
        for layout, changes in LAYOUTS.items()
    }
    for habit in ("pretrained", "adapted", "hf_llama"):
        plans[f"{habit} sp"]["sequence"].pop("positions")
    with torch.random.fork_rng(devices=[]):
        wanted = {habit: plain(table) for habit, table in models.items()}
    of_ranks = ranks(2, timeout_s=300)(first, plans, texts)
    for name in plans:
        habit = name.partition(" ")[0]
        seen: set[str] = set()
        for found in of_ranks:
            seen |= found[name].keys()
            for key, value in found[name].items():
                assert torch.equal(value.float(), wanted[habit][key].float()), f"{name}: {key}"
        assert wanted[habit].keys() - seen <= ties(habit), name


def ties(habit: str) -> set[str]:
    """Second names of tied parameters, which a run gives under their first."""
    return {"hf_llama": {"head.lm_head.weight"}}.get(
        habit, {"2.out.weight", "2.out.bias", "3.output.weight", "head.output.weight"}
    )
