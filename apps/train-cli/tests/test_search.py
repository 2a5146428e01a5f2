"""`train-cli search`: layouts from what is installed, the fastest that fit, and the plan of the first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from sley_core.plan.load import load_plan
from sley_estimate.commands.estimate import shown
from sley_estimate.search import find
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import small_plan


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the best three layouts take their steps, which takes most of a search."""
    monkeypatch.setattr(find, "NUM_EXACT", 3)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    plan = small_plan(data=data, model__num_layers=4, batch={"global_size": 8, "micro_size": 1})
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(plan), "utf-8")
    (tmp_path / "machine.toml").write_text(tomli_w.dumps(small_machine()), "utf-8")
    return tmp_path


@pytest.fixture
def searched(cli: Callable[..., Any], given: Path) -> Callable[..., Any]:
    def search(*options: str) -> Any:
        return cli("search", given / "plan.toml", "--machine", given / "machine.toml", *options)

    return search


def rows_of(out: str) -> list[tuple[float, str]]:
    """The seconds of each layout that is shown, and its line."""
    return [(float(line.split()[0]), line) for line in out.splitlines() if " s  " in line and line.startswith("  ")]


def test_the_fastest_layout_is_written_as_a_plan_with_the_seconds_that_estimate_tells(
    cli: Callable[..., Any], searched: Callable[..., Any], given: Path
) -> None:
    best = given / "best.toml"
    kept = [word for axis in ("reducer", "schedule", "sp", "micro_size") for word in ("--keep", axis)]
    done = searched("--world", "4", "--write", str(best), "--top", "2", "--explain", *kept)
    assert done.code == 0, done.err
    before_front = done.out.split("less memory for more time")[0]
    seconds = [each for each, _ in rows_of(before_front)]
    assert seconds == sorted(seconds)
    assert len(seconds) == 2
    text = best.read_text("utf-8")
    plan, sizes = load_plan(best), load_plan(best).parallel
    assert f"pp {sizes.pp}, sp 1, wp {sizes.wp}, micro_size 1" in rows_of(done.out)[0][1]
    assert sizes.dp * sizes.pp == 4
    assert f"# search: pp = {sizes.pp}, sp = 1, wp = {sizes.wp}; dp follows\n[parallel]" in text
    assert f"# search: {plan.activations.name}\n[activations]" in text

    asked = cli("estimate", best, "--world", "4", "--machine", given / "machine.toml", "--format", "json")
    told = json.loads(asked.out)
    assert f"{told['seconds']['step']:.4g} s" in rows_of(done.out)[0][1]
    fullest = max(stage["peak"] for stage in told["stages"])
    assert f"{shown(fullest)}  pp" in rows_of(done.out)[0][1]

    compared = done.out.split("as it is")[1]
    assert "most bytes of a rank, in KiB" in compared
    parts = [line.rsplit(maxsplit=3) for line in compared.splitlines()[1:] if not line.startswith("written")]
    step = next(at for at, part in enumerate(parts) if part[0].strip().startswith("most bytes"))
    for column in (1, 2):
        for some in (parts[:step], parts[step:]):
            whole, *of = (float(part[column]) for part in some)
            assert sum(of) == pytest.approx(whole, rel=2e-3)


def test_a_layout_that_does_not_fit_by_its_own_steps_is_replaced_by_the_next(searched: Callable[..., Any]) -> None:
    """Bytes at a glance are a lower figure."""
    kept = [word for axis in ("pp", "sp", "wp", "micro_size") for word in ("--keep", axis)]
    glance = searched("--world", "2", "--top", "1", "--rough", *kept)
    exact = searched("--world", "2", "--top", "1", *kept)
    assert "fastest (rough)" in glance.out
    (little,), (much,) = (re.findall(r"([\d.]+) KiB", rows_of(done.out)[0][1]) for done in (glance, exact))
    assert float(little) < float(much)
    between = f"{(float(little) + float(much)) / 2 * 1024:.0f}B"
    tight = searched("--world", "2", "--top", "1", "--memory", between, *kept)
    assert re.search(r"\d+ that seemed to fit do not, as `estimate` says", tight.out), tight.out
    fits = rows_of(tight.out)[0][1]
    assert float(re.findall(r"([\d.]+) KiB", fits)[0]) * 1024 <= float(between.removesuffix("B"))


def test_a_search_says_how_many_layouts_its_budget_left_out(
    searched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "LEAST_EXACT", 1)
    done = searched("--world", "1", "--budget", "0", "--top", "1", "--keep", "micro_size")
    assert done.code == 0, done.err
    assert "more did not, since the time for it was over" in done.out
    assert "(verified by estimate)" in done.out


