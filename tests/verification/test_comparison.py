"""Comparison of images (V11)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pixtreme.infer.verification import (
    ComparisonSummary,
    FrameComparison,
    VerificationInputError,
    compare_rgb,
    summarize_comparisons,
)

approx: Any = pytest.approx  # stands for a number inside the results compared


def image(value: float = 0.5, *, dtype: str = "float32") -> Any:
    return np.full((4, 5, 3), value, dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_equal_images(dtype: str) -> None:
    """V11: equal images have an infinite PSNR, written as a string, and nothing above 1/255."""
    assert compare_rgb(image(dtype=dtype), image(dtype=dtype)) == FrameComparison(
        (4, 5, 3), 60, 60, 60, True, 0.0, "Infinity", 0, 0.0
    )


def test_known_difference() -> None:
    """V11: a tenth everywhere is an MSE of a hundredth and 20 dB; half the components are above 1/255."""
    candidate = image(0.5, dtype="float64")
    candidate[:2] += 0.1
    found = compare_rgb(image(0.5, dtype="float64"), candidate)
    assert found.mse == approx(0.005)
    assert found.psnr_db == approx(10 * math.log10(1 / 0.005))
    assert (found.above_1_over_255_count, found.above_1_over_255_ratio) == (30, 0.5)


def test_values_are_clipped_and_compared_in_float64() -> None:
    """V11: what lies outside [0, 1] counts as its border; float16 differences are not rounded away."""
    assert compare_rgb(image(1.0), image(7.0)).psnr_db == "Infinity"
    assert compare_rgb(image(-3.0), image(0.0)).psnr_db == "Infinity"
    found = compare_rgb(image(0.5, dtype="float16"), image(0.5, dtype="float16") + np.float16(2**-11))
    assert found.mse == (2.0**-11) ** 2
    tiny = compare_rgb(image(0.0, dtype="float64"), image(1e-200, dtype="float64"))
    assert isinstance(tiny.psnr_db, float)  # not equal, although the squares underflow


def test_what_is_not_finite_is_counted() -> None:
    """V11: no figure is given for an image that is not finite; the counts say how many components are."""
    reference, candidate = image(), image()
    reference[0, 0, 0] = np.nan
    candidate[0, :2, 1] = np.inf
    assert compare_rgb(reference, candidate) == FrameComparison((4, 5, 3), 59, 58, 60, False, None, None, None, None)


@pytest.mark.parametrize(
    ("reference", "candidate", "words"),
    [
        ([[0.0]], image(), "NumPy array"),
        (image()[..., :2], image()[..., :2], "(height, width, 3)"),
        (image()[:0], image()[:0], "nonempty"),
        (image().astype(np.uint8), image(), "float16, float32 or float64"),
        (image().astype(np.longdouble), image(), "float16, float32 or float64"),
        (image(), image()[:3], "(4, 5, 3)"),
        (image(), image()[0], "(height, width, 3)"),
    ],
)
def test_malformed_images(reference: Any, candidate: Any, words: str) -> None:
    """V11: other arrays are an input error that says what is accepted."""
    with pytest.raises(VerificationInputError) as caught:
        compare_rgb(reference, candidate)
    assert words in str(caught.value)


def _case(psnr: Any, ratio: float = 0.0) -> FrameComparison:
    finite = psnr is not None
    return FrameComparison((1, 1, 3), 3, 3, 3, finite, 0.0 if finite else None, psnr, 0, ratio if finite else None)


def test_summary() -> None:
    """V11: percentiles interpolate linearly, "Infinity" orders last, cases that are not finite are only counted."""
    cases = [_case(level, level / 100) for level in (30.0, 40.0, 20.0)]
    assert summarize_comparisons([*cases, _case(None)]) == ComparisonSummary(
        4, 3, 20.0, approx(21.0), 30.0, 0.4, approx(0.39), 0.3
    )
    mixed = summarize_comparisons([_case(20.0), _case("Infinity"), _case("Infinity")])
    assert (mixed.psnr_min_db, mixed.psnr_median_db) == (20.0, "Infinity")
    assert mixed.psnr_p5_db == "Infinity"  # between a number and infinity
    assert summarize_comparisons([_case("Infinity")]).psnr_min_db == "Infinity"
    assert summarize_comparisons([_case(None)]) == ComparisonSummary(1, 0, None, None, None, None, None, None)


@pytest.mark.parametrize("cases", [[], "cases", [1], None])
def test_malformed_cases(cases: Any) -> None:
    """V11: a summary of nothing is refused."""
    with pytest.raises(VerificationInputError):
        summarize_comparisons(cases)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_percentiles_are_numpys(levels: list[float]) -> None:
    """V11: on finite values the percentiles are NumPy's linear ones."""
    found = summarize_comparisons([_case(level, level) for level in levels])
    assert found.psnr_p5_db == approx(float(np.percentile(levels, 5)), abs=1e-9)
    assert found.ratio_p95 == approx(float(np.percentile(levels, 95)), abs=1e-9)
    assert found.ratio_median == approx(float(np.median(levels)), abs=1e-9)


@given(
    arrays(np.float32, (2, 3, 3), elements=st.floats(0, 1, width=32)),
    arrays(np.float32, (2, 3, 3), elements=st.floats(0, 1, width=32)),
)
def test_comparison_is_symmetric(first: Any, second: Any) -> None:
    """V11: figures do not depend on which image is the reference."""
    there, back = compare_rgb(first, second), compare_rgb(second, first)
    assert (there.mse, there.psnr_db, there.above_1_over_255_count) == (
        back.mse,
        back.psnr_db,
        back.above_1_over_255_count,
    )
