"""`run.save_weights` writes, in every layout, the weights that the ranks hold, each once, in files that are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sley_core.errors import RunError
from sley_core.weight_files import write
from sley_core.weight_files.read import INDEX, WeightFiles
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import changed, small_plan
from sley_testing.runs import running, weights

Tensors = dict[str, torch.Tensor]
PLAN = small_plan(
    model__tie_embeddings=True,
    data__sequence=16,
    batch={"global_size": 4, "micro_size": 1},
    optimizer={"use": "core.adamw", "lr": 1e-3},
    precision__compute="bf16",
)
SHARDED = {"gradient_handlers": [{"use": "dp.sharded"}]}
ISP = {"use": "isp.communicator"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "sharded and frozen": {"parallel": {"dp": 2}, **SHARDED, "optimizer__groups": [{"match": "*norm*", "freeze": True}]},
        "interleaved": {"parallel": {"pp": 2}, "pipeline": {"use": "pp.interleaved"}},
        "wp by columns": {"model__tie_embeddings": False, "parallel": {"wp": 2}, "weights": ISP | {"embedding": "hidden"}},
    },
    4: {
        "wp and sharded": {"parallel": {"wp": 2, "dp": 4}, "weights": ISP, **SHARDED},
        "copies of shards": {"parallel": {"dp": 4}, "gradient_handlers": [{"use": "dp.sharded", "shards": 2}]},
        "pp and wp": {"parallel": {"pp": 2, "wp": 2}, "pipeline": {"use": "pp.one_f_one_b"}, "weights": ISP},
    },
}

pytestmark = pytest.mark.timeout(400)


def saved(plans: dict[str, dict[str, Any]], texts: Path, to: Path) -> dict[str, Tensors]:
    """Takes two steps of each plan and saves its weights in both precisions; returns what this rank holds."""
    found = {}
    for name, tables in plans.items():
        with running(tables, texts) as run:
            run.step()
            run.step()
            run.save_weights(to / name / "working", max_file_bytes=4000)
            run.save_weights(to / name / "full", precision="full")
            found[name] = {key: value for key, value in weights(run).items() if key in run.registry.names}
    return found


def read(folder: Path) -> Tensors:
    files = WeightFiles(folder)
    return {name: files.tensor(name) for name in files.names}


@pytest.mark.parametrize("size", LAYOUTS)
def test_files_have_the_weights_of_the_ranks(ranks: Any, texts: Path, tmp_path: Path, size: int) -> None:
    plans = {name: changed(PLAN, **changes) for name, changes in LAYOUTS[size].items()}
    is_tied = {tables["model"]["tie_embeddings"] for tables in plans.values()}
    alone = {True: ("tied", PLAN), False: ("untied", changed(PLAN, model__tie_embeddings=False))}
    saved(dict(alone[tied] for tied in is_tied), texts, tmp_path)
    everyone = ranks(size, timeout_s=200)(saved, plans, texts, tmp_path)
    for name, tables in plans.items():
        of_one = tmp_path / ("tied" if tables["model"]["tie_embeddings"] else "untied") / "full"
        assert [file.name for file in of_one.iterdir()] == ["model.safetensors"], "one file needs no index"
        reference = read(of_one)
        working, full = read(tmp_path / name / "working"), read(tmp_path / name / "full")
        assert working.keys() == full.keys() == reference.keys(), name
        for of_rank in everyone:
            assert all(torch.equal(working[key], value) for key, value in of_rank[name].items()), name
        for key, value in full.items():
            assert value.dtype == torch.float32
            assert torch.equal(value.bfloat16(), working[key]), f"{name}: {key} is not the master of what computes"
        assert_close_gradients(reference, full, 2**-7)
        index = json.loads((tmp_path / name / "working" / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in working.values())
        assert not list((tmp_path / name).glob(".*")), "nothing unfinished is left"
        files = sorted((tmp_path / name / "working").glob("*.safetensors"))
        assert [file.name for file in files] == [
            f"model-{at:05}-of-{len(files):05}.safetensors" for at in range(1, len(files) + 1)
        ]
        for file in files:
            with safe_open(file, "pt") as content:
                assert content.metadata() == content.metadata() | {"format": "pt", "step": "2"}
            values = load_file(file)
            assert sum(value.nbytes for value in values.values()) <= 4000 or len(values) == 1


def refused(tables: dict[str, Any], texts: Path, to: Path) -> tuple[list[str], list[str]]:
    """What this rank is told in saves that fail on one rank, and the names that it saves after them."""
    told = []
    with running(tables, texts) as run:
        run.step()
        add = write.TensorFile.add

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device", "disk")

        for case in ("strange", "disk", "file/sub", "away"):
            if case == "disk" and run.world.rank == 1:
                write.TensorFile.add = full  # type: ignore[method-assign]
            if case == "away" and run.world.rank == 1:
                run.memory.offload("weights").wait()
            with pytest.raises(RunError) as raised:
                run.save_weights(to / case)
            told.append(raised.value.diagnostics[0].message)
            write.TensorFile.add = add  # type: ignore[method-assign]
        run.memory.onload()
        run.save_weights(to / "disk", precision="full")
        return told, sorted(WeightFiles(to / "disk").names)


def test_all_ranks_hear_that_one_could_not_save(ranks: Any, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "disk").mkdir()
    tables = changed(PLAN, parallel={"pp": 2}, pipeline={"use": "pp.one_f_one_b"}, offload=[{"use": "memory.everything"}])
    (first, second) = ranks(2, timeout_s=100)(refused, tables, texts, tmp_path)
    assert first == second
    (strange, disk, file, away), names = first
    assert "rank 0" in strange
    assert "`thesis.tex`, which is not a weight file" in strange
    assert "rank 1: cannot write `disk`: No space left on device" in disk
    assert "rank 0: cannot write" in file
    assert "rank 1: " in away
    assert "saving weights" in away
    assert (tmp_path / "strange" / "thesis.tex").read_text() == "years of work"
    assert "embed.tokens.weight" in names, "the next save succeeds"
    assert not list(tmp_path.glob(".*"))


def grown(tables: dict[str, Any], texts: Path, to: Path) -> tuple[int, int]:
    """By how many bytes memory grows at most while this rank saves, and the bytes that it saves of all ranks."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

    with running(tables, texts) as run:
        run.save_weights(to / "first")  # so that what is imported late is there
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
        before = status("VmRSS")
        run.save_weights(to / "w")
        return status("VmHWM") - before, run.facts.num_parameters * 4


def test_no_rank_gathers_more_than_a_weight(ranks: Any, texts: Path, tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system does not say how much memory a process had at most")
    model = {"use": "models.llama", "num_layers": 8, "hidden": 512, "heads": 8, "ffn_hidden": 2048}
    tables = changed(PLAN, model=model, precision__compute="fp32", run__keep_freed_memory=False)
    tables = changed(tables, parallel={"wp": 2}, weights={"use": "isp.communicator"})
    for peak, total in ranks(2, timeout_s=100)(grown, tables, texts, tmp_path):
        assert total > 128e6
        assert peak < 48e6, f"{peak / 1e6:.0f} MB, where the largest weight has 4"
