"""`check`: what it says of good plans and of bad ones, with and without their model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]


def test_a_good_plan_gets_one_line(cli: Cli, plan: Path) -> None:
    result = cli("check", plan)
    assert (result.code, result.out, result.err) == (0, "", "1 plan is fine; no model was built (--model builds it)\n")


def test_several_plans_are_checked_to_the_end(cli: Cli, plan: Path, folder: Path) -> None:
    text = plan.read_text("utf-8")
    (folder / "one.toml").write_text(text.replace("steps = 4", "steps = 0"), "utf-8")
    (folder / "two.toml").write_text(text.replace("core.adamw", "nobody.knows"), "utf-8")
    result = cli("check", "one.toml", plan, "two.toml")
    first, second, count = result.err.splitlines()
    assert first.startswith("one.toml:5:9: error[out-of-range]")
    assert second.startswith("two.toml:25:7: error[plugin-unknown]")
    assert count == "found 2 errors"
    assert result.code == 4
    assert cli("check", plan, plan).err == "2 plans are fine; no model was built (--model builds it)\n"


def test_check_of_another_world(cli: Cli, plan: Path) -> None:
    plan.write_text(plan.read_text("utf-8").replace("dp = 2", 'dp = "auto"'), "utf-8")
    assert cli("check", plan, "--world", "4").code == 0
    assert "batch-does-not-divide" in cli("check", plan, "--world", "3").err


def test_check_of_the_model(cli: Cli, own_model: Callable[[str], Path]) -> None:
    path = own_model("def layers(): return []")
    assert cli("check", path).code == 0
    result = cli("check", path, "--model")
    assert result.code == 3
    assert "error[model-factory]" in result.err


SHARES_A_WEIGHT = """
    from torch import nn

    class Embed(nn.Embedding):
        def forward(self, tokens):
            return super().forward(tokens)

    def layers(data):
        embed, head = Embed(data.vocab_size, 8), nn.Linear(8, data.vocab_size, bias=False)
        head.weight = embed.weight
        return [("embed", embed), ("middle", nn.Linear(8, 8)), ("head", head)]
"""


def test_a_weight_that_stages_share_and_nobody_sums(
    cli: Cli, own_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the model `check` says that it did not look; with it, and in `run` before a rank starts, it is refused."""
    path = own_model(SHARES_A_WEIGHT)
    pipeline = ["--set", "parallel.dp=1", "--set", "parallel.pp=2", "--set", 'pipeline.use="pp.gpipe"']
    unsummed = [*pipeline, "--set", "gradient_handlers=[]"]
    monkeypatch.setattr("train_cli.local_launch.launch", lambda *_, **__: pytest.fail("ranks were started"))
    plain = cli("check", path, *unsummed)
    assert plain.code == 0
    assert "only --model sees whether there are any" in plain.err
    assert "only --model sees" not in cli("check", path, *pipeline).err
    for arguments in (("check", path, "--model"), ("run", path)):
        result = cli(*arguments, *unsummed)
        assert (result.code, result.err.count("error[handler-missing]")) == (3, 1), result.err
        assert "stages [0, 1] share a parameter" in result.err
    assert not list(path.parent.glob("runs/*"))


PASSES_A_NUMBER = """
    from torch import nn

    class Embed(nn.Embedding):
        def forward(self, tokens):
            return super().forward(tokens)

    class Counts(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden), {"times": self.times}

        times = 3

    class Head(nn.Linear):
        def forward(self, state):
            return super().forward(state[0])

    def layers(data):
        return [("embed", Embed(data.vocab_size, 8)), ("counts", Counts(8, 8)), ("head", Head(8, data.vocab_size))]
"""


@pytest.mark.parametrize(("parts", "code"), [("[2, 1]", 3), ("[1, 2]", 0)])
def test_check_of_what_crosses_between_stages(cli: Cli, own_model: Callable[[str], Path], parts: str, code: int) -> None:
    """A number between two layers of one stage is no matter; one that would have to be sent is told with its layer."""
    path = own_model(PASSES_A_NUMBER)
    pipeline = ["--set", "parallel.dp=1", "--set", "parallel.pp=2", "--set", 'pipeline.use="pp.gpipe"']
    pipeline += ["--set", 'partition.use="pp.explicit"', "--set", f"partition.layers={parts}"]
    result = cli("check", path, "--model", *pipeline)
    assert result.code == code, result.err
    assert ("error[boundary-type]" in result.err) == (code == 3)
    assert "was not looked at" not in result.err
    if code:
        assert "the output of the layer 'counts' holds a value of type int" in result.err
        assert "plan.toml:" in result.err


GIVEN = """
import torch

class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(256))

    def forward(self, tokens):
        return self.weight[tokens]

def layers():
    return [Table()]
"""


def test_a_model_needs_no_method_for_values_that_its_factory_gave(cli: Cli, own_model: Callable[[str], Path]) -> None:
    result = cli("check", own_model(GIVEN), "--model")
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("steps = 4", "steps = 4\nepochs = 3", "`epochs` is not a key of [run] (hint: a run is as long as `run.steps` says"),
        ("steps = 4", "steps = 4\nresume = true", "`resume` is not a key of [run] (hint: `[checkpoint]` says when"),
        (
            "[data]",
            "[checkpoints]\nevery = 3\n[data]",
            "`checkpoints` is not a table of a plan (hint: `[checkpoint]` says when",
        ),
        ("plan = 1", "plan = 1\nsave_every = 3", "`save_every` is not a key of a plan (hint: `[checkpoint]` says when"),
    ],
)
def test_what_is_not_built_is_said_of_a_plan_s_key_too(cli: Cli, plan: Path, before: str, after: str, told: str) -> None:
    plan.write_text(plan.read_text("utf-8").replace(before, after), "utf-8")
    result = cli("check", plan)
    assert result.code == 3
    assert told in result.err
