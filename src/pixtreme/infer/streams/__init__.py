"""Stream contexts, and the event-backed handles they return."""

from pixtreme.infer.runtimes import StreamLike as StreamLike
from pixtreme.infer.runtimes import available_devices as available_devices
from pixtreme.infer.streams._binding import BoundInference as BoundInference
from pixtreme.infer.streams._completion import HandleStatus as HandleStatus
from pixtreme.infer.streams._context import StreamContext as StreamContext
from pixtreme.infer.streams._handle import EventHandle as EventHandle
from pixtreme.infer.streams._planning import After as After
from pixtreme.infer.streams._several import as_completed as as_completed
from pixtreme.infer.streams._several import wait_all as wait_all

__all__ = (
    "After",
    "BoundInference",
    "EventHandle",
    "HandleStatus",
    "StreamContext",
    "StreamLike",
    "as_completed",
    "available_devices",
    "wait_all",
)
