"""Contexts and handles on the CUDA runtime: the same program, on real CuPy."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import anyio
import cupy
import numpy as np
import pytest
from helpers import WAIT_S, LogRecords

from pixtreme.infer.errors import ClosedError, ContextError, ContractError, HandleTimeout, StreamFault
from pixtreme.infer.streams import StreamContext, as_completed, available_devices, wait_all

pytestmark = pytest.mark.cuda


def waiters() -> int:
    return sum(thread.name == "pixtreme.infer completion" for thread in threading.enumerate())


def double(array: Any) -> Any:
    return array * 2


def test_open_and_devices() -> None:
    """S1, S11, S26: an explicit non-blocking stream on the device; auto prefers it."""
    assert available_devices()[0] == "cuda:0"
    assert available_devices()[-1] == "cpu"
    for name in ("auto", "cuda", "cuda:0", 0):
        with StreamContext.open(name, priority=-1) as context:
            assert (context.device, context.stream.is_non_blocking) == ("cuda:0", True)
            assert context.stream.ptr not in (0, 1, 2)
    with pytest.raises(ContextError, match=r"'cuda:99'.*'cuda:0'"):
        StreamContext.open("cuda:99")


def test_use_makes_the_stream_current(context: StreamContext, other: StreamContext) -> None:
    """S4: for CuPy too, and what was found is put back, inside a plain CuPy scope as well."""
    plain = cupy.cuda.Stream(non_blocking=True)
    with plain:
        with context.use():
            assert cupy.cuda.get_current_stream() == context.stream
            with other.use():
                assert cupy.cuda.get_current_stream() == other.stream
            assert cupy.cuda.get_current_stream() == context.stream
        assert cupy.cuda.get_current_stream() is plain
    assert cupy.cuda.get_current_stream().ptr == 0


def test_pending_then_complete(context: StreamContext, emulator: Any) -> None:
    """S13, S19, S24b: a handle is pending while its stream is held; a timeout leaves it usable."""
    emulator.hold(context.stream)
    handle = context.submit(double, cupy.arange(4, dtype="f4"))
    assert not handle.done()
    assert context.in_flight == 1
    with pytest.raises(HandleTimeout):
        handle.result(0.01)
    emulator.release()
    assert handle.result(WAIT_S).get().tolist() == [0, 2, 4, 6]
    assert (handle.done(), context.in_flight) == (True, 0)


def test_no_thread_before_somebody_waits(context: StreamContext, emulator: Any) -> None:
    """S21, S25: no completion thread until a wait needs it, then one for the context, however many handles pend."""
    done = context.submit(double, cupy.zeros(4))
    cupy.cuda.runtime.deviceSynchronize()
    context.submit(lambda: None)  # the next event finds what is complete
    assert (done.done(), waiters()) == (True, 0)
    emulator.hold(context.stream)
    handles = [context.submit(int, number) for number in range(1000)]
    assert waiters() == 0
    seen: list[int] = []
    for handle in handles:
        handle.call_when_done(lambda handle: seen.append(handle.result()))
    assert waiters() == 1
    emulator.release()
    handles[-1].result(WAIT_S)
    context.synchronize()
    assert seen == list(range(1000))
    assert waiters() == 1


def test_the_waiter_ends_with_the_context(emulator: Any) -> None:
    """S3: closing drains, and ends the thread; the stream goes with its last reference."""
    gc.collect()
    before = emulator.live(0), emulator.live(1)
    context = StreamContext.open("cuda:0")
    emulator.hold(context.stream)
    handle = context.submit(double, cupy.ones(3))
    handle.call_when_done(lambda _: None)
    thread = next(thread for thread in threading.enumerate() if thread.name == "pixtreme.infer completion")
    emulator.release()
    context.close()
    assert handle.result().get().tolist() == [2, 2, 2]
    thread.join(WAIT_S)
    assert not thread.is_alive()
    with pytest.raises(ClosedError):
        context.submit(double, 1)
    del context, handle, thread
    gc.collect()
    assert (emulator.live(0), emulator.live(1)) == before


@pytest.mark.anyio
async def test_await(context: StreamContext, other: StreamContext, emulator: Any) -> None:
    """S14, S20, S21: asyncio, uvloop and trio; many tasks on one handle, many handles, in order."""
    double(cupy.full(2, 0)) + 1  # compiles: what a user's function does on the loop is its affair
    emulator.hold(context.stream)
    handles = [context.submit(double, cupy.full(2, number)) for number in range(50)]
    chained = other.submit(lambda array: array + 1, handles[10])
    results: list[float] = []

    async def take() -> None:
        results.append(float((await chained).get()[0]))

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(take)
        with anyio.move_on_after(0.01):
            await handles[0]
        assert not handles[0].done()
        emulator.release()
    assert results == [21.0] * 5
    assert [float(array.get()[0]) for array in await wait_all(handles)] == [2.0 * n for n in range(50)]
    assert [handle async for handle in as_completed(handles[:3])] == handles[:3]


def test_order_between_streams(context: StreamContext, other: StreamContext, emulator: Any) -> None:
    """S5, S8, S16: handed-over work waits on the device; the host does not."""
    array = cupy.arange(4, dtype="f4")
    cupy.cuda.runtime.deviceSynchronize()
    emulator.hold(context.stream)
    first = context.submit(double, array)
    second = other.submit(lambda value: value + 1, first)
    other.wait(first, first.event, context, context.stream)
    third = second.then(context, double)
    assert [handle.done() for handle in (first, second, third)] == [False] * 3
    emulator.release()
    assert third.result(WAIT_S).get().tolist() == [2, 6, 10, 14]


def test_after_current(context: StreamContext, emulator: Any) -> None:
    """S5: inputs just produced on the caller's current stream are safe; after=None opts out."""
    producer = cupy.cuda.Stream(non_blocking=True)
    with producer:
        array = cupy.zeros(4, "f4")
        emulator.hold(producer)
        array += 3
        free = context.submit(lambda: None, after=None)
        ordered = context.submit(double, array)
    free.result(WAIT_S)
    assert not ordered.done()
    emulator.release()
    assert ordered.result(WAIT_S).get().tolist() == [6, 6, 6, 6]


