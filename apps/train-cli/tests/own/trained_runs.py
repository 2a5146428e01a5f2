"""Small models of transformers with random weights, and folders of runs as `train-cli run` leaves them."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.comm.world import World
from sley_core.files import PLAN_FILE
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import Tables, small_plan
from sley_trainer.assemble import assemble
from sley_trainer.run import Run
from train_cli.saved_run import copy_run_files

if find_spec("transformers") is None:  # its import takes seconds, which every process that collects tests would need
    pytest.skip("needs transformers", allow_module_level=True)
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 255,
}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout"), 0.0)
PLAN = small_plan(
    data__sequence=16,
    batch={"global_size": 4, "micro_size": 2},
    optimizer={"use": "core.adamw", "lr": 1e-2},
    precision__compute="fp32",
)
TOKENS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))


def save_model(folder: Path, family: str, **changes: Any) -> Path:
    """Writes a model with random weights and a `generation_config.json`. changes: to the config of `SIZES`."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **NO_DROPOUT, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def train(tables: Tables, texts: Path, to: Path, save: Callable[[Run, Path], None], resume: str | None = None) -> Tensor:
    """Takes two steps in the run folder `to`, and returns the logits of `TOKENS` in fp32.

    save: saves the weights of the run. resume: the path of a checkpoint of the run.
    """
    to.mkdir(exist_ok=True)
    plan = plan_from_dict(tables, texts)
    copy_run_files(plan, to)
    with assemble(plan, World.alone("cpu"), folder=to) as run:
        if resume is not None:
            run.load_checkpoint(resume)
        run.step()
        run.step()
        save(run, to)
        (to / PLAN_FILE).write_text(run.resolved_plan.to_toml(), "utf-8")
        output: Any = TOKENS % (run.dataset.info.vocab_size or 256)
        with torch.no_grad(), run.stepper.update.use_evaluation_weights():
            for layer in run.layers:
                output = layer.module(output)
    return output.float()


def transformers_model(folder: Path) -> Any:
    """Returns the model that transformers reads. Fails if a weight is missing, unknown or has another shape."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    return model.eval()
