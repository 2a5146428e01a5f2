"""Tests that offload managers without one of their waits, or with a race of another project, are caught."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

import sley_memory
from sley_core.errors import RunError
from sley_testing.drawn_copies import Site, skip_wait, wait_sites
from sley_testing.plans import Tables, changed, small_plan

SOURCES = str(Path(sley_memory.__file__).parent)
NUM_TRIES = 8
"""In how many orders a missing wait must show, and one that is implied must not."""

PLAN = small_plan(model__num_layers=1, batch__micro_size=2, precision__compute="bf16")
CASES: dict[str, Tables] = {
    "between steps": {"offload": [{"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.01}]},
    "optimizer on the host": {"offload": [{"use": "memory.host_optimizer", "bucket_mb": 0.01}]},
    "everything": {"offload": [{"use": "memory.everything", "bucket_mb": 0.004}]},
    "masters, and nothing that a program needs after the run": {"offload": [{"use": "memory.masters", "bucket_mb": 0.004}]},
    "activations on the host": {
        "activations": {"use": "memory.host", "min_bytes": 512},
        "model": {**PLAN["model"], "num_layers": 2},
        "offload": [{"use": "memory.gradients"}],
    },
}

Named = tuple[str, str, int]
"""A wait as it is called in this file: function, method, and which of these in the function."""

IMPLIED: dict[Named, str] = {
    ("_start_onload", "wait_for", 0): "the device was held until each copy out was done, and the stream follows the device",
    ("begin", "make_device_wait", 0): "unless a step failed, what left was awaited before its release, what came at its use",
    ("_step", "wait_for_device", 1): "the host has waited for gradients, whose stream followed the device after the backward",
    ("_step", "make_device_wait", 0): "the host waits for the same copies, and gives the device's next work after that",
    ("host", "wait", 0): "a training reads states that are coming only after their copies out; `test_readers.py` reads earlier",
}
"""Waits that another one brings about: without them, all orders of a training are the permitted ones."""

OTHERS_RACES: dict[str, Named] = {
    "copies do not wait for the optimizer's writes": ("_send", "wait_for_device", 0),
    "memory is used anew while a copy reads it": ("_send", "make_device_wait", 0),
    "a copy writes memory in which the device still works": ("_start_onload", "wait_for_device", 0),
}
"""The three stream races that DeepSpeed's pull request 8186 mended, as waits that are missing here."""

Train = Callable[..., str]


def plain_digest_and_training(train: Train, case: str, folder: Path) -> tuple[str, Train]:
    """Returns the digest of a case without moves, and the training of an order with moves."""
    moves = CASES[case]
    still = {name: table for name, table in moves.items() if name not in ("offload", "activations")}
    return train(changed(PLAN, **still), folder), partial(train, changed(PLAN, **moves), folder)


def name_sites(sites: Iterable[Site]) -> dict[Site, Named]:
    """Returns the sites in this package's sources by function and number. The `wait` of two classes count as those of one
    function.
    """
    count: Counter[tuple[str, str]] = Counter()
    found = {}
    for site in sorted(set(sites), key=lambda site: (Path(site.file).name != "movers.py", site.line)):
        if site.file.startswith(SOURCES):
            found[site] = (site.function, site.wait, count[site.function, site.wait])
            count[site.function, site.wait] += 1
    return found


def first_failure(training: Train, plain: str, site: Site, num_orders: int) -> tuple[int, str] | None:
    """Returns the first order, counted from 1, in which the training raised an error or had other bits, and which of both,
    or None.
    """
    for order in range(num_orders):
        with skip_wait(site):
            try:
                found = training(order)
            except (AssertionError, RunError) as error:
                return order + 1, type(error).__name__
        if found != plain:
            return order + 1, "bits"
    return None


@pytest.mark.campaign  # every site in turn, over many orders; the races of others below are its fixed sample
def test_every_missing_wait_is_caught(train: Train, texts: Path) -> None:
    """Each wait that a training calls is needed in one of the cases, or implied by another wait."""
    caught: set[Site] = set()
    missed: set[Site] = set()
    for case in CASES:
        plain, training = plain_digest_and_training(train, case, texts)
        for site, name in name_sites(chain.from_iterable(wait_sites(partial(training, order)) for order in range(4))).items():
            if name in IMPLIED or site in caught:
                continue
            found = first_failure(training, plain, site, NUM_TRIES)
            print(f"{case}: {site}: {'never caught' if found is None else 'caught in order {} by {}'.format(*found)}")
            (missed if found is None else caught).add(site)
    assert len(caught) >= 10
    assert not missed - caught


@pytest.mark.sample(1)
@pytest.mark.parametrize("race", OTHERS_RACES)
def test_races_of_others_are_caught(race: str, train: Train, texts: Path) -> None:
    """They are caught in the first order, by the device's checks and not by different bits."""
    training = partial(train, changed(PLAN, **CASES["everything"]), texts)
    (site,) = (site for site, name in name_sites(wait_sites(partial(training, 0))).items() if name == OTHERS_RACES[race])
    with skip_wait(site), pytest.raises(AssertionError, match="is missing"):
        training(0)
