"""Weights leave a checkpoint as they leave a run that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_core.weight_files.read import WeightFiles
from sley_testing.plans import changed, small_plan

transformers = pytest.importorskip("transformers")
PLAN = small_plan(data__sequence=16, model__ffn_hidden=6000, precision__compute="bf16", run__steps=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["huggingface", "safetensors"])
@pytest.mark.parametrize("which", ["step-00000001", ""], ids=["one", "the newest"])
def test_a_checkpoint_is_exported_as_the_run_of_its_step(cli: Any, texts: Path, folder: Path, form: str, which: str) -> None:
    """In several files, of a model whose weights it has in full precision; what is damaged is refused."""
    tables = changed(PLAN, model__ffn_hidden=6000, precision__compute="bf16", checkpoint={"every_steps": 1, "mode": "sync"})
    steps = {"step-00000001": 1, "": 2}[which]
    with assemble(plan_from_dict(tables, texts), World.alone("cpu"), folder=folder) as run:
        run.step()
        run.step()
    with assemble(plan_from_dict(PLAN, texts), World.alone("cpu")) as run:
        for _ in range(steps):
            run.step()
        run.save_weights(folder / "wanted", precision="full")
    out = folder / "out"
    result = cli("export", folder / "checkpoints" / which, "--format", form, "--out", out, "--max-file-mb", 1)
    assert result.code == 0, result.err
    assert f"after step {steps} of 2 of the run 'small', from {folder}/checkpoints/step-" in result.err
    found = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    wanted = WeightFiles(folder / "wanted")
    if form == "huggingface":
        assert len(list(out.glob("*.safetensors"))) == 3
        state = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
        assert all(torch.equal(state[name], value) for name, value in found.items())
        again = changed(PLAN, model={"use": "models.llama", "weights": str(out)}, precision__compute="fp32")
        with assemble(plan_from_dict(again, texts), World.alone("cpu")) as run:
            assert all(torch.equal(param.parameter, wanted.tensor(param.name)) for param in run.registry)
    else:
        assert found.keys() == set(wanted.names)
        assert all(torch.equal(value, wanted.tensor(name)) for name, value in found.items())
    for file in (folder / "checkpoints").glob("*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    result = cli("export", folder / "checkpoints" / which, "--format", form, "--out", folder / "no")
    assert (result.code, (folder / "no").exists()) == (1, False)
    assert "error[checkpoint-damaged]" in result.err
