"""Ten thousand items, cancelled, timed out and left early at random (A3-A6): nothing leaks, doubles or gets lost."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest

from pixtreme.infer.aio import Pipeline, Stage
from pixtreme.infer.errors import PipelineError
from pixtreme.infer.streams import StreamContext

ITEMS = 10_000


class Cell:
    """A value that can be referred to weakly, and says when it is read after it should be gone."""

    __slots__ = ("__weakref__", "array")

    def __init__(self, number: float) -> None:
        self.array = np.full(64, number)


class Storm:
    """Counts what lives and what was delivered."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.alive: weakref.WeakSet[Cell] = weakref.WeakSet()
        self.read = 0
        self.delivered = 0
        self.failures = 0

    def cell(self, number: float) -> Cell:
        made = Cell(number)
        self.alive.add(made)
        return made

    def source(self, count: int) -> Iterator[Cell]:
        for number in range(count):
            self.read += 1
            yield self.cell(float(number))

    def stage(self, context: StreamContext, *, fails: bool = False) -> Any:
        def call(cell: Cell) -> Cell:
            if fails and self.random.random() < 0.002:
                raise ArithmeticError
            result = self.cell(-1.0)
            context.stream.enqueue(np.add, cell.array, 1.0, result.array)
            return result

        return call

    def patience(self) -> float | None:
        return self.random.choice([None, None, None, 0.0, 0.0005, 0.002])

    async def block(self, contexts: list[StreamContext]) -> None:
        """One pipeline, which may be cancelled anywhere, and left anywhere."""
        stages = [
            Stage(
                context,
                self.stage(context, fails=position == 1),
                in_thread=position == 1 and self.random.random() < 0.3,
            )
            for position, context in enumerate(contexts)
        ]
        count, leave = self.random.randint(1, 400), self.random.choice([0, 7, 10**6])
        whole = self.random.choice([None, None, 0.0, 0.005, 0.02])
        with anyio.move_on_after(whole):
            async with Pipeline(*stages, depth=self.random.randint(1, 6)) as pipeline:
                run = pipeline.run(self.source(count), blocking_source=self.random.random() < 0.2)
                expected = 0
                while expected < leave:
                    with anyio.move_on_after(self.patience()):
                        try:
                            result = await anext(run)
                        except StopAsyncIteration:
                            assert expected == count
                            break
                        except PipelineError as error:
                            assert error.index == expected
                            assert isinstance(error.__cause__, ArithmeticError)
                            self.failures += 1
                            break
                        assert (result.array == expected + len(contexts)).all()  # in order, once, and not reused
                        expected += 1
                        self.delivered += 1


@pytest.mark.anyio
@pytest.mark.slow
async def test_cancel_storm() -> None:
    """A3, A4, A5, A6: random cancellation, timeouts and early ends at every await; afterwards nothing is left."""
    storm = Storm(seed=57)
    contexts = [StreamContext.open("cpu", max_in_flight=bound) for bound in (None, 3, None)]
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("pixtreme.infer")}
    while storm.read < ITEMS:
        await storm.block(contexts)
        assert [context.in_flight for context in contexts] == [0, 0, 0]
    assert storm.delivered > ITEMS / 20
    assert storm.failures > 0
    started = {thread for thread in threading.enumerate() if thread.name.startswith("pixtreme.infer")} - threads
    assert len(started) <= len(contexts)
    for context in contexts:
        await context.aclose()
    gc.collect()
    assert len(storm.alive) == 0