def test_what_is_kept(context: StreamContext, emulator: Any) -> None:
    """S5, S15: arguments and result live until the event completes, dropped handle or not."""

    class Argument:
        pass

    argument = Argument()
    alive = weakref.ref(argument)
    emulator.hold(context.stream)
    handle = context.submit(lambda thing: None, argument)
    handle.call_when_done(lambda _: None)
    del handle, argument
    gc.collect()
    assert alive() is not None
    emulator.release()
    context.synchronize()
    gc.collect()
    assert alive() is None


def test_nothing_is_kept_without_a_wait(context: StreamContext) -> None:
    """S21: a program that never waits does not pile up what its work used."""
    references = []
    for _ in range(20):
        array = cupy.zeros(8)
        references.append(weakref.ref(array))
        context.submit(double, array)
        cupy.cuda.runtime.deviceSynchronize()
    del array
    gc.collect()
    assert sum(reference() is not None for reference in references) <= 1
    assert waiters() == 0


def test_elapsed(emulator: Any) -> None:
    """S13: timing events where asked for."""
    with StreamContext.open("cuda:0", timing=True) as context:
        first = context.record()
        second = context.submit(double, cupy.ones(4))
        second.result(WAIT_S)
        assert second.elapsed_ms(first) >= 0


def test_a_device_error(emulator: Any, log: LogRecords) -> None:
    """S18, S24a: it reaches every handle it broke and the context, once, with CuPy's exception as cause."""
    context = StreamContext.open("cuda:0", name="broken")
    complete = context.submit(lambda: 1)
    assert complete.result(WAIT_S) == 1
    emulator.hold(context.stream)
    emulator.fault(context.stream)
    handles = [context.submit(int, number) for number in range(3)]
    seen: list[object] = []
    handles[0].call_when_done(lambda handle: seen.append(handle.status.value))
    emulator.release()
    for handle in handles:
        with pytest.raises(StreamFault) as raised:
            handle.result(WAIT_S)
        assert isinstance(raised.value.__cause__, cupy.cuda.runtime.CUDARuntimeError)
        assert raised.value.__cause__.status == 700
    assert (complete.result(), seen, context.faulted) == (1, ["faulted"], True)
    with pytest.raises(StreamFault):
        context.submit(lambda: 1)
    emulator.reset()
    context.close()
    assert log.take() == []


