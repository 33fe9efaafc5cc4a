"""How close two RGB images are: PSNR, and how many components differ visibly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pixtreme.infer.verification.errors import refuse

__all__ = ("FrameComparison", "ComparisonSummary", "compare_rgb", "summarize_comparisons")

Decibels = float | Literal["Infinity"]


@dataclass(frozen=True)
class FrameComparison:
    """Two images of one ``shape``, (height, width, 3); where either is not ``finite``, the figures are None.

    ``mse`` is of values in [0, 1]; ``psnr_db`` is against a peak of 1, ``"Infinity"`` for equal images;
    ``above_1_over_255_count`` counts components that differ by more than 1/255.
    """

    shape: tuple[int, int, int]
    reference_finite_count: int
    candidate_finite_count: int
    component_count: int
    finite: bool
    mse: float | None
    psnr_db: Decibels | None
    above_1_over_255_count: int | None
    above_1_over_255_ratio: float | None


@dataclass(frozen=True)
class ComparisonSummary:
    """Several comparisons; figures are over the finite ones, and None where there is none."""

    case_count: int
    finite_case_count: int
    psnr_min_db: Decibels | None
    psnr_p5_db: Decibels | None
    psnr_median_db: Decibels | None
    ratio_max: float | None
    ratio_p95: float | None
    ratio_median: float | None


def compare_rgb(reference: npt.NDArray[Any], candidate: npt.NDArray[Any], /) -> FrameComparison:
    """Compare two images component by component, in float64, after clipping to [0, 1].

    Parameters
    ----------
    reference, candidate
        Nonempty arrays of shape (height, width, 3), float16, float32 or float64; equal shapes.

    Raises
    ------
    VerificationInputError
        An array is something else.
    """
    for name, image in (("reference", reference), ("candidate", candidate)):
        if not isinstance(image, np.ndarray):
            refuse(name, type(image).__qualname__, "a NumPy array")
        if image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
            refuse(name, f"shape={image.shape!r}", "a nonempty shape (height, width, 3)")
        if image.dtype.kind != "f" or image.dtype.itemsize > 8:
            refuse(name, f"dtype={image.dtype}", "float16, float32 or float64")
    if reference.shape != candidate.shape:
        refuse("candidate", f"shape={candidate.shape!r}", f"the reference's {reference.shape!r}")
    shape = (int(reference.shape[0]), int(reference.shape[1]), 3)
    of_reference, of_candidate = (int(np.isfinite(image).sum()) for image in (reference, candidate))
    count = int(reference.size)
    if (of_reference, of_candidate) != (count, count):
        return FrameComparison(shape, of_reference, of_candidate, count, False, None, None, None, None)
    first, second = (np.clip(image.astype(np.float64), 0.0, 1.0) for image in (reference, candidate))
    difference = np.abs(first - second)
    mse = float(np.mean(difference * difference))
    equal = not difference.any()
    psnr: Decibels = "Infinity" if equal else -10.0 * math.log10(mse or math.ulp(0.0))  # squares may underflow
    above = int((difference > 1.0 / 255.0).sum())
    return FrameComparison(shape, of_reference, of_candidate, count, True, mse, psnr, above, above / count)


def summarize_comparisons(cases: Sequence[FrameComparison], /) -> ComparisonSummary:
    """Summarise comparisons: worst, fifth (or 95th) percentile and median.

    Percentiles interpolate linearly between neighbours; ``"Infinity"`` orders last, and so does what lies between it
    and a number.

    Raises
    ------
    VerificationInputError
        There is no case, or one is no `FrameComparison`.
    """
    if not isinstance(cases, Sequence) or not cases or not all(isinstance(case, FrameComparison) for case in cases):
        refuse("cases", repr(cases), "a nonempty sequence of FrameComparison")
    finite = [case for case in cases if case.finite]
    if not finite:
        return ComparisonSummary(len(cases), 0, None, None, None, None, None, None)
    levels = [math.inf if case.psnr_db == "Infinity" else float(case.psnr_db or 0.0) for case in finite]
    ratios = [case.above_1_over_255_ratio or 0.0 for case in finite]
    return ComparisonSummary(
        len(cases),
        len(finite),
        _decibels(min(levels)),
        _decibels(percentile(levels, 5)),
        _decibels(percentile(levels, 50)),
        max(ratios),
        percentile(ratios, 95),
        percentile(ratios, 50),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile with linear interpolation; unlike NumPy's it takes infinities."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    fraction = position - below
    if fraction == 0 or ordered[below] == ordered[below + 1]:
        return ordered[below]
    return ordered[below] + (ordered[below + 1] - ordered[below]) * fraction


def _decibels(level: float) -> Decibels:
    return "Infinity" if math.isinf(level) else level
