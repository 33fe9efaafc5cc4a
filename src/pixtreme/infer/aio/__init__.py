"""Async pipelines and pools over streams, on asyncio (uvloop too) and trio. The only package that imports anyio.

They add no second path: everything is ``submit`` and handles.
"""

from pixtreme.infer.aio._flow import Run as Run
from pixtreme.infer.aio._pipeline import Pipeline as Pipeline
from pixtreme.infer.aio._pipeline import Stage as Stage
from pixtreme.infer.aio._pool import StreamPool as StreamPool
from pixtreme.infer.streams import as_completed as as_completed
from pixtreme.infer.streams import wait_all as wait_all

__all__ = ("Pipeline", "Run", "Stage", "StreamPool", "as_completed", "wait_all")