def test_a_device_that_stays_broken(emulator: Any) -> None:
    """S18, S3: with an error that stays, as on a card, the fault comes out of the block, closing neither hangs nor
    hides it, and later calls say what is wrong."""
    program = """
import ctypes, threading
from pixtreme.infer.errors import StreamFault
from pixtreme.infer.streams import StreamContext
emulator, flag = ctypes.CDLL("libcudart.so.12"), ctypes.c_int(0)
other = StreamContext.open("cuda:0")
try:
    with StreamContext.open("cuda:0") as context:
        stream = ctypes.c_void_p(context.stream.ptr)
        emulator.emu_block(stream, ctypes.byref(flag))
        emulator.emu_fault(stream, 700)
        handles = [context.submit(int) for _ in range(3)]
        flag.value = 1
        handles[1].result(20)
except StreamFault as fault:
    handles[2].exception(20)  # its report is on the way: a broken device takes no event that close() could wait for
    print(type(fault.__cause__).__name__, context.closed, [handle.status.value for handle in handles])
try:
    other.synchronize()
except StreamFault as fault:
    print(type(fault.__cause__).__name__)
other.close()
print(other.closed)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": _source()},
        capture_output=True,
        text=True,
        timeout=50,
    )
    lines = done.stdout.splitlines()
    assert lines == ["CUDARuntimeError True ['faulted', 'faulted', 'faulted']", "CUDARuntimeError", "True"], done.stderr


def test_global_capture_elsewhere(context: StreamContext, emulator: Any) -> None:
    """S24: another thread captures in global mode, as PyTorch and ONNX Runtime do, while our waiter waits."""
    emulator.hold(context.stream)
    handle = context.submit(double, cupy.ones(2))
    handle.call_when_done(lambda _: None)  # the waiter now blocks in the event
    stream, failed = cupy.cuda.Stream(non_blocking=True), []
    source, target = cupy.ones(4), cupy.zeros(4)
    capturing, go_on = threading.Event(), threading.Event()

    def capture() -> None:
        try:
            with stream:
                stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
                cupy.copyto(target, source)
                capturing.set()
                assert go_on.wait(WAIT_S)
                graph = stream.end_capture()
                graph.launch(stream)
                stream.synchronize()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=capture)
    thread.start()
    assert capturing.wait(WAIT_S)
    emulator.release()
    assert handle.result(WAIT_S).get.__name__ == "get"
    context.submit(lambda: None)  # looks and waits go on beside the capture
    go_on.set()
    thread.join(WAIT_S)
    assert failed == []
    assert target.get().tolist() == [1, 1, 1, 1]


class Foreign:
    """A stream of another library."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def test_adopt(emulator: Any) -> None:
    """S2, S33: CuPy's and other libraries' streams; closing leaves the stream alone; two contexts know each other."""
    stream = cupy.cuda.Stream(non_blocking=True)
    for thing in (stream, Foreign(stream.ptr)):
        with StreamContext.adopt(thing) as first, StreamContext.adopt(stream) as second:
            assert first.__cuda_stream__() == (0, stream.ptr)
            assert first.core_stream.key == second.core_stream.key
            emulator.hold(stream)
            handle = first.submit(double, cupy.ones(2))
            second.submit(lambda value: value, handle).call_when_done(lambda _: None)
            emulator.release()
            assert handle.result(WAIT_S).get().tolist() == [2, 2]
    stream.synchronize()
    with StreamContext.open("cuda:0") as context:
        assert cupy.cuda.Stream.from_external(context).ptr == context.stream.ptr
    for default in (cupy.cuda.Stream.null, cupy.cuda.Stream(ptds=True), Foreign(1)):
        with pytest.raises(ContextError, match="default stream"):
            StreamContext.adopt(default)
    with pytest.raises(ContextError, match="no CUDA stream"), StreamContext.open("cpu") as host:
        host.__cuda_stream__()
    deadline = time.monotonic() + WAIT_S
    while waiters() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert waiters() == 0


