"""`run.save_weights` writes the weights of the ranks once, in complete files, in every layout."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sley_core.errors import RunError
from sley_core.weight_files import write
from sley_core.weight_files.read import INDEX_FILE, WeightFiles
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import Tensors, running, weights

PLAN = small_plan(
    model__tie_embeddings=True,
    data__sequence=16,
    batch={"global_size": 4, "micro_size": 1},
    optimizer={"use": "core.adamw", "lr": 1e-3},
    precision__compute="bf16",
)
SHARDED = {"gradient_handlers": [{"use": "dp.sharded"}]}
ISP = {"use": "isp.communicator"}
LAYOUTS: dict[str, Tables] = {
    "pp and wp": {"parallel": {"pp": 2, "dp": 2, "wp": 2}, "pipeline": {"use": "pp.one_f_one_b"}, "weights": ISP},
    "sharded and frozen": {"parallel": {"dp": 2}, **SHARDED, "optimizer__groups": [{"match": "*norm*", "freeze": True}]},
    "interleaved": {"parallel": {"pp": 2}, "pipeline": {"use": "pp.interleaved"}},
    "wp by columns": {"model__tie_embeddings": False, "parallel": {"wp": 2}, "weights": ISP | {"embedding": "hidden"}},
    "wp and sharded": {"parallel": {"wp": 2, "dp": 4}, "weights": ISP, **SHARDED},
    "copies of shards": {"parallel": {"dp": 4}, "gradient_handlers": [{"use": "dp.sharded", "shards": 2}]},
}

pytestmark = pytest.mark.timeout(400)


def train_and_save(tables: Tables, texts: Path, folder: Path) -> Tensors:
    """Takes a step and saves the weights in both precisions. Returns the weights of this rank."""
    with running(tables, texts) as run:
        run.step()
        run.save_weights(folder / "working", max_file_bytes=4000)
        run.save_weights(folder / "full", precision="full")
        return {name: value for name, value in weights(run).items() if name in run.registry.names}


def read(folder: Path) -> Tensors:
    files = WeightFiles(folder)
    return {name: files.tensor(name) for name in files.names}


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_have_the_weights_of_the_ranks(ranks: Any, texts: Path, tmp_path: Path, layout: str) -> None:
    tables = changed(PLAN, **LAYOUTS[layout])
    train_and_save(changed(PLAN, model=tables["model"]), texts, tmp_path / "alone")
    assert [file.name for file in (tmp_path / "alone" / "full").iterdir()] == ["model.safetensors"], "one file has no index"
    size = tables["parallel"].get("pp", 1) * tables["parallel"].get("dp", tables["parallel"].get("wp", 1))
    by_rank = ranks(size, timeout_s=200)(train_and_save, tables, texts, tmp_path / "saved")
    reference = read(tmp_path / "alone" / "full")
    working, full = read(tmp_path / "saved" / "working"), read(tmp_path / "saved" / "full")
    assert working.keys() == full.keys() == reference.keys()
    for rank in by_rank:
        assert all(torch.equal(working[name], value) for name, value in rank.items())
    for name, value in full.items():
        assert value.dtype == torch.float32
        assert torch.equal(value.bfloat16(), working[name]), f"{name} must be the master weight"
    assert_close_gradients(reference, full, 2**-7)
    index = json.loads((tmp_path / "saved" / "working" / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in working.values())
    assert not list((tmp_path / "saved").glob(".*")), "no unfinished file"
    files = sorted((tmp_path / "saved" / "working").glob("*.safetensors"))
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert [file.name for file in files] == names
    for file in files:
        with safe_open(file, "pt") as content:
            assert content.metadata() == content.metadata() | {"format": "pt", "step": "1"}
        values = load_file(file)
        assert sum(value.nbytes for value in values.values()) <= 4000 or len(values) == 1


def save_with_faults(tables: Tables, texts: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Returns the messages of saves that fail on one rank, and the names in the next save."""
    messages = []
    with running(tables, texts) as run:
        run.step()
        add = write.TensorFilesWriter.add

        def fill_disk(*_: object) -> None:
            raise OSError(28, "No space left on device", "disk")

        for case in ("strange", "disk", "file/sub", "offloaded"):
            if case == "disk" and run.world.rank == 1:
                write.TensorFilesWriter.add = fill_disk  # type: ignore[method-assign]
            if case == "offloaded" and run.world.rank == 1:
                run.memory.offload("weights").wait()
            with pytest.raises(RunError) as error:
                run.save_weights(folder / case)
            messages.append(error.value.diagnostics[0].message)
            write.TensorFilesWriter.add = add  # type: ignore[method-assign]
        run.memory.onload()
        run.save_weights(folder / "disk", precision="full")
        return messages, sorted(WeightFiles(folder / "disk").names)


def test_all_ranks_report_a_failed_save(ranks: Any, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "disk").mkdir()
    tables = changed(PLAN, parallel={"pp": 2}, pipeline={"use": "pp.one_f_one_b"}, offload=[{"use": "memory.everything"}])
    first, second = ranks(2, timeout_s=100)(save_with_faults, tables, texts, tmp_path)
    assert first == second
    (strange, disk, file, offloaded), names = first
    assert all(words in strange for words in ("rank 0", "`thesis.tex`, which is not a weight file"))
    assert "rank 1: cannot write `disk`: No space left on device" in disk
    assert "rank 0: cannot write" in file
    assert all(words in offloaded for words in ("rank 1: ", "saving weights"))
    assert (tmp_path / "strange" / "thesis.tex").read_text() == "years of work"
    assert "embed.tokens.weight" in names, "the next save succeeds"
    assert not list(tmp_path.glob(".*"))


def memory_growth(tables: Tables, texts: Path, folder: Path) -> tuple[int, int]:
    """Returns the bytes by which the memory of this rank grows while it saves, and the bytes of all weights."""

    def status(key: str) -> int:
        return 1024 * int(re.findall(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text("utf-8"))[0])

    with running(tables, texts) as run:
        run.save_weights(folder / "first")  # imports modules
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
        before = status("VmRSS")
        run.save_weights(folder / "second")
        return status("VmHWM") - before, run.num_parameters * 4


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not report peak memory")
def test_no_rank_gathers_all_weights(ranks: Any, texts: Path, tmp_path: Path) -> None:
    model = {"use": "models.llama", "num_layers": 6, "hidden": 384, "heads": 8, "ffn_hidden": 1536}
    wp = {"parallel": {"wp": 2}, "weights": ISP}
    tables = changed(PLAN, model=model, precision__compute="fp32", run__keep_freed_memory=False, **wp)
    for growth, total in ranks(2, timeout_s=100)(memory_growth, tables, texts, tmp_path):
        assert total > 56e6
        assert growth < 28e6, f"{growth / 1e6:.0f} MB, but the largest weight has 2.4"
