"""What a layer waits for is awaited before every use of its weights, whoever the caller is."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

LAYERS = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


@pytest.fixture
def waited(alone, small):
    """`with waited(**changes) as (run, seen)`: every layer waits for two things and runs; `seen` has the order."""

    @contextmanager
    def waited(**changes):
        seen = []
        with alone(small(**{"batch__global_size": 1} | changes)) as run:
            for layer in run.layers:
                run.before_layer(layer.name, lambda name=layer.name: seen.append(f"first {name}"))
                run.before_layer(layer.name, lambda name=layer.name: seen.append(f"second {name}"))
                layer.module.register_forward_pre_hook(lambda *_, name=layer.name: seen.append(f"run {name}"))
            yield run, seen

    return waited


def uses(names):
    return [f"{what} {name}" for name in names for what in ("first", "second", "run")]


def test_in_every_forward(waited):
    with waited(batch__global_size=2) as (run, seen):
        run.step()
    assert seen == 2 * uses(LAYERS)


def test_in_recomputation_too(waited):
    with waited(activations={"use": "core.recompute", "fraction": 0.5}) as (run, seen):
        run.step()
    assert seen == uses([*LAYERS, "blocks.1", "blocks.0"])


def test_a_wait_comes_before_the_seed(alone, small):
    """What a wait draws must not shift the masks of the layer."""
    losses = []
    for draws in (0, 5):
        with alone(small(model__options={"dropout": 0.5})) as run:
            run.before_layer("blocks.1", lambda draws=draws: torch.rand(draws) if draws else None)
            losses.append(run.step()["loss"])
    assert losses[0] == losses[1]