def test_identity_of_a_reused_pointer() -> None:
    """S33: a pointer the driver gives out again is another stream."""
    first = StreamContext.open("cuda:0")
    key = first.core_stream.key
    first.close()
    del first
    gc.collect()
    with StreamContext.open("cuda:0") as second:
        assert second.core_stream.key != key


def test_runtimes_do_not_mix(context: StreamContext) -> None:
    """S16: handing over between CPU and CUDA is refused, and points to await and staging."""
    with StreamContext.open("cpu") as host:
        for giver, taker in ((context, host), (host, context)):
            with pytest.raises(ContextError, match="await"):
                taker.submit(lambda value: value, giver.submit(lambda: 1))


def test_dlpack(context: StreamContext, other: StreamContext, emulator: Any) -> None:
    """S17, S16: a consumer's stream waits for the work, whichever way it names the stream; the value is kept."""
    array = cupy.arange(4, dtype="f4")
    plain = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    emulator.hold(context.stream)
    handle = context.submit(double, array)
    assert handle.__dlpack_device__() == (2, 0)
    results = []
    for stream in (plain, other.stream):
        with stream:
            view = cupy.from_dlpack(handle)
            results.append(view + 1)
    handle.__dlpack__(stream=-1)
    handle.__dlpack__(stream=plain.ptr, max_version=(1, 0))
    for bad in (0, -2, True, "1"):
        with pytest.raises(ContractError, match="accepted are None, -1, 1, 2"):
            handle.__dlpack__(stream=bad)  # type: ignore[arg-type]
    done = cupy.cuda.Event()
    done.record(plain)
    assert cupy.cuda.runtime.eventQuery(done.ptr) == 600
    del handle
    gc.collect()
    emulator.release()
    plain.synchronize()
    other.synchronize()
    assert [result.get().tolist() for result in results] == [[1, 3, 5, 7]] * 2
    legacy = context.submit(double, array)
    assert cupy.from_dlpack(legacy).get().tolist() == [0, 2, 4, 6]
    with pytest.raises(ContractError, match="array or frame"):
        context.submit(lambda: 1).__dlpack__()


def test_a_dropped_context_leaves_no_stream(emulator: Any) -> None:
    """S12, S15, S34: work that nobody waits for is reported, and context, stream and thread go by themselves."""
    context = StreamContext.open("cuda:0")
    emulator.hold(context.stream)
    context.submit(lambda: cupy.ones(4) * 2)
    stream = weakref.ref(context.stream)
    with pytest.warns(ResourceWarning, match="dropped"):
        del context
        gc.collect()
    assert stream() is not None  # its work is under way
    emulator.release()
    for thread in threading.enumerate():
        if thread.name == "pixtreme.infer completion":
            thread.join(WAIT_S)
    gc.collect()
    assert stream() is None


