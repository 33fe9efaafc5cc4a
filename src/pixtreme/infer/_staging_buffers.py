"""A copy with its page-locked buffer reserved. Public via `staging`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from pixtreme.infer.runtimes import runtime_for
from pixtreme.infer.streams import StreamContext
from pixtreme.infer.streams._copies import Copy, Lease, StagingPool, lease_blocking, lease_waiting, pool_of


def pool(device: str | int | StreamContext) -> StagingPool:
    """Return the pool of a device, named as for `StreamContext.open` or by a context on it.

    Raises
    ------
    ContextError
        The device cannot be used.

    Host synchronization
    --------------------
    None.
    """
    runtime = device.core_stream.runtime if isinstance(device, StreamContext) else runtime_for(device)
    return pool_of(runtime)


class Reservation:
    """A copy with its buffer: entering waits for one, leaving gives it back unless the copy has taken it.

    Enter it with ``with``, which blocks, or ``async with``; both give the callable to submit. Where the device needs no
    buffers nothing waits. Made by `staging.Upload.reserve` and `staging.Download.reserve`.
    """

    def __init__(self, context: StreamContext, copy: Copy, name: str) -> None:
        self.__qualname__ = name  # what messages call the submission
        self._copy = copy
        self._pools = [pool(context)] if context.core_stream.runtime.needs_staging else []
        self._leaving = ExitStack()
        self._lease: Lease | None = None

    def __call__(self, source: Any, /) -> Any:
        """Enqueue the copy inside ``use()`` or a submission.

        Stream order
        ------------
        As `staging.copy_in` and `staging.copy_out`.

        Host synchronization
        --------------------
        As `staging.copy_in` and `staging.copy_out`.

        Lifetime
        --------
        As `staging.copy_in` and `staging.copy_out`.
        """
        lease = self._lease if self._lease is not None and not self._lease.taken else None
        return self._copy(source, lease)

    def __enter__(self) -> Self:
        self._lease = self._leaving.enter_context(lease_blocking(self._pools))
        return self

    async def __aenter__(self) -> Self:
        self._lease = self._leaving.enter_context(await lease_waiting(self._pools))
        return self

    def __exit__(self, *_: object) -> None:
        self._lease = None
        self._leaving.close()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()
