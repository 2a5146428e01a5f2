"""`check --model` calls layers and loss without values: what does not fit is told, and what needs values is no mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
Own = Callable[[str], Path]

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

    class Frozen(nn.BatchNorm1d):
        def forward(self, hidden):
            given = self.running_mean, self.running_var, self.weight, self.bias
            return nn.functional.batch_norm(hidden.transpose(1, 2), *given).transpose(1, 2)

    def layers():
        return [("embed", Embed(256, 32)), {more}]
"""

ONE = ("parallel.dp=1", "run.steps=1")


def layers(more: str, picks: str = "pass") -> str:
    return LAYERS.format(more=more, picks=picks)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            '("up", nn.Linear(32, 64)), ("head", nn.Linear(32, 256))',
            "error[layer-fails]: layer `head` (Linear) fails, given float32 [1, 16, 64]: RuntimeError: ",
        ),
        (
            '("pair", Pair(32, 32)), ("head", nn.Linear(32, 256))',
            "error[layer-fails]: layer `head` (Linear) fails, given tuple: TypeError: linear(): argument 'input'",
        ),
        (
            '("norm", nn.LayerNorm(16)), ("head", nn.Linear(32, 256))',
            "error[layer-fails]: layer `norm` (LayerNorm) fails, given float32 [1, 16, 32]: RuntimeError: ",
        ),
        ('("head", nn.Linear(32, 8))', "error[model-vocabulary]: layer `head` (Linear), the last one, gives 8 classes"),
        ('("head", Longer(32, 256))', "error[loss-output]: logits of shape [1, 32, 256]"),
        ('("head", Pair(32, 256))', "error[loss-output]: cross-entropy needs a tensor of logits"),
    ],
)
def test_layers_that_do_not_fit_are_told_by_name(cli: Cli, own_model: Own, more: str, words: str) -> None:
    result = cli("check", own_model(layers(more)), "--model", changes=ONE)
    assert result.code == 3, result.err
    assert words in result.err
    assert "plan.toml:" in result.err


@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ("Norm(), Norm(), nn.Linear(32, 256)", True),
        ('Norm(), Norm(), ("picks", Picks(32, 256))', True),
        ("Norm().eval(), Norm().eval(), nn.Linear(32, 256)", False),
        ("Frozen(32), nn.Linear(32, 256)", False),
        ('nn.Linear(32, 256)], per_rank_buffers=["*.running_*", "*.num_batches_tracked"', False),
    ],
)
def test_running_statistics_are_told_in_one_error(cli: Cli, own_model: Own, more: str, is_refused: bool) -> None:
    """What a run said in its first step, in an error for each buffer, after the check had passed."""
    source = layers(more, "hidden.sum().item()").replace("return [", "return Model([").rstrip() + ")"
    result = cli("check", own_model(source), "--model", changes=ONE)
    assert result.code == (3 if is_refused else 0), result.err
    assert result.err.count("error[model-buffer-written]") == is_refused
    if is_refused:
        assert "training writes 6 buffers of BatchNorm1d (`1.norm.running_mean`" in result.err
        assert '`sley_core.api.model.Model(layers, per_rank_buffers=("*.running_mean", ' in result.err


@pytest.mark.parametrize(
    "picks",
    [
        "assert (hidden == hidden).all()",
        "hidden[hidden > 1e9].sum().item()",
        "hidden.detach().numpy()",
        "hidden = hidden + torch.from_numpy(numpy.zeros(32, numpy.float32))",
        "assert hidden.data_ptr(), 'a kernel would be given nothing'",
        "hidden = {'cpu': hidden}[hidden.device.type]",
        "if hidden.is_meta: raise ValueError('Pointer argument cannot be accessed from Triton')",
        "hidden = hidden + torch.nonzero(hidden == hidden).shape[0]",
    ],
)
def test_a_forward_that_needs_values_is_no_mistake(cli: Cli, own_model: Own, picks: str) -> None:
    path = own_model(layers('("picks", Picks(32, 32)), ("head", nn.Linear(32, 256))', picks))
    result = cli("check", path, "--model", changes=ONE)
    assert result.code == 0, result.err
    if "from_numpy" not in picks:
        assert "layers were called up to layer `picks` (Picks), which needs values or a device" in result.err
    assert cli("run", path, changes=ONE).code == 0, "and so it is"


@pytest.mark.parametrize("more", [(), ('data.documents="cut"',), ('precision.compute="fp64"',)])
def test_all_of_the_reference_model_is_called(cli: Cli, plan: Path, more: tuple[str, ...]) -> None:
    result = cli("check", plan, "--model", changes=more)
    assert result.code == 0, result.err
    assert "called" not in result.err
    assert "looked at" not in result.err


OWN_LOSS = """
    class Counted:
        def weight(self, batch):
            self.count = 3.0
            return float(batch["labels"].numel())

        def loss(self, output, batch):
            return output.flatten(0, 1)[:, 0].sum() * self.count

    def loss():
        return Counted()
"""


def test_a_loss_that_does_not_fit_is_told(cli: Cli, own_model: Own) -> None:
    path = own_model(layers('("head", nn.Linear(32, 256))') + OWN_LOSS.replace("* self.count", "@ output"))
    path.write_text(path.read_text("utf-8") + '\n[loss]\nfactory = "own:loss"\n', "utf-8")
    result = cli("check", path, "--model", changes=ONE)
    assert result.code == 3
    assert "error[loss-fails]: the loss fails, given float32 [1, 16, 256]: RuntimeError" in result.err


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
    """Neither where a pipeline's boundaries are looked at, nor where all layers are called; whole where slices are not."""
    changes = ["parallel.dp=1", "parallel.pp=2", 'pipeline.use="pp.gpipe"', 'data.documents="pack"']
    if sp > 1:
        changes += [f"parallel.sp={sp}", 'sequence.use="isp.all_to_all"', 'sequence.modules=["up"]']
    result = cli("check", own_model(PACKED), "--model", *(part for each in changes for part in ("--set", each)))
    assert result.code == 0, result.err
    assert "not looked at" not in result.err
    assert "layers were called up to" not in result.err
