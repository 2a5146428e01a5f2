"""Tests comparisons of gradients: relative errors per parameter, largest first."""

import math

import pytest
import torch

from sley_testing.live_bytes import Figure, note_figure
from sley_testing.parity import assert_close_gradients, assert_same_bits, relative_errors


@pytest.fixture
def gradients():
    torch.manual_seed(0)
    return {"large": torch.randn(64, 64) * 1e3, "small": torch.randn(8) * 1e-3}


def test_figure_is_written_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SLEY_FIGURES", str(tmp_path / "figures"))
    note_figure(Figure("step", "1.5 s", "at most 1 s", is_met=False))
    assert " ".join((tmp_path / "figures").read_text("utf-8").split()) == "step 1.5 s at most 1 s NOT MET"


def test_error_is_relative_to_each_parameter(gradients):
    actual = {**gradients, "small": gradients["small"] * 1.01}
    assert relative_errors(gradients, actual) == {"large": 0.0, "small": pytest.approx(0.01, rel=1e-4)}
    assert_close_gradients(gradients, actual, 0.011)
    with pytest.raises(AssertionError, match=r"1 of 2 differ by more than 0.001, the worst first\n  small \(8,\): 0.01"):
        assert_close_gradients(gradients, actual, 1e-3)


def test_largest_errors_are_listed_first():
    reference = {f"p{index}": torch.ones(1) for index in range(8)}
    actual = {f"p{index}": torch.ones(1) + index for index in range(8)}
    with pytest.raises(AssertionError) as caught:
        assert_close_gradients(reference, actual, 0.5)
    lines = str(caught.value).splitlines()
    assert lines[1] == "  p7 (1,): 7"
    assert lines[-1] == "  and 2 more"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_are_never_close(value):
    reference, actual = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, value])}
    for pair in ((reference, actual), (actual, reference), (actual, actual)):
        with pytest.raises(AssertionError, match=r"w .*inf"):
            assert_close_gradients(*pair, tolerance=1e9)


def test_zero_gradient_needs_a_floor():
    zero, tiny = {"w": torch.zeros(4)}, {"w": torch.full((4,), 1e-18, dtype=torch.float64)}
    with pytest.raises(AssertionError, match="inf"):
        assert_close_gradients(zero, tiny, 1e-6)
    assert_close_gradients(zero, tiny, 1e-6, floor=1e-10)


def test_different_names_or_shapes_are_refused():
    with pytest.raises(AssertionError, match="not the same names: b"):
        assert_close_gradients({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}, 1.0)
    with pytest.raises(AssertionError, match=r"not the same shapes: .*\(2,\), \(1, 2\)"):
        assert_same_bits({"a": torch.ones(2)}, {"a": torch.ones(1, 2)})


def test_same_bits_is_stricter_than_close(gradients):
    actual = {**gradients, "small": torch.nextafter(gradients["small"], torch.tensor(1.0))}
    assert_close_gradients(gradients, actual, 1e-6)
    with pytest.raises(AssertionError, match="1 of 2 differ\n  small: 8 of 8 elements"):
        assert_same_bits(gradients, actual)
    with pytest.raises(AssertionError, match=r"small: torch\.float32 against torch\.float64"):
        assert_same_bits(gradients, {**gradients, "small": gradients["small"].double()})
    assert_same_bits({"nan": torch.tensor([math.nan])}, {"nan": torch.tensor([math.nan])})
    with pytest.raises(AssertionError):
        assert_same_bits({"zero": torch.tensor([0.0])}, {"zero": torch.tensor([-0.0])})
