"""Stream contexts, event-backed handles, and the runtimes under them."""

from pixtreme.infer.streams.binding import BoundInference as BoundInference
from pixtreme.infer.streams.context import StreamContext as StreamContext
from pixtreme.infer.streams.devices import available_devices as available_devices
from pixtreme.infer.streams.handle import EventHandle as EventHandle
from pixtreme.infer.streams.handle import as_completed as as_completed
from pixtreme.infer.streams.handle import wait_all as wait_all

__all__ = ("StreamContext", "EventHandle", "BoundInference", "wait_all", "as_completed", "available_devices")
