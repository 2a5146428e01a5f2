"""`check`: good plans and bad ones, with and without their model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
Own = Callable[[str], Path]

PIPELINE = ("parallel.dp=1", "parallel.pp=2", 'pipeline.use="pp.gpipe"')


def test_several_plans_are_checked_to_the_end(cli: Cli, plan: Path, folder: Path) -> None:
    text = plan.read_text("utf-8")
    (folder / "one.toml").write_text(text.replace("steps = 4", "steps = 0"), "utf-8")
    (folder / "two.toml").write_text(text.replace("core.adamw", "nobody.knows"), "utf-8")
    result = cli("check", "one.toml", plan, "two.toml")
    first, second, count = result.err.splitlines()
    assert first.startswith("one.toml:5:9: error[out-of-range]")
    assert second.startswith("two.toml:25:7: error[plugin-unknown]")
    assert (count, result.code) == ("found 2 errors", 4)
    fine = cli("check", plan, plan)
    assert (fine.code, fine.err) == (0, "2 plans are fine; no model was built (--model builds it)\n")


def test_check_of_another_world(cli: Cli, plan: Path) -> None:
    plan.write_text(plan.read_text("utf-8").replace("dp = 2", 'dp = "auto"'), "utf-8")
    assert cli("check", plan, "--world", "4").code == 0
    assert "batch-does-not-divide" in cli("check", plan, "--world", "3").err


@pytest.mark.parametrize("key", ["epochs = 3", "resume = true"])
def test_a_key_of_other_programs_leads_to_ours(cli: Cli, plan: Path, key: str) -> None:
    plan.write_text(plan.read_text("utf-8").replace("steps = 4", f"steps = 4\n{key}"), "utf-8")
    result = cli("check", plan)
    assert result.code == 3
    assert "(hint: a run is as long as `run.steps` says" in result.err or "(hint: `[checkpoint]` says when" in result.err


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


def test_a_weight_that_stages_share_and_nobody_sums(cli: Cli, own_model: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the model `check` says that it did not look; with it, and in `run` before a rank starts, it is refused."""
    path = own_model(SHARES_A_WEIGHT)
    unsummed = (*PIPELINE, "gradient_handlers=[]")
    monkeypatch.setattr("train_cli.local_launch.launch", lambda *_, **__: pytest.fail("ranks were started"))
    plain = cli("check", path, changes=unsummed)
    assert (plain.code, "only --model sees whether there are any" in plain.err) == (0, True)
    assert "only --model sees" not in cli("check", path, changes=PIPELINE).err
    for arguments in (("check", path, "--model"), ("run", path)):
        result = cli(*arguments, changes=unsummed)
        assert (result.code, result.err.count("error[handler-missing]")) == (3, 1), result.err
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
def test_outputs_that_cross_between_stages(cli: Cli, own_model: Own, parts: str, code: int) -> None:
    """A number between two layers of one stage is no matter; one that would have to be sent is refused with its layer."""
    changes = (*PIPELINE, 'partition.use="pp.explicit"', f"partition.layers={parts}")
    result = cli("check", own_model(PASSES_A_NUMBER), "--model", changes=changes)
    assert (result.code, "error[boundary-type]" in result.err) == (code, code == 3), result.err
    assert "was not looked at" not in result.err


