"""A memory pool for one graph session: what its operations allocate lives as long as its graphs (G18)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy


class PrivatePool:
    """`PrivateMemory` over a ``cupy.cuda.MemoryPool``.

    A replay uses the addresses of the capture. Memory of CuPy's common pool would be handed to strangers as soon as the
    operation returns, and a replay would then overwrite it.
    """

    def __init__(self) -> None:
        self.outside = 0
        self._pool = cupy.cuda.MemoryPool()
        self.inside = False

    @contextmanager
    def use(self) -> Iterator[None]:
        with cupy.cuda.using_allocator(self._malloc), _Watch(self):
            yield

    def _malloc(self, size: int) -> Any:
        self.inside = True
        try:
            return self._pool.malloc(size)
        finally:
            self.inside = False


class _Watch(cupy.cuda.MemoryHook):  # type: ignore[misc]
    """Counts what this thread allocates from other pools."""

    name = "pixtreme.infer"

    def __init__(self, pool: PrivatePool) -> None:
        self._pool = pool

    def malloc_preprocess(self, **_: Any) -> None:
        self._pool.outside += not self._pool.inside
