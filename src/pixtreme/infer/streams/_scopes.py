"""`use()` scopes: which stream is current on this thread, and putting back exactly what was found (S4).

A current stream belongs to a thread, not to a task. Each entry stands on its thread's stack, so that a scope left
elsewhere, or out of order, is noticed instead of restoring the wrong stream. An entry also collects what belongs to the
work enqueued inside it: what must stay alive until that work is complete, and what the host does then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

from pixtreme.infer.errors import ContextError
from pixtreme.infer.runtimes import current_runtime
from pixtreme.infer.streams._completion import HostEpilogue
from pixtreme.infer.streams._stream import Stream

Leave = Callable[[list[object], HostEpilogue | None], object]


class Entry:
    """One entered scope."""

    __slots__ = ("epilogue", "kept", "leave", "left", "owner", "put_back", "stream")

    def __init__(self, stream: Stream, owner: object, leave: Leave | None) -> None:
        self.stream = stream
        self.owner = owner  # the context, for `StreamContext.current` and messages
        self.leave = leave  # takes what was collected, where nobody recorded an event for it
        self.left = False
        self.kept: list[object] = []
        self.epilogue: HostEpilogue | None = None
        self.put_back = stream.activate()


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def settle(self) -> list[Entry]:
        """Put back what scopes left out of order could not; return what is entered now."""
        entries = self.entries
        while entries and entries[-1].left:
            entries.pop().put_back()
        return entries


_stack = _Stack()


def enter(stream: Stream, owner: object, leave: Leave | None = None) -> Entry:
    """Make a stream current for this thread, until `leave_entry`."""
    entries = _stack.settle()
    entry = Entry(stream, owner, leave)
    entries.append(entry)
    return entry


def leave_entry(entry: Entry) -> None:
    """Leave a scope: what it collected is passed on, and what was current before is current again.

    Raises
    ------
    ContextError
        Another thread entered it, or a scope entered later is not left yet; nothing that was collected is lost.
    """
    entry.left = True
    entries = _stack.entries
    in_order = bool(entries) and entries[-1] is entry
    try:
        if entry.leave is not None and (entry.kept or entry.epilogue is not None):
            entry.leave(entry.kept, entry.epilogue)
    finally:
        if in_order:
            _stack.settle()
    if not in_order:
        _refuse_order(entry, entries)


def current() -> Entry | None:
    """Return this thread's innermost entry."""
    entries = _stack.settle()
    return entries[-1] if entries else None


def entry_of(stream: Stream) -> Entry | None:
    """Return this thread's innermost entry of one stream."""
    return next((entry for entry in reversed(_stack.settle()) if entry.stream == stream), None)


def is_entered_here(owner: object) -> bool:
    """Tell whether this thread is inside a scope of ``owner``."""
    return any(entry.owner is owner for entry in _stack.settle())


def add_epilogue(stream: Stream, call: Callable[[], object], *, fills_host: bool = False) -> None:
    """Have the host call something once the work of this thread's innermost scope of ``stream`` is over (A12)."""
    entry = entry_of(stream)
    assert entry is not None  # callers are inside one
    if entry.epilogue is None:
        entry.epilogue = HostEpilogue()
    entry.epilogue.add(call, fills_host=fills_host)


def take_epilogue(stream: Stream) -> HostEpilogue | None:
    """Return, and forget, what the host does once the work that this thread's scopes of ``stream`` enqueued is over."""
    taken: HostEpilogue | None = None
    for entry in _stack.entries:
        if entry.epilogue is None or entry.stream != stream:
            continue
        found, entry.epilogue = entry.epilogue, None
        if taken is None:
            taken = found
        else:
            taken.calls += found.calls
            taken.fills_host |= found.fills_host
    return taken


def current_stream(why: str) -> Stream:
    """Return this thread's current stream: the innermost scope's device decides; outside any, CUDA's current device.

    Raises
    ------
    ContextError
        No explicit stream is current; ``why`` says what needs one.
    """
    entry = current()
    runtime = entry.stream.runtime if entry is not None else current_runtime()
    native = runtime.current()
    if native is None:
        raise ContextError(
            why=why,
            what="no explicit stream is current on this thread",
            how="call it inside `with context.use():`",
        )
    if entry is not None and runtime.key(native) == entry.stream.key:
        return entry.stream
    return Stream(runtime, native)


class Scope:
    """Makes a context's device and stream current for this thread; may be entered again and nested."""

    def __init__(self, make_entry: Callable[[], Entry]) -> None:
        self._make_entry = make_entry
        self._entered: list[Entry] = []

    def __enter__(self) -> None:
        self._entered.append(self._make_entry())

    def __exit__(self, *_: object) -> None:
        leave_entry(self._entered.pop())


def refuse_outside() -> NoReturn:
    """Raise where a context must be current and none is."""
    raise ContextError(
        why="a current context exists only inside a use() scope of this thread",
        what=f"thread {threading.current_thread().name!r} is inside no scope",
        how="call this inside `with context.use():`, or name the context",
    )


def _refuse_order(entry: Entry, entries: list[Entry]) -> NoReturn:
    if entry not in entries:
        how = "by another thread than the one that entered it"
    else:
        how = f"while {entries[-1].owner!r} was entered later and not left yet"
    raise ContextError(
        why="use() scopes belong to one thread and nest strictly",
        what=f"the scope of {entry.owner!r} was left {how}",
        how="do not await inside a use() scope, and leave scopes where and in the reverse order they were entered; "
        "the stream found at first is current again once the scopes above this one are left",
    )
