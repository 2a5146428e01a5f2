"""What a factory writes in threads of its own reaches the parameters; the same code run by plain PyTorch is the oracle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.model.layers import Model

AsPlain = Callable[[Callable[[], list[nn.Module]]], Model]
Work = Callable[[str], Any]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(value.shape, generator=generator) for name, value in Part().state_dict().items()}


EARLIER = ThreadPoolExecutor(2)


@pytest.fixture(scope="module", autouse=True)
def _earlier_ends() -> Iterator[None]:
    yield
    EARLIER.shutdown()


def by_an_executor(work: Work, names: list[str]) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, names))


def by_an_executor_that_was_there(work: Work, names: list[str]) -> None:
    for done in [EARLIER.submit(work, name) for name in names]:
        done.result()


def by_threads(work: Work, names: list[str]) -> None:
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_a_pool(work: Work, names: list[str]) -> None:
    with ThreadPool(2) as pool:
        pool.map(work, names)


def by_threads_of_threads(work: Work, names: list[str]) -> None:
    by_threads(lambda name: by_an_executor(work, [name]), names)


def by_asyncio(work: Work, names: list[str]) -> None:
    async def every() -> None:
        await asyncio.gather(*(asyncio.to_thread(work, name) for name in names))

    asyncio.run(every())


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "each",
    [by_an_executor, by_an_executor_that_was_there, by_threads, by_a_pool, by_threads_of_threads, by_asyncio],
)
@pytest.mark.parametrize("how", ["data", "copy", "given", "read", "made"])
def test_what_threads_write_is_what_plain_pytorch_has(
    as_plain: AsPlain, each: Callable[[Work, list[str]], None], how: str
) -> None:
    def case() -> list[nn.Module]:
        part, given = Part(), state()
        found: dict[str, Tensor] = {}

        @torch.no_grad()
        def work(name: str) -> None:
            parameter = part.get_parameter(name)
            if how == "data":
                parameter.data.copy_(given[name] * 2)
            elif how == "copy":
                part.state_dict()[name].copy_(given[name]).mul_(3)
            elif how == "given":
                parameter.data = given[name]
            elif how == "made":
                owner, _, attribute = name.rpartition(".")
                setattr(part.get_submodule(owner), attribute, nn.Parameter(given[name] + 1))
            else:
                found[name] = parameter + given[name].sum()
                found[name].add_(parameter.max().item())

        if how == "read":
            part.load_state_dict(given)
        each(work, list(given))
        if how == "read":
            part.load_state_dict(found)
        return [part, Part()]

    as_plain(case)


def test_threads_that_go_on_after_the_factory_are_watched_no_more(real: Callable[..., Model]) -> None:
    pools: list[ThreadPoolExecutor] = []
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def layers(_: Any) -> list[nn.Module]:
        part = Part()
        pools.append(ThreadPoolExecutor(1))
        pools[0].submit(part.load_state_dict, state()).result()
        return [part]

    part = real(layers)["0"].module
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == (start, submit)
    with pools[0]:
        made = pools[0].submit(torch.ones, 3).result()
        with torch.no_grad():
            pools[0].submit(part.get_parameter("layers.0.bias").data.copy_, torch.ones(4)).result()
        assert pools[0].submit(lambda: part.get_parameter("layers.0.bias").device.type).result() == "cpu"
    assert made.tolist() == [1.0] * 3
    assert part.get_parameter("layers.0.bias").tolist() == [1.0] * 4
    assert torch.equal(part.get_parameter("layers.1.weight"), state()["layers.1.weight"])
