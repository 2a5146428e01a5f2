"""Tests each contract with the simplest correct part of its type, and with parts that have one bug each."""

import json
from collections.abc import Iterator
from hashlib import sha256
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sley_core.errors import RunError
from sley_testing.attention_contract import SequenceAttentionContract
from sley_testing.certify import CONTRACTS, certify, main
from sley_testing.contract import GradientHandlerContract
from sley_testing.data_contract import DatasetContract, LossContract
from sley_testing.hook_contract import MetricsWriterContract, Point, SchedulerHookContract
from sley_testing.optimizer_contract import LRScheduleContract
from sley_testing.state_contract import OffloadManagerContract
from sley_testing.weight_contract import WeightCommunicatorContract

pytestmark = pytest.mark.usefixtures("parts")


class JsonLinesContract(MetricsWriterContract):
    """Reads lines of JSON."""

    file = "numbers.txt"

    def read(self, folder: Path) -> Iterator[Point]:
        for line in (folder / self.file).read_text("utf-8").splitlines():
            if line.endswith("}"):  # the last line on a full disk does not
                row = json.loads(line)
                yield from ((row["step"], name, value) for name, value in row.items())


class MaskedLossContract(LossContract):
    """Provides six samples of four numbers, some of them masked."""

    def batch(self) -> tuple[Tensor, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(5)
        output, y = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
        return output, {"y": y, "mask": torch.rand(6, 4, generator=generator) > 0.3}

    def weightless_batch(self) -> dict[str, Tensor]:
        return {"y": torch.ones(6, 4), "mask": torch.zeros(6, 4, dtype=torch.bool)}


PART_TYPES: dict[str, tuple[type, str]] = {
    "handler": (GradientHandlerContract, "use"),
    "weights": (WeightCommunicatorContract, "use"),
    "sequence": (SequenceAttentionContract, "use"),
    "hook": (SchedulerHookContract, "use"),
    "offload": (OffloadManagerContract, "use"),
    "learning_rate": (LRScheduleContract, "use"),
    "writer": (JsonLinesContract, "use"),
    "loss": (MaskedLossContract, "factory"),
    "data": (DatasetContract, "factory"),
}
"""By the attribute that takes the table of a part: its contract, and the key of the table that names the part."""


def contract_of(part_type: str, name: str) -> type:
    """Returns the contract of a part of `own`, as a class of tests."""
    contract, key = PART_TYPES[part_type]
    value = f"parts.{part_type}_{name.lower()}" if key == "use" else f"parts_{part_type}:{name}"
    return type("TestPart", (contract,), {part_type: {key: value}, "holds_out": True})


# The tests below, or those of other packages, run the contracts other than that of hooks.
for part_type in PART_TYPES:
    contract = contract_of(part_type, "Naive")
    globals()[f"TestNaive_{part_type}"] = contract if part_type == "hook" else pytest.mark.campaign(contract)
TestHalves = pytest.mark.campaign(contract_of("handler", "Halves"))
TestStream = contract_of("data", "Stream")

REDUCTION, BITS = "reduction_matches_record", "gradients_are_deterministic_and_equal_on_all_ranks"
LAYOUTS, SLICES = "layouts_match_unsharded_weights", "slice_results_equal_full_attention"
UNCHANGED, ROUND_TRIP = "hook_changes_nothing", "round_trip_preserves_all_bits"
WRITTEN, CLOSED_RUN = "rows_are_on_disk_after_write_and_close", "exchanges_counts_reads_and_closed_run"
COLLECTIVES = "ranks_issue_same_collectives_once_per_step"

# By type of part: its name, the failing test, a part of the message, and the test's arguments other than fixtures.
BUGS_IN_RUNS: dict[str, list[tuple[Any, ...]]] = {
    "handler": [
        ("World", REDUCTION, r"differ by more than 1e-12, the worst first\n  first\.", 1),
        ("Early", REDUCTION, "differ by more than 1e-12", 3),
        ("Coarse", REDUCTION, "1 of 1 differ by more than 0.0156", 1),
        ("Chatty", COLLECTIVES, "a step of one microbatch has .* collectives, a step of three"),
        ("Noisy", BITS, "step 1: grad_norm is .*, not "),
        ("Rounded", BITS, "differ\n  second"),
        ("Hoards", "failed_backward_leaves_no_state", "step 3: grad_norm is .*, not "),
        ("Watches", REDUCTION, "a handler must not install autograd hooks", 1),
    ],
    "weights": [
        ("Mean", LAYOUTS, r"differ.*\n  (first|second)\.(often|wide|narrow|q|kv|out)\.weight", 2, 2, 2),
        ("Cached", "changes_between_steps_take_effect", r"rank 0, step .: loss .*, not "),
        ("Eager", "layer_calls_wait_for_weights", "step 2: loss is .*, not "),
        ("Hoards", "failed_step_leaves_no_state", "step .: .* is .*, not "),
        ("Patched", CLOSED_RUN, "embed returns a result after the run"),
        ("Shards", CLOSED_RUN, r"first.often.weight reads as \[3, 6\], which is not the full weight"),
    ],
    "sequence": [
        ("Local", SLICES, r"\(4, 4, False\): the relative error of the context or gradients of a slice is "),
        ("Patched", SLICES, "does not restore attention over whole sequences"),
        ("Unsummed", "runs_match_one_process", r"kv\.weight"),
        ("Silent", "model_without_attention_is_refused", "DID NOT RAISE"),
    ],
    "hook": [
        ("Scales", UNCHANGED, "step 1: loss is .*, not "),
        ("Hooked", UNCHANGED, "_forward_hooks"),
        ("Unbalanced", "failed_step_leaves_no_state", "step 2: .* is .*, not "),
        ("Differs", UNCHANGED, r"the order on control\[0,1\] is not the same on all ranks"),
        ("Keeps", UNCHANGED, r"after step 1 the hook keeps tensors with their graph: \["),
        ("Asked", UNCHANGED, "counts change between two calls"),
    ],
    "offload": [
        ("Careless", ROUND_TRIP, "is resized while copy .* may be in flight: `make_device_wait` is missing"),
        ("Skips", ROUND_TRIP, "differ\n  weights"),
        ("Half", ROUND_TRIP, "weights are offloaded, but .* bytes of them are still on the device"),
        ("Open", "use_of_offloaded_part_is_refused", "its memory was freed"),
        ("Twice", "manager_reports_its_moves", "weights: a second offload copies .* bytes"),
        ("Stays", "run_closes_while_memory_is_offloaded", "after the run these weights have no memory: "),
        ("Silent", "manager_reports_its_moves", "weights had .* bytes, but 0 are reported as given back"),
    ],
}
BUGS: dict[str, list[tuple[Any, ...]]] = {
    "hook": [
        ("Asks", "hook_accepts_actions_without_tensors", "before_backward in phase weights, called with None: AttributeError")
    ],
    "learning_rate": [
        ("counting", "rate_depends_only_on_step", "a resumed run would have different rates"),
        ("negative", "every_step_has_finite_rate", "the factor of step 101 must not be negative, but is -0.01"),
        ("nothing", "every_step_has_finite_rate", "no step of the run has a rate above 0"),
        ("short", "short_run_has_rates_or_is_refused", "with run.steps = 1: ZeroDivisionError", 1),
    ],
    "writer": [
        ("Begins", "reopened_folder_keeps_rows", r"missing: \[\(1, 'loss'\), \(2, 'loss'\)\]"),
        ("First", "rows_with_different_names", r"missing: \[\(2, 'held_out_loss'\), \(2, 'tokens'\), \(3, 'held_out/web text"),
        ("Integers", "rows_with_different_names", r"\(1, 'loss'\) is 2, not 2.5"),
        ("Late", WRITTEN, r"a run that is killed after `write` would leave \[\]"),
        ("Deaf", "repeated_steps_are_written_once", "loss of step 2 is written more than once"),
        ("Once", WRITTEN, "a second close raises AttributeError"),
        ("Mute", "full_disk_is_an_error", "of 512 rows are written, but neither write nor close raises an error"),
        ("Strict", "non_finite_numbers_hide_no_others", r"\(1, 'lr'\) is None, next to a number that is not finite"),
    ],
    "loss": [
        ("Mean", "loss_is_sum_over_samples", "a mean is not a sum"),
        ("Calls", "weight_is_sum_over_microbatches", "the weight of a batch is 1, but its microbatches of 1 weigh 6"),
        ("Narrow", "sum_is_at_least_fp32", "the loss of a torch.bfloat16 output is torch.bfloat16", torch.bfloat16),
        ("Twice", "gradient_matches_finite_differences", "the gradient is not the derivative of the loss"),
        ("Keeps", "call_keeps_no_state", "the loss keeps the model's output"),
        ("Running", "call_keeps_no_state", "weight and loss of a batch are .* after another batch"),
        ("Writes", "call_keeps_no_state", "the loss writes to the model's output"),
        ("Fields", "loss_reads_only_its_fields", "reads the field 'mask', which is not among its `fields`"),
        ("Detached", "loss_is_sum_over_samples", "does not depend on the model's output"),
        ("Empty", "batch_without_weight", "a batch of ignored labels has the weight 1"),
    ],
    "data": [
        ("Draws", "default_generator_is_unchanged", "draws from or seeds torch's default generator"),
        ("Fresh", "index_returns_same_sample", "sample 29 differs when it is read again"),
        ("Counted", "index_returns_same_sample", "sample 0 differs on another rank"),
        ("Counted", "ranks_split_each_batch", "batch 0: the tensors of two ranks differ from those of one process"),
        ("Reuses", "samples_do_not_share_memory", "sample 0 changes while other samples are read"),
        ("Wider", "samples_match_info", "the field `tokens` has 5 positions, but 4 are declared"),
        ("Leaks", "held_out_samples_are_not_trained_on", "the held-out sample 0 is also a training sample"),
        ("Restarts", "restart_resumes_position", "a run that resumes after batch 4 has a different batch 4"),
    ],
}


def call_test(request: pytest.FixtureRequest, part_type: str, name: str, test: str, arguments: list[Any]) -> None:
    """Calls one test of a part's contract with its fixtures. arguments: the test's other arguments in order."""
    method, remaining = getattr(contract_of(part_type, name)(), f"test_{test}"), iter(arguments)
    values = {}
    for parameter in signature(method).parameters:
        if parameter in ("ranks", "texts", "tmp_path", "folder"):
            values[parameter] = request.getfixturevalue("tmp_path" if parameter == "folder" else parameter)
        else:
            values[parameter] = next(remaining)
    method(**values)


def cases(bugs: dict[str, list[tuple[Any, ...]]]) -> Iterator[Any]:
    for part_type, rows in bugs.items():
        for name, test, message, *arguments in rows:
            yield pytest.param(part_type, name, test, message, arguments, id=f"{part_type}: {name}, {test}")


@pytest.mark.parametrize(("part_type", "name", "test", "message", "arguments"), [*cases(BUGS)])
def test_bug_is_reported(request: Any, part_type: str, name: str, test: str, message: str, arguments: list[Any]) -> None:
    with pytest.raises((AssertionError, RunError), match=f"(?s){message}"):
        call_test(request, part_type, name, test, arguments)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("part_type", "name", "test", "message", "arguments"), [*cases(BUGS_IN_RUNS)])
