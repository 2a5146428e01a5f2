"""Code that looks at values while it writes them sees what plain PyTorch shows, however much was done before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sley_core.model import journal
from sley_core.model.kept import Keeper
from sley_core.model.layers import Model
from sley_core.model.steps import Call

AsPlain = Callable[[Callable[[], list[nn.Module]]], Model]


class Part(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(count)])
        self.halves = nn.Parameter(torch.empty(8))
        for at, parameter in enumerate(self.parameters()):
            parameter.data = (torch.arange(parameter.numel()).view(parameter.shape) % 7 + at).float()

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def weight(part: Part, at: int) -> Tensor:
    return part.get_parameter(f"layers.{at}.weight")


@torch.no_grad()
def looks_after_each_write() -> list[nn.Module]:
    part = Part()
    total = torch.zeros(())
    for at in range(12):
        one, other = weight(part, at % 3), weight(part, (at + 1) % 3)
        one[at % 8].mul_(1.5)
        total = total + one.norm()
        other.add_(one.t(), alpha=1 / (1 + float(total)))
        part.halves[:4] = one[at % 8, :4]
        if at % 4 == 3:
            part.halves.data.div_(float(part.halves.abs().max()) + 1)
            torch._foreach_mul_([one, other], 0.5)
            one.copy_(other.sort().values)
    part.register_buffer("total", total)
    return [part]


@torch.no_grad()
def scales_until_small() -> list[nn.Module]:
    part = Part()
    real = torch.from_numpy(torch.ones(8, 8).numpy())
    for parameter in part.parameters():
        while parameter.norm() > 1:
            parameter.mul_(0.7)
    for at in range(3):
        real.mul_(at + 1)
        weight(part, at).add_(real)
        real.add_(float(weight(part, at).sum()))
    part.halves.data = real[0]
    real[0, 1] = float(part.halves.max())
    part.halves.data.mul_(2)
    assert part.halves.tolist() == real[0].tolist()
    return [part]


@pytest.mark.parametrize("limit", [-1, 0, 300, 2**20])
@pytest.mark.parametrize("case", [looks_after_each_write, scales_until_small])
def test_what_is_looked_at_is_right_whatever_is_kept(
    as_plain: AsPlain, monkeypatch: pytest.MonkeyPatch, case: Callable[[], list[nn.Module]], limit: int
) -> None:
    monkeypatch.setattr(journal, "Keeper", lambda: Keeper(limit))
    as_plain(case)


def test_looking_costs_what_was_done_since_the_last_look(
    build: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Call] = []
    run = Call.run
    monkeypatch.setattr(Call, "run", lambda self, memory: (calls.append(self), run(self, memory)))

    def cost(looks: int) -> int:
        @torch.no_grad()
        def layers(_: object) -> list[nn.Module]:
            part = Part(1)
            total = torch.zeros(())
            for _at in range(looks):
                weight(part, 0).mul_(0.99)
                total = total + weight(part, 0).norm()
                total.item()
            return [part]

        calls.clear()
        build(layers)
        return len(calls)

    assert cost(80) < 2.5 * cost(40)


def test_what_is_kept_is_bounded_by_the_limit_and_the_largest() -> None:
    book = journal.Journal()
    book._keeper = keeper = Keeper(1000)
    for size in (100, 400, 50, 20, 100):
        made = torch.empty(size)
        ref = book.made(made)
        ref.cell.steps.append(Call(func=torch.ones, args=(size,), kwargs={}, results=[ref], overwrites=[ref.cell]))
        assert keeper.value(ref).sum() == size
        held = [cell.nbytes for cell in keeper._kept]
        assert sum(held) <= 1000 + max(held)
        assert ref.cell.kept is not None
    book.close()
    assert not keeper._kept
    assert ref.cell.kept is None
