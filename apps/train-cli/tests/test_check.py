"""`check`, and `run` before a rank starts, print one diagnostic at the place of a mistake, and write nothing."""

import dataclasses
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from started_program import Cli

from sley_core.data.batches import SequenceSlicer, collate_function, open_dataset
from sley_core.data.dataset import DataContext
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan
from train_cli.meta_model import meta_micro_batch

Refused = Callable[..., None]
Own = Callable[[str], Path]


@pytest.fixture
def refused(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, no_children: None) -> Refused:
    """`refused(path, code, at)` checks that `run` or `check` prints one diagnostic, with its caret at the text `at`."""
    monkeypatch.setattr("train_cli.local_launch.launch", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def refuse(path: Path, code: str, at: str | None, *options: str, command: str = "run") -> None:
        before = files(folder)
        result = cli(command, path, *options)
        assert (result.code, result.out, result.err.count("\n")) == (3, "", 1), result.err
        place = re.match(r"((?P<file>.*?):((?P<line>\d+):(?P<column>\d+):)? )?error\[(?P<code>.*?)]: ", result.err)
        assert place is not None
        assert place["code"] == code, result.err
        text = place["file"]
        if place["line"]:
            text = path.read_bytes().decode("utf-8", "replace").splitlines()[int(place["line"]) - 1][int(place["column"]) - 1 :]
        assert text is None if at is None else text.startswith(at), result.err
        assert files(folder) == before

    return refuse


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def replace(plan: Path, old: str, new: str) -> None:
    text = plan.read_text("utf-8")
    assert old in text
    plan.write_text(text.replace(old, new), "utf-8")


EDITS = {
    "syntax error": ("steps = 4", "steps = = 4", "syntax", "= 4"),
    "unknown key of a record": ("hidden =", "hiden = 3\nhidden =", "unknown-key", "hiden"),
    "stages without a schedule": ("dp = 2", "dp = 2\npp = 2", "pipeline-missing", "2"),
    "data file empty": ("corpus.txt", "empty.txt", "data-empty", '"empty.txt"'),
}
"""The old and new text of the plan, the code, and the text at the caret."""


@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_plan(plan: Path, folder: Path, refused: Refused, name: str) -> None:
    old, new, code, at = EDITS[name]
    (folder / "empty.txt").touch()
    replace(plan, old, new)
    for command in ("run", "check"):
        refused(plan, code, at, command=command)


def test_errors_name_the_option(plan: Path, refused: Refused) -> None:
    refused(plan, "layout", "2", "--nproc", "3")
    refused(plan, "layout", "2", "--world", "3", command="check")
    refused(plan, "unknown-key", "--set #2", "--set", "run.seed=3", "--set", "run.sed=3")


# -- the user's code, and the run's folder -----------------------------------------------------------------------------

HELD = """
from torch import nn

def layers():
    table = nn.Embedding(256, 256)
    table.held = [table.weight]
    return [table]
"""


@pytest.mark.parametrize(
    ("source", "code", "at"),
    [
        ("import nothing_of_this_name", "factory-import", '"own:layers"'),
        ("def layers(): return 42", "model-factory", "[model]"),
        (HELD, "model-init", "[model]"),
    ],
    ids=["not importable", "no layers", "held unregistered"],
)
def test_a_wrong_factory(own_model: Own, refused: Refused, source: str, code: str, at: str) -> None:
    refused(own_model(source), code, at)


@pytest.mark.parametrize("mode", [None, pytest.param(0o500, marks=pytest.mark.skipif(os.geteuid() == 0, reason="root"))])
def test_a_run_folder_that_cannot_be_written(plan: Path, folder: Path, refused: Refused, mode: int | None) -> None:
    (folder / "runs").touch() if mode is None else (folder / "runs").mkdir(mode=mode)
    refused(plan, "run-folder", "[run]")


# -- check -------------------------------------------------------------------------------------------------------------

PIPELINE = ("parallel.dp=1", "parallel.pp=2", 'pipeline.use="pp.gpipe"')


def test_all_plans_are_checked(cli: Cli, plan: Path, folder: Path) -> None:
    text = plan.read_text("utf-8")
    (folder / "first.toml").write_text(text.replace("steps = 4", "steps = 0"), "utf-8")
    (folder / "second.toml").write_text(text.replace("core.adamw", "nobody.knows"), "utf-8")
    result = cli("check", "first.toml", plan, "second.toml")
    first, second, count = result.err.splitlines()
    assert first.startswith("first.toml:5:9: error[out-of-range]")
    assert second.startswith("second.toml:25:7: error[plugin-unknown]")
    assert (count, result.code) == ("found 2 errors", 4)
    result = cli("check", plan, plan)
    assert (result.code, result.err) == (0, "2 plans are valid; no model was built (use --model)\n")


@pytest.mark.parametrize(
    ("key", "hint"), [("epochs = 3", "set `run.steps`; the run prints"), ("resume = true", "use `[checkpoint]` to save a run")]
)
def test_a_key_of_another_program_has_a_hint(cli: Cli, plan: Path, key: str, hint: str) -> None:
    replace(plan, "steps = 4", f"steps = 4\n{key}")
    cli("check", plan).expect(3, f"(hint: {hint}")


TIED_LAYERS = """
    from torch import nn
    from sley_testing.habits import Embed

    def layers(data):
        embed, head = Embed(data.vocab_size, 8), nn.Linear(8, data.vocab_size, bias=False)
        head.weight = embed.weight
        return [("embed", embed), ("middle", nn.Linear(8, 8)), ("head", head)]
"""


def test_a_tie_without_a_handler_is_refused(cli: Cli, own_model: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` without `--model` prints that ties were not checked."""
    path = own_model(TIED_LAYERS)
    without_handler = (*PIPELINE, "gradient_handlers=[]")
    monkeypatch.setattr("train_cli.local_launch.launch", lambda *_, **__: pytest.fail("ranks were started"))
    cli("check", path, changes=without_handler).expect(0, "use --model to find such weights")
    assert "use --model to find" not in cli("check", path, changes=PIPELINE).err
    for arguments in (("check", path, "--model"), ("run", path)):
        result = cli(*arguments, changes=without_handler)
        assert (result.code, result.err.count("error[handler-missing]")) == (3, 1), result.err
    assert not list(path.parent.glob("runs/*"))


LAYERS = """
    import numpy, torch
    from torch import nn
    from sley_core.api.model import Model
    from sley_testing.habits import Embed

    class Pair(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden), hidden

    class Longer(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden).repeat(1, 2, 1)

    class Picks(nn.Linear):
        def forward(self, hidden):
            {picks}
            return super().forward(hidden)

    class Counted:
        def weight(self, batch):
            self.count = 3.0
            return float(batch["labels"].numel())

        def loss(self, output, batch):
            return output.flatten(0, 1)[:, 0].sum() {loss}

    def loss():
        return Counted()

    def layers():
        return [("embed", Embed(256, 32)), {more}]
"""

ONE = ("parallel.dp=1", "run.steps=1")
HEAD = '("head", nn.Linear(32, 256))'


def layers(more: str, picks: str = "pass", loss: str = "") -> str:
    return LAYERS.format(more=more, picks=picks, loss=loss)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            f'("up", nn.Linear(32, 64)), {HEAD}',
            "error[layer-fails]: layer `head` (Linear) fails when called with inputs (FORMAT [1, 16, 64]): ",
        ),
        (
            f'("pair", Pair(32, 32)), {HEAD}',
            "error[layer-fails]: layer `head` (Linear) fails when called with inputs (tuple): TypeError: ",
        ),
        (
            '("head", nn.Linear(32, 8))',
            "error[label-out-of-range]: labels must be classes from 0 to 7, but the field `labels` has",
        ),
        ('("head", Longer(32, 256))', "error[loss-output]: logits of shape [1, 32, 256]"),
        ('("head", Pair(32, 256))', "error[loss-output]: cross-entropy needs a tensor of logits"),
    ],
)
@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_errors_name_layers_that_do_not_fit(cli: Cli, own_model: Own, more: str, message: str, form: str) -> None:
    changes = ("parallel.dp=1",) if form == "float32" else ("parallel.dp=2", 'precision.compute="bf16"')
    result = cli("check", own_model(layers(more)), "--model", changes=changes).expect(3)
    assert message.replace("FORMAT", form) in result.err


def test_errors_name_layers_whose_output_cannot_be_sent(cli: Cli, own_model: Own) -> None:
    path = own_model(layers(f'("picks", Picks(32, 32)), {HEAD}', "return super().forward(hidden), 3"))
    message = "error[boundary-type]: the output of the layer 'picks' contains a value of type int"
    cli("check", path, "--model", changes=PIPELINE).expect(3, message)
    message = "error[layer-fails]: layer `head` (Linear) fails when called with inputs (tuple)"
    cli("check", path, "--model", changes=ONE).expect(3, message)


@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ('nn.BatchNorm1d(16), nn.BatchNorm1d(16), ("picks", Picks(32, 256))', True),
        ("nn.BatchNorm1d(16).eval(), nn.Linear(32, 256)", False),
        ('nn.BatchNorm1d(16), nn.Linear(32, 256)], per_rank_buffers=["*.running_*", "*.num_batches_tracked"', False),
    ],
)
def test_running_statistics_are_one_error(cli: Cli, own_model: Own, more: str, is_refused: bool) -> None:
    source = layers(more, "hidden.sum().item()").replace("return [", "return Model([").rstrip() + ")"
    result = cli("check", own_model(source), "--model", changes=ONE)
    assert (result.code, result.err.count("error[model-buffer-written]")) == ((3, 1) if is_refused else (0, 0)), result.err


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "picks",
    [
        "assert (hidden == hidden).all()",
        "hidden.detach().tolist()",
        "numpy.asarray(hidden.detach())",
        "assert hidden.data_ptr(), 'a kernel would be given nothing'",
        "hidden = {'cpu': hidden}[hidden.device.type]",
        "if hidden.is_meta: raise ValueError('Pointer argument cannot be accessed from Triton')",
    ],
)
def test_a_forward_that_needs_values_is_not_checked(cli: Cli, own_model: Own, picks: str) -> None:
    path = own_model(layers(f'("picks", Picks(32, 32)), {HEAD}', picks))
    cli("check", path, "--model", changes=ONE).expect(
        0,
        "layers were called only up to layer `picks` (Picks), which cannot run on meta",
        "to create the model's initial values, each rank temporarily needs ",
    )
    assert cli("run", path, changes=ONE).code == 0


@pytest.mark.parametrize(
    ("loss", "code", "message"),
    [("* self.count", 0, "the loss was not checked"), ("@ output", 3, "loss-fails"), (".reshape(1)", 3, "loss-shape")],
)
def test_an_own_loss_is_called(cli: Cli, own_model: Own, loss: str, code: int, message: str) -> None:
    changes = (*ONE, 'loss={factory="own:loss"}')
    cli("check", own_model(layers(HEAD, loss=loss)), "--model", changes=changes).expect(code, message)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_all_layers_run_on_meta(cli: Cli, plan: Path, own_model: Own) -> None:
    """Functions that a model compiles run uncompiled, also in estimates: the compiler fails without values."""
    assert "called" not in cli("check", plan, "--model").expect(0).err
    source = layers(f'("picks", Picks(32, 32)), {HEAD}', "hidden = twice(hidden)")
    compiled = own_model(source + "\n    twice = torch.compile(lambda hidden: hidden * 2)")
    assert "called" not in cli("check", compiled, "--model", changes=PIPELINE).expect(0).err
    cli("estimate", compiled, "--memory", "1GiB", changes=PIPELINE).expect(0)


def test_the_share_of_sharded_parameters_is_printed(cli: Cli, own_model: Own) -> None:
    """Also parameters of other modules than linears; those of less than a page are not sharded."""
    path = own_model(layers('Picks(32, 32), ("head", Picks(32, 256))'))
    result = cli("check", path, "--model", changes=("parallel.wp=2", 'weights.use="isp.communicator"'))
    numels = {"embed": 256 * 32, "1.weight": 32 * 32, "1.bias": 32, "head.weight": 32 * 256, "head.bias": 256}
    share = 1 - (numels["1.bias"] + numels["head.bias"]) / sum(numels.values())
    assert (result.code, f"shards {share:.2%} of the parameters" in result.err) == (0, True), result.err
    assert "`head.bias` with 256 elements" in result.err


TEXT = small_plan(data__sequence=12)["data"]


def formats(batch: Any) -> dict[str, tuple[torch.dtype, list[int]]]:
    return {name: (value.dtype, list(value.shape)) for name, value in batch.items()}


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("documents", ["cut", "pack", "pad", None])
def test_a_meta_batch_equals_the_batch_of_a_run(texts: Path, documents: str | None, sp: int) -> None:
    """The boundaries on meta are those of one document."""
    data = TEXT | {"documents": documents} if documents else {"factory": "drawn_model:Rows"}
    plan = plan_from_dict(small_plan(batch__micro_size=2, data=data), texts)
    plan = dataclasses.replace(plan, parallel=plan.parallel.model_copy(update={"sp": sp}))
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    indexed: Any = dataset
    full = collate_function(dataset)([indexed[0], indexed[1]])
    expected = formats(SequenceSlicer(dataset.info.fields, sp, 0)(full))
    batch = meta_micro_batch(plan, dataset)
    assert all(value.is_meta for value in batch.values())
    actual = formats(batch)
    if "cu_seqlens" in expected:
        assert actual.pop("cu_seqlens") == (torch.int32, [2, 2])
        dtype, (size, _) = expected.pop("cu_seqlens")
        assert (dtype, size) == (torch.int32, 2)
    assert actual == expected


# -- mistakes that only a run finds ------------------------------------------------------------------------------------

OWN_DATA = """
    import torch
    from torch import nn

    class Data:
        def __len__(self):
            return {length}

        def __getitem__(self, index):
            sample = {{"input": torch.zeros(8, dtype=torch.int64), "labels": torch.ones(8, dtype=torch.int64)}}
            {action}
            return sample

    def layers():
        return [nn.Embedding(256, 256)]
"""
FIELDS = '[data]\nfactory = "own:Data"\nfields.input = {dtype = "int64"}\nfields.labels = {dtype = "int64"}\n'
MISTAKES: dict[str, tuple[str, str]] = {
    "wrong shapes": (
        layers(f'("up", nn.Linear(32, 64)), {HEAD}'),
        "(16x64 and 32x256) in layer `head` (Linear) in microbatch 0, called with float32 [1, 16, 64]",
    ),
    "too few classes": (layers('("head", nn.Linear(32, 8))'), "labels must be classes from 0 to 7"),
    "None as a sample": (OWN_DATA.format(length=8, action="return None"), "is a NoneType, not a dict of tensors"),
    "a negative length": (OWN_DATA.format(length=-8, action="pass"), "the length of `own:Data` failed: ValueError: "),
    "SystemExit": (OWN_DATA.format(length=8, action="raise SystemExit(7)"), "of the dataset failed: SystemExit: 7"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_model_or_in_data_is_one_line(cli: Cli, own_model: Callable[..., Path], mistake: str) -> None:
    source, message = MISTAKES[mistake]
    path = own_model(source, data=FIELDS) if "class Data" in source else own_model(source)
    result = cli("run", path, "--set", "parallel.dp=1")
    assert result.code in (1, 3), result.err
    (line,) = [line for line in result.err.splitlines() if "error[" in line]
    assert "bug in Sley" not in line
    assert message in line


def test_a_step_with_too_many_actions_is_refused(cli: Cli, plan: Path) -> None:
    for change in ("batch.global_size=1000000", "parallel.pp=1000000"):
        cli("check", plan, changes=(*PIPELINE, change)).expect(3, "error[schedule-too-long]: a step must have at most")
