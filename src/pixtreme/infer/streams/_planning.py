"""What a submission waits for: decided here, before anything is enqueued, and carried out in `_context`.

Nothing in this file enqueues or waits. Every dependency is checked before the first wait is added, so that a refused
one leaves the stream as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from pixtreme.infer._containers import is_looked_into, with_items
from pixtreme.infer.errors import ContextError, ContractError
from pixtreme.infer.runtimes import NativeEvent, Runtime
from pixtreme.infer.streams._completion import Completion
from pixtreme.infer.streams._handle import EventHandle, refuse_unfilled
from pixtreme.infer.streams._stream import Stream
from pixtreme.infer.streams._values import Later

# What holds things and is not looked into; exact lists, tuples and dicts are.
_CONTAINERS = (set, frozenset, deque, Mapping, list, tuple)

After = Literal["current"] | None | Iterable[Any]


class Plan(NamedTuple):
    """What a stream has to wait for."""

    events: tuple[NativeEvent, ...]  #: recorded already
    streams: tuple[Stream, ...]  #: what is enqueued on them when the plan is carried out
    handed_over: tuple[Completion, ...]  #: whose value, and fault, the stream takes on


NOTHING = Plan((), (), ())


def plan_waits(stream: Stream, dependencies: Iterable[Any]) -> Plan:
    """Check every dependency of work on ``stream``, and return what it has to wait for.

    Parameters
    ----------
    dependencies
        Handles, contexts, native events, native streams and `Stream` objects.

    Raises
    ------
    ContractError, ContextError
        Something else, something of another runtime, or host memory that is not filled yet.
    StreamFault
        A handle is known to have faulted.
    """
    events: list[NativeEvent] = []
    streams: list[Stream] = []
    handed_over: list[Completion] = []
    runtime = stream.runtime
    for dependency in dependencies:
        if isinstance(dependency, EventHandle):
            completion = dependency.completion
            _check_runtime(stream, dependency, completion.stream.runtime)
            completion.raise_fault()
            if completion.done:
                continue
            refuse_unfilled(dependency, stream.place)
            if completion.stream != stream:  # else it is in order already
                events.append(completion.event)
            handed_over.append(completion)
        elif isinstance(dependency, Stream):
            if dependency != stream:
                streams.append(dependency)
        elif isinstance(other := getattr(dependency, "core_stream", None), Stream):  # a context
            _check_runtime(stream, dependency, other.runtime)
            if dependency.closed:
                dependency.check_usable()  # says so
            if other != stream:
                streams.append(other)
        elif runtime.is_event(dependency):
            events.append(dependency)
        elif runtime.is_stream(dependency):
            if runtime.key(dependency) != stream.key:
                streams.append(Stream(runtime, dependency))
        else:
            raise ContractError(
                why="a stream waits for handles, events, contexts and native streams",
                what=f"received {dependency!r} as a dependency of {stream.place}",
                how="pass what submit() or record() returned, a context, or a native event or stream of the same "
                "runtime",
            )
    return Plan(tuple(events), tuple(streams), tuple(handed_over)) if events or streams or handed_over else NOTHING


def named_by(after: After, stream: Stream) -> list[Any]:
    """Return the dependencies that ``after`` names for work on ``stream``; ``"current"`` is this thread's stream."""
    if after is None:
        return []
    if not isinstance(after, str) or after != "current":
        if _names_dependencies(after):
            return list(after)
        raise ContractError(
            why="after names what the work waits for",
            what=f"received after={after!r}; accepted are 'current', None and a list of dependencies",
            how="pass a list, such as after=[handle]",
        )
    runtime = stream.runtime.here()  # the caller's device may be another one than this stream's
    native = runtime.current()
    if native is None:
        return []
    caller = Stream(runtime, native)
    if caller == stream:
        return []
    caller.refuse_while_capturing(f"ordering {stream.place} after it")
    return [caller]


def _names_dependencies(after: object) -> bool:
    if isinstance(after, str | bytes | Mapping) or hasattr(after, "__dlpack__"):
        return False
    return isinstance(after, Iterable)


def replace_handles[A](value: A, found: list[EventHandle[Any]], *, later: bool = False) -> A:
    """Return ``value`` with every handle in it replaced by the handle's value, and add those handles to ``found``.

    Looks inside lists, tuples (named ones too) and dict values. A container without a handle is returned itself, so
    that a function may fill a list it was given. ``later``: the function is called in stream order, not now.

    Raises
    ------
    ContractError
        A handle stands in another container, a set or a dataclass say, which cannot be made again with the value.
    """
    match _place_of(type(value)):  # type: ignore[arg-type]  # mypy: a type parameter counts as unhashable
        case _Place.ELSEWHERE:
            return value
        case _Place.HERE:
            assert isinstance(value, EventHandle)
            found.append(value)
            swapped: Any = value.value_in_order if later else value.value_here
            return swapped  # type: ignore[no-any-return]
        case _Place.INSIDE:
            if isinstance(value, dict) and any(isinstance(key, EventHandle) for key in value):
                _refuse_hidden(value)
            return with_items(value, partial(replace_handles, found=found, later=later))
    _refuse_hidden(value)
    return value


def resolved[A](value: A) -> A:
    """Return ``value``, on its stream, with what enqueued functions returned in place of what holds it."""
    if isinstance(value, Later):
        known: A = value.value
        return known
    return with_items(value, resolved) if is_looked_into(value) else value


class _Place(Enum):
    """Where a handle may be in values of a class."""

    ELSEWHERE = "elsewhere"
    HERE = "here"  #: the value is one
    INSIDE = "inside"  #: in a container that is looked into
    HIDDEN = "hidden"  #: in one that is not


@lru_cache(maxsize=1024)  # it is asked for every argument of every request
def _place_of(kind: type) -> _Place:
    if issubclass(kind, EventHandle):
        return _Place.HERE
    if kind in (list, tuple, dict) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return _Place.INSIDE
    hides = issubclass(kind, _CONTAINERS) or hasattr(kind, "__dataclass_fields__")
    return _Place.HIDDEN if hides else _Place.ELSEWHERE


def _refuse_hidden(value: Any) -> None:
    """Raise where a container that is not looked into holds a handle: the function would take it for its value."""
    if isinstance(value, Mapping):
        held = [*value, *value.values()]
    elif isinstance(value, _CONTAINERS):
        held = list(value)
    else:
        held = [getattr(value, name, None) for name in type(value).__dataclass_fields__]
    for item in held:
        if isinstance(item, EventHandle):
            raise ContractError(
                why="a handle among the arguments is replaced by its value, inside lists, tuples and dict values only",
                what=f"received {item!r} inside a {type(value).__qualname__}",
                how="pass it in a list, a tuple or a dict, or as an argument of its own",
            )


def _check_runtime(stream: Stream, thing: object, runtime: Runtime) -> None:
    if runtime is not stream.runtime:
        raise ContextError(
            why="streams of different runtimes cannot wait for each other on the device",
            what=f"{stream.place} was given {thing!r} of {runtime.device}",
            how="await the handle and pass its value, or stage the data to the other device",
        )