def test_what_cannot_fit_says_what_the_smallest_layout_needs(searched: Callable[..., Any]) -> None:
    done = searched("--world", "2", "--memory", "1B", "--keep", "pp", "--keep", "micro_size")
    assert done.code == 1
    assert "nothing fits into 1 B: the smallest layout found needs" in done.out


def test_without_a_machine_it_says_what_writes_one(cli: Callable[..., Any], given: Path) -> None:
    done = cli("search", given / "plan.toml", "--world", "2")
    assert done.code == 2
    assert "error[search-machine]" in done.err
    assert "`--machine machine.toml`" in done.err


def test_a_machine_file_of_cpus_without_overlap_is_noted_once_wherever_seconds_are_told(
    cli: Callable[..., Any], searched: Callable[..., Any], given: Path
) -> None:
    """All of an exchange was taken to run beside computing, without a word."""
    axes = ("pp", "sp", "wp", "micro_size", "reducer", "activations")
    options = ["--world", "2", "--top", "1", *(word for axis in axes for word in ("--keep", axis))]
    asked = (given / "plan.toml", "--world", "2", "--machine", given / "machine.toml")

    def times_noted(out: str) -> int:
        return out.count("says nothing of `overlap`")

    machine = small_machine(device__kind="cpu")
    (given / "machine.toml").write_text(tomli_w.dumps(machine), "utf-8")
    assert times_noted(searched(*options, "--rough").out) == 1
    assert times_noted(searched(*options).out) == 1
    assert times_noted(cli("estimate", *asked).out) == 1
    assert times_noted(cli("show", "--timeline", *asked).out) == 1
    machine["links"]["same_host"]["overlap"] = 0.5
    (given / "machine.toml").write_text(tomli_w.dumps(machine), "utf-8")
    assert times_noted(searched(*options, "--rough").out) == times_noted(cli("estimate", *asked).out) == 0


def test_an_axis_that_there_is_not_is_refused(searched: Callable[..., Any]) -> None:
    done = searched("--world", "2", "--keep", "tp")
    assert done.code == 2


def test_states_leave_the_device_where_a_layout_does_not_fit_with_them(searched: Callable[..., Any], given: Path) -> None:
    kept = [word for axis in ("pp", "sp", "wp", "micro_size", "reducer", "activations") for word in ("--keep", axis)]
    options = ("--world", "1", "--top", "1", "--rough", *kept)
    done = searched(*options, "--memory", "600KiB")
    assert "left out: machine-host: the machine file has no `[host]`" in done.out
    machine = small_machine(host={"to_host": 1e9, "to_device": 1e9, "memory_bandwidth": 1e10})
    (given / "machine.toml").write_text(tomli_w.dumps(machine), "utf-8")
    plan = given / "best.toml"
    (fast_s, fast), *_ = rows_of(searched(*options).out)
    assert "memory." not in fast
    (slow_s, slow), *_ = rows_of(searched(*options, "--memory", "600KiB", "--write", str(plan)).out)
    assert slow.endswith("; memory.host_optimizer")
    assert slow_s > fast_s
    assert [one.name for one in load_plan(plan).offload] == ["memory.host_optimizer"]
    assert "# search: memory.host_optimizer\n[[offload]]" in plan.read_text("utf-8")
    assert rows_of(searched(*options, "--memory", "500KiB", "--keep", "offload").out) == []


def test_data_that_are_not_there_end_a_search_before_it_begins(searched: Callable[..., Any], given: Path) -> None:
    """Each layout was verified, and left out for it."""
    refused = searched("--world", "2", "--set", 'data={use="data.text", files=["gone.txt"], sequence=24}')
    assert (refused.code, refused.out) == (3, "")
    assert f"error[data-missing]: there is no file `{given / 'gone.txt'}`" in refused.err
    assert "verifying" not in refused.err


def test_what_is_to_be_compared_is_asked_for_before_the_search(searched: Callable[..., Any], given: Path) -> None:
    """A plan of another world cannot be, and a search that is over would be lost."""
    plan = given / "plan.toml"
    plan.write_text(plan.read_text("utf-8") + "\n[parallel]\ndp = 2\n", "utf-8")
    best = given / "best.toml"
    refused = searched("--world", "4", "--explain", "--write", str(best))
    assert refused.code == 3
    assert "error[layout]" in refused.err
    assert "verifying" not in refused.err
    assert not best.exists()


def test_where_no_layout_is_left_it_says_what_to_do(searched: Callable[..., Any]) -> None:
    """A machine file whose ranks are all of one host does not know what goes on between two."""
    kept = [word for axis in ("activations", "offload") for word in ("--keep", axis)]
    done = searched("--world", "16", "--set", "batch.global_size=16", *kept)
    assert done.code == 1
    assert "left out: machine-links: " in done.out
    assert done.out.endswith("(hint: write its latency and bandwidth, or more `ranks_per_host`)\n")