PROGRAM = """
import random, sys
import cupy
from pixtreme.infer.streams import StreamContext, _recorder
if sys.argv[2] == "drop":  # the retention of S16 taken out: nothing handed over is kept
    _recorder.Recorder.keep = lambda self, values: None
    real = _recorder.Completion
    _recorder.Completion = lambda *args, **options: real(*args[:4], None, *args[5:], **options)
order = random.Random(int(sys.argv[1]))
wrong = 0
with StreamContext.open("cuda:0") as first, StreamContext.open("cuda:0") as second:
    pairs = [(first, second), (second, first)]
    checks = []
    for number in range(1000):
        giver, taker = order.choice(pairs)
        handle = giver.submit(lambda: cupy.full(64, number, "f4"))
        if order.random() < 0.5:
            result = taker.submit(lambda value: value + 1, handle)
        else:
            with taker.use():
                result = taker.record(handle.on(taker) + 1)
        checks.append((number, result))
        del handle  # freed on its own stream, while the other may not have read it yet
        if order.random() < 0.3:
            giver.submit(lambda: cupy.full(64, -1, "f4"))  # what would take its place
        if len(checks) > 8:
            number, result = checks.pop(0)
            wrong += int((result.result().get() != number + 1).any())
print(wrong)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_memory_handed_over(emulator: Any, seed: int) -> None:
    """S16: 1,000 random hand-overs with delays and poison never read reused memory; without retention they do."""
    found = []
    for mode in ("keep", "drop"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(seed), mode],
            env=os.environ | {"EMU_DELAY_US": "200", "EMU_POISON": "1", "EMU_SEED": str(seed), "PYTHONPATH": _source()},
            capture_output=True,
            text=True,
            timeout=55,
        )
        assert done.returncode == 0, done.stderr
        found.append(int(done.stdout))
    assert found[0] == 0
    assert found[1] > 0


def test_blocking_launch(emulator: Any) -> None:
    """S32: with PIXTREME_INFER_LAUNCH_BLOCKING every submission is over when it returns."""
    program = """
import cupy, threading
from pixtreme.infer.streams import StreamContext
with StreamContext.open("cuda:0") as context:
    handles = [context.submit(lambda: cupy.ones(2) * 2) for _ in range(10)]
    print(all(handle.done() for handle in handles), threading.active_count())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PIXTREME_INFER_LAUNCH_BLOCKING": "1", "EMU_DELAY_US": "2000", "PYTHONPATH": _source()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "1"]


@pytest.mark.parametrize("end", ["open", "pending", "awaited"])
def test_exit(emulator: Any, end: str) -> None:
    """S12: at interpreter exit open contexts neither hang nor print a traceback."""
    program = f"""
import cupy
from pixtreme.infer.streams import StreamContext
context = StreamContext.open("cuda:0")
if {end!r} != "open":
    handle = context.submit(lambda: cupy.ones(2) * 2)
if {end!r} == "awaited":
    handle.call_when_done(lambda _: None)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", program],
        env=os.environ | {"EMU_DELAY_US": "20000", "PYTHONPATH": _source()},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_fork(context: StreamContext) -> None:
    """S12: use in a forked child is an error that says so, not a hang."""
    if (child := os.fork()) == 0:
        try:
            context.submit(lambda: 1)
        except ContextError as error:
            os._exit(17 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17


def _source() -> str:
    import pixtreme.infer

    return str(Path(pixtreme.infer.__file__).parents[2])


def test_numpy_is_not_needed_on_the_device(context: StreamContext) -> None:
    """S5: the result is an array of the device; NumPy sees it only when asked."""
    assert isinstance(context.submit(double, cupy.ones(2)).result(WAIT_S), cupy.ndarray)
    assert np.array_equal(context.submit(double, cupy.ones(2)).result(WAIT_S).get(), [2, 2])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # CuPy's destructors on a broken device
def test_conformance(emulator: Any) -> None:
    """S31, S28, S29, S30: the same suite as on the host runtime, with the same report."""
    from samples import break_host_stream

    from pixtreme.infer.runtimes.cuda import runtime_of
    from pixtreme.infer.runtimes.host import HostRuntime
    from pixtreme.infer.testing import check_runtime

    report = check_runtime(lambda: runtime_of(0), fault=emulator.fault)
    emulator.reset()
    assert report.passed, str(report)
    assert report.checks == check_runtime(HostRuntime, fault=break_host_stream).checks


def test_latch(context: StreamContext, other: StreamContext) -> None:
    """S31: a latch holds a stream of any card, by a kernel that waits for a flag."""
    from pixtreme.infer.testing import Latch

    with Latch(context) as latch:
        handle = context.submit(double, cupy.ones(2))
        assert other.submit(lambda: 1).result(WAIT_S) == 1
        assert not handle.done()
        latch.release()
        assert handle.result(WAIT_S).get().tolist() == [2, 2]
