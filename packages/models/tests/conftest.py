"""What the tests of models share: builds without a plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sley_core.data.dataset import DataInfo
from sley_core.model.layers import Model
from sley_testing import plans


@pytest.fixture
def info() -> DataInfo:
    return plans.TOKENS


@pytest.fixture
def build() -> Callable[..., Model]:
    """`build(function, seed=0)`: the model of `function(data)`, on meta."""
    return lambda function, seed=0: plans.on_meta(function, seed=seed)


@pytest.fixture
def real() -> Callable[..., Model]:
    """`real(function, dtype=fp32, owned=None, seed=0)`: the same with its first weights."""
    return plans.with_values