def test_bug_in_a_run_is_reported(
    request: Any, part_type: str, name: str, test: str, message: str, arguments: list[Any]
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match=f"(?s){message}"):
        call_test(request, part_type, name, test, arguments)


def test_verdicts_on_a_distribution(install_plugins: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("learning_rate_naive", "learning_rate_counting", "writer_naive")
    text = f"import parts_plugin as p\nsley_records = p.hookimpl(lambda: [r for r in p.sley_records() if r.name in {names}])\n"
    (tmp_path / "few_plugin.py").write_text(text)
    install_plugins(tmp_path, few="few_plugin")
    verdicts = {verdict.record: (verdict.status, verdict.reason) for verdict in certify("sley-few")}
    assert [verdicts[name][0] for name in names] == ["passed", "failed", "skipped"]
    assert verdicts[names[1]][1].startswith("test_rate_depends_only_on_step: AssertionError: the factor of step 99")
    install_plugins(tmp_path, gone="no_such_module")
    assert main("sley-gone") == 1
    assert capsys.readouterr().out.startswith("failed   gone: does not load: ")
    for module, contract, attribute in CONTRACTS.values():
        assert attribute in getattr(import_module(f"sley_testing.{module}"), contract).__annotations__


# -- parts of core and data --------------------------------------------------------------------------------------------


class TestJsonl(JsonLinesContract):
    writer: ClassVar[dict[str, Any]] = {"use": "core.jsonl"}
    file = "metrics.jsonl"


class TestText(DatasetContract):
    data: ClassVar[dict[str, Any]] = {
        "use": "data.text",
        "files": ["*.txt"],
        "sequence": 8,
        "separator": "\n\n",
        "held_out": 0.3,
    }
    holds_out = True

    def write_files(self, folder: Path) -> None:
        (folder / "a.txt").write_text("\n\n".join(sha256(bytes([index])).hexdigest() for index in range(12)), "utf-8")


class TestCosine(LRScheduleContract):
    learning_rate: ClassVar[dict[str, Any]] = {"use": "core.cosine", "warmup_steps": 10}


class TestWarmupStableDecay(LRScheduleContract):
    learning_rate: ClassVar[dict[str, Any]] = {"use": "core.warmup_stable_decay", "warmup_steps": 10}