LAYERS = """
    import numpy, torch
    from torch import nn
    from sley_core.api.model import Model

    class Embed(nn.Embedding):
        def forward(self, tokens):
            return super().forward(tokens)

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

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(32)

        def forward(self, hidden):
            return self.norm(hidden.transpose(1, 2)).transpose(1, 2)

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


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (f'("up", nn.Linear(32, 64)), {HEAD}', "error[layer-fails]: layer `head` (Linear) fails, given FORMAT [1, 16, 64]: "),
        (f'("pair", Pair(32, 32)), {HEAD}', "error[layer-fails]: layer `head` (Linear) fails, given tuple: TypeError: "),
        ('("head", nn.Linear(32, 8))', "error[model-vocabulary]: layer `head` (Linear), the last one, gives 8 classes"),
        ('("head", Longer(32, 256))', "error[loss-output]: logits of shape [1, 32, 256]"),
        ('("head", Pair(32, 256))', "error[loss-output]: cross-entropy needs a tensor of logits"),
    ],
)
@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_layers_that_do_not_fit_are_named(cli: Cli, own_model: Own, more: str, words: str, form: str) -> None:
    changes = ("parallel.dp=1",) if form == "float32" else ("parallel.dp=2", 'precision.compute="bf16"')
    result = cli("check", own_model(layers(more)), "--model", changes=changes)
    assert result.code == 3, result.err
    assert words.replace("FORMAT", form) in result.err


@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ('Norm(), Norm(), ("picks", Picks(32, 256))', True),
        ("Norm().eval(), Norm().eval(), nn.Linear(32, 256)", False),
        ('nn.Linear(32, 256)], per_rank_buffers=["*.running_*", "*.num_batches_tracked"', False),
    ],
)
def test_running_statistics_are_one_error(cli: Cli, own_model: Own, more: str, is_refused: bool) -> None:
    source = layers(more, "hidden.sum().item()").replace("return [", "return Model([").rstrip() + ")"
    result = cli("check", own_model(source), "--model", changes=ONE)
    assert (result.code, result.err.count("error[model-buffer-written]")) == ((3, 1) if is_refused else (0, 0)), result.err


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
def test_a_forward_that_needs_values_is_no_mistake(cli: Cli, own_model: Own, picks: str) -> None:
    path = own_model(layers(f'("picks", Picks(32, 32)), {HEAD}', picks))
    result = cli("check", path, "--model", changes=ONE)
    assert result.code == 0, result.err
    assert "layers were called up to layer `picks` (Picks), which needs values or a device" in result.err
    assert cli("run", path, changes=ONE).code == 0, "and so it is"


@pytest.mark.parametrize(
    ("loss", "code", "words"), [("* self.count", 0, "the loss was not looked at"), ("@ output", 3, "loss-fails")]
)
def test_a_loss_of_the_users(cli: Cli, own_model: Own, loss: str, code: int, words: str) -> None:
    """One that its `weight` prepares is no mistake; one that does not fit is."""
    path = own_model(layers(HEAD, loss=loss))
    path.write_text(path.read_text("utf-8") + '\n[loss]\nfactory = "own:loss"\n', "utf-8")
    result = cli("check", path, "--model", changes=ONE)
    assert (result.code, words in result.err) == (code, True), result.err


@pytest.mark.parametrize("more", [(), ('data.documents="cut"',), ('precision.compute="fp64"',)])
def test_all_of_the_reference_model_is_called(cli: Cli, plan: Path, more: tuple[str, ...]) -> None:
    result = cli("check", plan, "--model", changes=more)
    assert result.code == 0, result.err
    assert "called" not in result.err
    assert "looked at" not in result.err


PACKED = """
    from torch import nn

    class Embed(nn.Embedding):
        def forward(self, tokens, positions, cu_seqlens):
            if cu_seqlens.shape[1] == tokens.shape[1]:
                raise IndexError("one document per token")
            return super().forward(tokens) + positions.unsqueeze(-1)

    def layers(data):
        return [("embed", Embed(data.vocab_size, 8)), ("up", nn.Linear(8, 8)), ("head", nn.Linear(8, data.vocab_size))]
"""


@pytest.mark.parametrize("sp", [1, 2])
def test_boundaries_of_documents_are_not_taken_for_a_sequence(cli: Cli, own_model: Own, sp: int) -> None:
    changes = [*PIPELINE, 'data.documents="pack"']
    changes += [f"parallel.sp={sp}", 'sequence.use="isp.all_to_all"', 'sequence.modules=["up"]'] if sp > 1 else []
    result = cli("check", own_model(PACKED), "--model", changes=changes)
    assert result.code == 0, result.err
    assert "not looked at" not in result.err
    assert "layers were called up to" not in result.err
