"""Verification: contract suites, image comparison, latency and telemetry, and the records they go into.

A module author observes facts and hands them to the suites of `contracts`; ``docs/writing-a-module.md`` shows how.
"""

from pixtreme.infer.verification import comparison, contracts, measurement, records
from pixtreme.infer.verification.comparison import *  # noqa: F403
from pixtreme.infer.verification.contracts import *  # noqa: F403
from pixtreme.infer.verification.measurement import *  # noqa: F403
from pixtreme.infer.verification.records import *  # noqa: F403

__all__: list[str] = []
__all__ += contracts.__all__
__all__ += comparison.__all__
__all__ += measurement.__all__
__all__ += records.__all__
