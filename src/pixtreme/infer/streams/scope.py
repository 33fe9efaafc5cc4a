"""`use()` scopes: which context is current on this thread, and putting back exactly what was found (S4).

A current stream belongs to a thread, not to a task. Each entry remembers its thread by standing on that thread's
stack, so that a scope left elsewhere, or out of order, is noticed instead of restoring the wrong stream.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn

from pixtreme.infer.errors import ContextError

if TYPE_CHECKING:
    from pixtreme.infer.streams.lane import Lane


class _Entry:
    """One entered scope: how to put back what was current before."""

    def __init__(self, context: Lane) -> None:
        self.context = context
        self.left = False
        self.put_back = context._runtime.activate(context._stream)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[_Entry] = []

    def settle(self) -> None:
        """Put back what scopes left out of order could not."""
        while self.entries and self.entries[-1].left:
            self.entries.pop().put_back()


_stack = _Stack()


class Scope:
    """Makes a context's device and stream current for this thread; may be entered again and nested."""

    def __init__(self, context: Lane, *, even_closing: bool = False) -> None:
        self._context = context
        self._even_closing = even_closing
        self._entered: list[_Entry] = []

    def __enter__(self) -> None:
        if not self._even_closing:
            self._context._check_open()
        _stack.settle()
        entry = _Entry(self._context)
        _stack.entries.append(entry)
        self._entered.append(entry)

    def __exit__(self, *_: object) -> None:
        entry = self._entered.pop()
        entry.left = True
        if entry not in _stack.entries:
            self._refuse("by another thread than the one that entered it")
        if _stack.entries[-1] is not entry:
            self._refuse(f"while {_stack.entries[-1].context!r} was entered later and not left yet")
        try:
            self._context._scope_left()
        finally:
            _stack.settle()

    def _refuse(self, how: str) -> NoReturn:
        raise ContextError(
            why="use() scopes belong to one thread and nest strictly",
            what=f"the scope of {self._context!r} was left {how}",
            how="do not await inside a use() scope, and leave scopes where and in the reverse order they were entered; "
            "the stream found at first is current again once the scopes above this one are left",
        )


def current_context() -> Lane | None:
    """Return the context of this thread's innermost scope."""
    _stack.settle()
    return _stack.entries[-1].context if _stack.entries else None


def is_entered_here(context: Lane) -> bool:
    """Tell whether this thread is inside a scope of ``context``."""
    _stack.settle()
    return any(entry.context is context for entry in _stack.entries)
