"""Cutting an image into overlapping tiles of one size, and blending upscaled tiles without seams.

A network sees `margin` pixels around each output pixel. Tiles overlap by twice that and a ramp more: what lies within
`margin` of a tile's inner border is discarded, and neighbours fade into each other over the ramp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Grid:
    """Tiles of one size over an image; all numbers in input pixels."""

    image_hw: tuple[int, int]
    tile_hw: tuple[int, int]
    margin: int
    ramp: int

    @classmethod
    def over(cls, image_hw: tuple[int, int], *, tile: int, margin: int, ramp: int = 8) -> Grid:
        """Lay tiles of at most ``tile`` pixels a side; an image smaller than that is one tile."""
        height, width = (min(tile, size) for size in image_hw)
        return cls(image_hw, (height, width), margin, ramp)

    @property
    def corners(self) -> list[tuple[int, int]]:
        """Top left corner of each tile, row by row."""
        return list(product(self._starts(0), self._starts(1)))

    def _starts(self, axis: int) -> list[int]:
        size, tile = self.image_hw[axis], self.tile_hw[axis]
        step = tile - 2 * self.margin - self.ramp
        if step < 1 and tile < size:
            raise ValueError(f"a tile of {tile} pixels is too small for a margin of {self.margin}; use a larger one")
        return sorted({*range(0, max(size - tile, 0), max(step, 1)), size - tile})

    def cut(self, image: Pixels) -> Iterator[Pixels]:
        """Yield the tiles in the order of `corners`."""
        height, width = self.tile_hw
        for top, left in self.corners:
            yield np.ascontiguousarray(image[top : top + height, left : left + width])

    def blend(self, tiles: list[Pixels], scale: int) -> Pixels:
        """Put upscaled tiles together, weighted so that the weights of each pixel add up to one."""
        height, width = self.image_hw
        image = np.zeros((height * scale, width * scale, tiles[0].shape[2]), np.float32)
        rows, columns = (self._weights(axis, scale) for axis in (0, 1))
        for (top, left), tile in zip(self.corners, tiles, strict=True):
            weight = rows[top][:, None] * columns[left][None, :]
            target = image[top * scale :, left * scale :][: tile.shape[0], : tile.shape[1]]
            target += tile * weight[..., None]
        return image

    def _weights(self, axis: int, scale: int) -> dict[int, Pixels]:
        """Return the weight of each pixel of each tile along one axis, by the tile's start."""
        size, starts = self.tile_hw[axis] * scale, self._starts(axis)
        weights = {start: np.ones(size, np.float32) for start in starts}
        for first, second in pairwise(starts):
            overlap = (first + self.tile_hw[axis] - second) * scale
            fade = overlap - 2 * self.margin * scale  # both tiles are right here
            ramp = np.concatenate(
                [
                    np.zeros(self.margin * scale, np.float32),
                    (np.arange(fade, dtype=np.float32) + 0.5) / fade,
                    np.ones(self.margin * scale, np.float32),
                ]
            )
            weights[second][:overlap] *= ramp
            weights[first][size - overlap :] *= 1 - ramp
        return weights
