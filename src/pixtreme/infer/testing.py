"""Tools for tests of modules and runtimes; they know no test framework.

`Latch` holds a stream in a known unfinished state, so that no test sleeps. `check_runtime` runs the contract every
runtime keeps and reports: the host runtime is thereby a verified fake of CUDA.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from pixtreme.infer._runtime_checks import CHECKS, Bench, Fault, Skipped
from pixtreme.infer.runtimes import NativeStream, Runtime, native_stream
from pixtreme.infer.streams import StreamContext

__all__ = ("Check", "Latch", "RuntimeReport", "check_runtime")


class Latch:
    """Holds streams until it is released.

    Parameters
    ----------
    *targets
        Contexts or native streams to hold at once; `hold` adds more.

    Stream order
    ------------
    What is enqueued on a held stream later waits; what was enqueued before runs.

    Host synchronization
    --------------------
    None. Leaving the with-block releases.

    Lifetime
    --------
    Release before you wait for a held stream: nothing else will. A held CUDA stream keeps one processor of the
    device busy.
    """

    def __init__(self, *targets: StreamContext | NativeStream) -> None:
        self._releases: list[Callable[[], object]] = []
        for target in targets:
            self.hold(target)

    def hold(self, target: StreamContext | NativeStream) -> None:
        """Hold one more context or native stream.

        Host synchronization
        --------------------
        None.
        """
        if isinstance(target, StreamContext):
            runtime, stream = target.core_stream.runtime, target.stream
        else:
            runtime, stream = native_stream(target)
        self._releases.append(runtime.hold(stream))

    def release(self) -> None:
        """Let every held stream go on. Idempotent.

        Host synchronization
        --------------------
        None.
        """
        for release in self._releases:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True)
class Check:
    """One statement about a runtime, and what came of it: passed, failed or skipped."""

    statement: str
    rule: str
    outcome: str
    detail: str = field(default="", compare=False)


@dataclass(frozen=True)
class RuntimeReport:
    """What `check_runtime` found. Two runtimes agree where their ``checks`` are equal."""

    device: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True where no check failed."""
        return all(check.outcome != "failed" for check in self.checks)

    def __str__(self) -> str:
        lines = [f"runtime of {self.device}:"]
        lines += [f"  {check.outcome:<8}{check.rule:<5}{check.statement} {check.detail}" for check in self.checks]
        return "\n".join(lines)


def check_runtime(factory: Callable[[], Runtime], *, fault: Fault | None = None) -> RuntimeReport:
    """Run the contract of every runtime against one.

    Parameters
    ----------
    factory
        Returns the runtime.
    fault
        Enqueues work that fails on the stream given. Without it what concerns faults is skipped: a device error stays
        with a process, so only an emulated or host device can have one on purpose.

    Returns
    -------
    RuntimeReport
        A check for each statement, failed ones with what was seen.

    Host synchronization
    --------------------
    Blocks while it runs; streams of its own are held and released.
    """
    runtime = factory()
    checks = []
    for statement, (rule, body) in CHECKS.items():
        bench = Bench(runtime, fault)
        try:
            with bench.closing():
                body(bench)
            outcome, detail = "passed", ""
        except Skipped as reason:
            outcome, detail = "skipped", f"({reason})"
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            outcome, detail = "failed", f"({error!r} at {where.name}:{where.lineno})"
        checks.append(Check(statement, rule, outcome, detail))
    return RuntimeReport(runtime.device, tuple(checks))
