"""Tests `train-cli search`: the fastest layouts of the installed plugins, and the written plan."""

import json
import random
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from started_program import Cli

from sley_core.errors import SleyError
from sley_core.plan.load import load_plan, plan_from_dict
from sley_estimate.machine import machine_from_dict
from sley_estimate.search import find as finding
from sley_estimate.search.find import search_layouts
from sley_estimate.search.layouts import Layouts, list_choices
from sley_estimate.step.estimate import estimate_plan
from sley_estimate.testing import small_machine
from sley_testing.plans import small_plan, write_texts
from train_cli.console import format_bytes
from train_cli.environment import num_cores


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifies only two layouts, since this takes most of the time of a search."""
    monkeypatch.setattr(finding, "NUM_VERIFIED", 2)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    write_texts(tmp_path)
    plan = small_plan(model__num_layers=2, batch={"global_size": 4, "micro_size": 1})
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(plan), "utf-8")
    (tmp_path / "machine.toml").write_text(tomli_w.dumps(small_machine()), "utf-8")
    return tmp_path


@pytest.fixture
def searched(cli: Cli, given: Path) -> Cli:
    return partial(cli, "search", given / "plan.toml", "--machine", given / "machine.toml")


def rows_of(out: str) -> list[tuple[float, str]]:
    """Returns the seconds and the line of each printed layout."""
    return [(float(line.split()[0]), line) for line in out.splitlines() if " s  " in line and line.startswith("  ")]


def test_fastest_layout_is_written_and_equals_estimate(cli: Cli, searched: Cli, given: Path) -> None:
    best = given / "best.toml"
    kept = [word for axis in ("reducer", "schedule", "sp", "micro_size", "activations") for word in ("--keep", axis)]
    done = searched("--world", "2", "--write", str(best), "--top", "2", *kept).expect(0)
    (first_s, first), (second_s, _) = rows_of(done.out)
    assert first_s <= second_s
    text = best.read_text("utf-8")
    plan, sizes = load_plan(best), load_plan(best).parallel
    assert f"pp {sizes.pp}, sp 1, wp {sizes.wp}, micro_size 1" in first
    assert sizes.dp * sizes.pp == 2
    assert f"# pp {sizes.pp}, sp 1, wp {sizes.wp}, micro_size 1; " in text
    assert plan.activations.name in text.splitlines()[1]

    estimate = cli("estimate", best, "--world", "2", "--machine", given / "machine.toml", "--format", "json")
    report = json.loads(estimate.out)
    assert f"{report['seconds']['step']:.4g} s" in first
    assert f"{format_bytes(max(stage['peak'] for stage in report['stages']))}  pp" in first


def test_smallest_layout_is_reported_if_none_fits(searched: Cli) -> None:
    out = searched("--world", "2", "--memory", "1B", "--keep", "pp", "--keep", "micro_size").expect(1).out
    assert "no layout fits in 0 KiB: the smallest layout needs" in out


def test_missing_inputs_are_reported_before_the_search(cli: Cli, searched: Cli, given: Path) -> None:
    cli("search", given / "plan.toml", "--world", "2").expect(2, "error[search-machine]", "`--machine machine.toml`")
    refused = searched("--world", "2", "--set", 'data={use="data.text", files=["gone.txt"], sequence=24}')
    assert (refused.code, refused.out) == (3, "")
    assert f"error[data-missing]: the file `{given / 'gone.txt'}` does not exist" in refused.err


WORLD = 4


def draw_plan_and_machine(seed: int) -> tuple[Any, Any]:
    """Returns a random plan and a random machine."""
    rng = random.Random(seed)
    heads, hidden = rng.choice([2, 4]), rng.choice([64, 128, 256])
    model = {"use": "models.llama", "num_layers": rng.randint(3, 8), "hidden": hidden, "heads": heads}
    plan = small_plan(
        data={"use": "data.text", "source": "python-stdlib", "sequence": rng.choice([64, 128])},
        model={**model, "kv_heads": heads, "ffn_hidden": 2 * hidden, "tie_embeddings": rng.random() < 0.3},
        batch={"global_size": rng.choice([8, 16]), "micro_size": 1},
        precision={"compute": "fp32"},
        run__device="cuda",
    )
    link = {"latency_s": 10 ** rng.uniform(-6, -4), "bandwidth": 10 ** rng.uniform(8, 11)}
    host = {"to_host": 1e10, "to_device": 1e10, "memory_bandwidth": 1e10}
    machine = small_machine(links__same_host=link, device__launch_s=10 ** rng.uniform(-8, -5), host=host)
    return plan_from_dict(plan), machine_from_dict(machine)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_search_finds_nearly_fastest_layout(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "NUM_VERIFIED", 10)
    plan, machine = draw_plan_and_machine(seed)
    kept = random.Random(seed).sample(["activations", "micro_size", "pp", "reducer", "schedule", "sp"], 3)
    space = Layouts(plan, WORLD, list_choices(plan), kept)
    result = search_layouts(space, machine, top=1, cores=num_cores())  # first, since it cannot fork after a backward
    estimates = []
    for layout in space.all_layouts():
        with suppress(SleyError):
            estimates.append((estimate_plan(layout.apply(plan, WORLD), WORLD, machine).step.seconds, str(layout)))
    best, chosen = min(estimates), result.fastest_layouts[0]
    regret = chosen.seconds / best[0] - 1
    print(f"seed {seed}: {len(estimates)} layouts, regret {regret:.2%}; {chosen.layout}, and the fastest is {best[1]}")
    assert regret <= 0.02
