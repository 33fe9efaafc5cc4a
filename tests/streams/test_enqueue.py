"""Operations written once for every device, and pixels that are not written yet (R1, R3)."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import WAIT_S, Boom, Gate, doubled, fail, frame
from PIL import Image
from samples import small_model

from pixtreme.infer import staging
from pixtreme.infer.aio import Pipeline, Stage
from pixtreme.infer.cuda_graph import CudaGraphSession
from pixtreme.infer.errors import BusyError, CaptureError, ContextError, ContractError, PipelineError, StreamFault
from pixtreme.infer.frames import HostFrame
from pixtreme.infer.onnx_module import FACTORY
from pixtreme.infer.streams import EventHandle, StreamContext
from pixtreme.infer.streams._handle import EventHandle as Handle

UNWRITTEN = -7.0  # what memory holds before the work that fills it


def fill(source: Any, *, out: Any) -> None:
    """What a user writes: ``out[...] = 2 * source``."""
    np.multiply(source, 2, out=out)


@pytest.fixture
def pending(context: StreamContext, gate: Gate) -> EventHandle[Any]:
    """A handle whose array of four ones is still to be doubled: a stream stands before it."""
    gate.hold(context)
    out = np.full((2, 2), UNWRITTEN, np.float32)
    return context.enqueue(fill, np.ones((2, 2), np.float32), out=out)


READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda a: a.sum(),
    "mean": lambda a: a.mean(),
    "astype": lambda a: a.astype("float32"),
    "copy": lambda a: a.copy(),
    "tobytes": lambda a: a.tobytes(),
    "tolist": lambda a: a.tolist(),
    "item": lambda a: a.item(0),
    "transpose": lambda a: a.T.copy(),
    "reshape": lambda a: a.reshape(4).copy(),
    "ravel": lambda a: a.ravel(),
    "index": lambda a: a[0, 0],
    "slice": lambda a: a[:1].copy(),
    "iterate": list,
    "unpack": lambda a: [*a],
    "contains": lambda a: 2.0 in a,
    "plus": lambda a: a + 1,
    "reversed plus": lambda a: 1 + a,
    "in place": lambda a: a.__iadd__(1),
    "negative": lambda a: -a,
    "matmul": lambda a: a @ a,
    "compare": lambda a: a == 2,
    "truth": lambda a: bool(a[:1, :1]),
    "np.mean": np.mean,
    "np.stack": lambda a: np.stack([a, a]),
    "np.concatenate": lambda a: np.concatenate([a, a]),
    "np.add": lambda a: np.add(a, a),
    "np.where": lambda a: np.where(a > 1, 1, 0),
    "np.asarray": np.asarray,
    "np.array": np.array,
    "np.ascontiguousarray": np.ascontiguousarray,
    "np.copyto from": lambda a: np.copyto(np.empty((2, 2)), a),
    "assign into": lambda a: np.empty((2, 2)).__setitem__(..., a),
    "out=": lambda a: np.add(1, 1, out=a),
    "np.from_dlpack": np.from_dlpack,
    "memoryview": lambda a: memoryview(a).tolist(),
    "bytes": bytes,
    "Image.fromarray": lambda a: Image.fromarray(a),
    "np.save": lambda a: np.save(io.BytesIO(), a),
    "ctypes": lambda a: a.ctypes.data,
    "interface": lambda a: a.__array_interface__,
    "struct": lambda a: a.__array_struct__,
    "view": lambda a: a.view(np.uint8),
    "fill": lambda a: a.fill(0),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "shallow copy": copy.copy,
    "np.linalg": lambda a: np.linalg.norm(a),
    "np.testing": lambda a: np.testing.assert_array_equal(a, 2),
    "HostFrame": lambda a: HostFrame(data=a[..., None], channels="Y", colorspace="sRGB", gamma="sRGB"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_no_way_of_reading_sees_unwritten_pixels(
    context: StreamContext, other: StreamContext, gate: Gate, pending: EventHandle[Any], read: Callable[[Any], Any]
) -> None:
    """R3: in a submitted function each way raises at once, with what to write instead, and leaves all as it was."""
    with pytest.raises(ContextError, match=r"enqueue\(") as caught:
        other.submit(read, pending)
    assert "the value of enqueue" in str(caught.value) or "the value of fill" in str(caught.value)
    with other.use():
        seen = pending.on(other)
        with pytest.raises(ContextError, match=r"enqueue\("):
            read(seen)
    with pytest.raises(ContextError, match=r"enqueue\("):
        other.submit(lambda items: read(items[0]), [pending])
    gate.open()
    np.testing.assert_array_equal(pending.result(WAIT_S), np.full((2, 2), 2.0))
    read(seen)  # over: as any array


def test_torch_does_not_read_unwritten_pixels(other: StreamContext, pending: EventHandle[Any], gate: Gate) -> None:
    """R3: ``torch.from_numpy`` looks at the real type."""
    torch = pytest.importorskip("torch")
    for read in (torch.from_numpy, torch.as_tensor, torch.tensor):
        with pytest.raises((ContextError, TypeError)):
            other.submit(read, pending)
    gate.open()


METADATA: dict[str, Callable[[Any], Any]] = {
    "shape": lambda a: a.shape == (2, 2),
    "dtype": lambda a: a.dtype == np.float32,
    "size": lambda a: (a.size, a.ndim, a.nbytes, len(a)) == (4, 2, 16, 2),
    "isinstance": lambda a: isinstance(a, np.ndarray),
    "empty_like": lambda a: np.empty_like(a).shape == (2, 2),
    "zeros_like": lambda a: np.zeros_like(a).sum() == 0,
    "np.shape": lambda a: np.shape(a) == (2, 2),
    "result_type": lambda a: np.result_type(a, np.float64) == np.float64,
    "repr": lambda a: "pending float32 array of shape (2, 2)" in repr(a),
}


@pytest.mark.parametrize("look", METADATA.values(), ids=METADATA.keys())
def test_what_reads_no_pixel_works(
    other: StreamContext, gate: Gate, pending: EventHandle[Any], look: Callable[[Any], bool]
) -> None:
    """R3: shape and dtype are known before the pixels are."""
    seen: list[bool] = []
    other.submit(lambda value: seen.append(look(value)), pending)
    gate.open()
    assert seen == [True]


@pytest.mark.parametrize("field", ["data", "asarray", "setter"])
def test_a_pending_frame_is_guarded_and_keeps_its_metadata(
    context: StreamContext, other: StreamContext, gate: Gate, field: str
) -> None:
    """R3: a frame tells size and labels; its pixels raise, by whatever name they are asked for."""
    gate.hold(context)
    image = frame(UNWRITTEN)
    handle = context.enqueue(lambda *, out: out.data.fill(3), out=image)
    reads: dict[str, Callable[[Any], Any]] = {
        "data": lambda f: f.data.mean(),
        "asarray": np.asarray,
        "setter": lambda f: f.data.__setitem__(..., 0),
    }
    with pytest.raises(ContextError, match=r"enqueue\("):
        other.submit(reads[field], handle)
    seen: list[object] = []
    other.submit(lambda f: seen.extend((f.shape, f.channels, f.dtype)), handle)
    gate.open()
    assert seen == [(4, 6, 3), ("R", "G", "B"), np.float32]
    assert handle.result(WAIT_S) is image
    assert image.data.min() == 3


def test_a_failed_value_is_not_read_either(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """R3: what a guarded array stands for is not readable once the work that should fill it has failed."""
    gate.hold(context)
    handle = context.enqueue(lambda *, out: fail(), out=np.full(2, UNWRITTEN))
    with other.use():
        seen = handle.on(other)
    gate.open()
    assert handle.exception(WAIT_S) is not None
    with pytest.raises(ContextError):
        seen.sum()
    with pytest.raises(StreamFault):
        other.synchronize()


@pytest.mark.parametrize("way", ["list", "tuple", "dict", "keyword", "then", "nested"])
def test_enqueued_functions_read_what_is_written(
    context: StreamContext, other: StreamContext, gate: Gate, pending: EventHandle[Any], way: str
) -> None:
    """R1: the issue's own example gives 8, however the handle is passed, on its own stream and on another."""
    calls: dict[str, Callable[[StreamContext], EventHandle[Any]]] = {
        "list": lambda c: c.enqueue(lambda v: v[0].sum(), [pending]),
        "tuple": lambda c: c.enqueue(lambda v: v[1].sum(), (0, pending)),
        "dict": lambda c: c.enqueue(lambda v: v["x"].sum(), {"x": pending}),
        "keyword": lambda c: c.enqueue(lambda *, v: v.sum(), v=pending),
        "then": lambda c: c.enqueue(np.sum, c.enqueue(np.copy, pending)),
        "nested": lambda c: c.enqueue(lambda v: v["x"][0].sum(), {"x": [pending]}),
    }
    handles = [calls[way](context), calls[way](other)]
    assert not any(handle.done() for handle in handles)
    gate.open()
    assert [handle.result(WAIT_S) for handle in handles] == [8.0, 8.0]


def test_old_style_submissions_stay_right(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """R3: `stream.enqueue` with a guarded argument, as authors wrote it, reads on the worker."""
    gate.hold(context)
    handle = context.submit(doubled, context, np.ones(3))
    chained = handle.then(other, lambda value: doubled(other, value))
    with pytest.raises(ContextError, match=r"enqueue\("):
        other.submit(lambda v: v.sum(), handle)
    gate.open()
    np.testing.assert_array_equal(chained.result(WAIT_S), np.full(3, 4.0))


def test_modules_staging_and_dlpack_take_pending_values(
    context: StreamContext, other: StreamContext, gate: Gate, tmp_path: Path
) -> None:
    """R3: our own parts are ordered, and so unwrap what user code may not read."""
    model = small_model(tmp_path / "small.onnx")
    bound = other.bind(FACTORY, model, precision="fp32", input_hw=(4, 6))
    graph = other.bind(FACTORY.graph_factory(), model, precision="fp32", input_hw=(4, 6))
    expected = bound(frame(0.5)).result(WAIT_S).data.copy()
    gate.hold(context)
    handle = context.enqueue(lambda *, out: out.data.fill(0.5), out=frame(UNWRITTEN))
    results = [bound(handle), graph(handle), other.submit(bound, handle), other.enqueue(bound, handle)]
    down = staging.download(other, results[0])
    assert not down.done()
    gate.open()
    for result in results:
        np.testing.assert_array_equal(result.result(WAIT_S).data, expected)
    np.testing.assert_array_equal(down.result(WAIT_S), expected)
    np.testing.assert_array_equal(np.from_dlpack(handle), np.full((4, 6, 3), 0.5, np.float32))


@pytest.mark.anyio
async def test_a_pipeline_stage_of_three_words(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """R3: a NumPy function as a stage raises, naming the stage, and does not compute on unwritten pixels."""
    gate.hold(context)

    def double(array: Any) -> Any:
        return context.enqueue(fill, array, out=np.full(4, UNWRITTEN)).on(context)

    def mean(array: Any) -> Any:
        try:
            return np.mean(array)
        finally:
            gate.open()

    async with Pipeline(Stage(context, double), Stage(other, mean)) as pipeline:
        with pytest.raises(PipelineError, match="mean on second") as caught:
            [value async for value in pipeline.run([np.ones(4)])]
    assert isinstance(caught.value.__cause__, ContextError)


OUTS: dict[str, Callable[[], Any]] = {
    "array": lambda: np.full((2, 2), UNWRITTEN),
    "frame": lambda: frame(UNWRITTEN),
    "view": lambda: np.full((4, 4), UNWRITTEN)[::2, ::2],
}


@pytest.mark.parametrize("make", OUTS.values(), ids=OUTS.keys())
def test_out_is_the_value_at_once(context: StreamContext, gate: Gate, make: Callable[[], Any]) -> None:
    """R1: the handle's value is the memory itself, before and after the function filled it."""
    gate.hold(context)
    out = make()
    handle = context.enqueue(lambda *, out: np.asarray(out).fill(5), out=out)
    assert not handle.done()
    gate.open()
    assert handle.result(WAIT_S) is out
    assert np.asarray(out).min() == 5


def test_out_may_be_a_handle_or_several(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """R1: a handle's memory is filled once the handle's own work is over; a tuple is filled together."""
    gate.hold(context)
    first = context.enqueue(lambda *, out: out.fill(1), out=np.full(3, UNWRITTEN))
    added = other.enqueue(lambda *, out: np.add(out, 1, out=out), out=first)
    both = other.enqueue(lambda v, *, out: [one.fill(v.sum()) for one in out], added, out=(np.empty(2), np.empty(1)))
    gate.open()
    assert added.result(WAIT_S) is first.result(WAIT_S)
    assert [one.tolist() for one in both.result(WAIT_S)] == [[6.0, 6.0], [6.0]]


@pytest.mark.parametrize("out", [3, "memory", [np.empty(2)], (np.empty(2), None), object(), {"a": np.empty(2)}])
def test_what_is_no_memory_is_refused(context: StreamContext, out: Any) -> None:
    """R1: out= names what is accepted; nothing was enqueued and no slot is lost."""
    with pytest.raises(ContractError, match="context.empty"):
        context.enqueue(fill, np.ones(2), out=out)
    assert context.in_flight == 0


def test_what_does_not_exist_yet_goes_to_enqueue_only(
    context: StreamContext, other: StreamContext, gate: Gate, tmp_path: Path
) -> None:
    """R1: a value that the function will return is awaited or enqueued on; everything else says to give out=."""
    bound = other.bind(FACTORY, small_model(tmp_path / "small.onnx"), precision="fp32", input_hw=(4, 6))
    gate.hold(context)
    later = context.enqueue(lambda: frame(0.25))
    for use in (
        lambda: other.submit(len, later),
        lambda: bound(later),
        lambda: later.on(other),
        lambda: later.then(other, len),
        lambda: other.submit(len, [later]),
        lambda: other.enqueue(fill, 1, out=later),
    ):
        with pytest.raises((ContextError, ContractError), match="out="):
            use()
    assert other.in_flight == 0
    chained = other.enqueue(lambda f: float(f.data.max()), later)
    gate.open()
    assert chained.result(WAIT_S) == 0.25
    assert bound(later).result(WAIT_S).shape[2] == 3  # known now: like any other


def test_an_enqueued_failure_is_the_streams(context: StreamContext, other: StreamContext, gate: Gate) -> None:
    """R1: on the host the function runs later, so its error faults the stream, as a failed kernel does."""
    gate.hold(context)
    handle = context.enqueue(fail, "later")
    chained = other.enqueue(len, handle)
    gate.open()
    error = handle.exception(WAIT_S)
    assert isinstance(error, StreamFault)
    assert isinstance(error.__cause__, Boom)
    assert isinstance(chained.exception(WAIT_S), StreamFault)
    with pytest.raises(StreamFault):
        context.enqueue(len, ())


def test_the_bound_counts_enqueued_work(gate: Gate) -> None:
    """R1: at ``max_in_flight`` an enqueue is refused; inside a submission it is a part of that one."""
    with StreamContext.open("cpu", max_in_flight=1) as context:
        gate.hold(context)
        context.enqueue(int)
        with pytest.raises(BusyError):
            context.enqueue(int)
        gate.open()
        context.synchronize()

        def two_steps(source: Any) -> Any:
            first = context.enqueue(fill, source, out=np.empty(2))
            return context.enqueue(fill, first, out=np.empty(2)).on(context)

        handle = context.submit(two_steps, np.ones(2))
        assert handle.result(WAIT_S).tolist() == [4.0, 4.0]
        assert context.in_flight == 0


def test_enqueue_records_while_the_stream_captures(context: StreamContext) -> None:
    """R1: an operation of a graph is written with enqueue, and runs at each replay."""
    source, target = np.ones(3), np.zeros(3)
    with context.use():
        session = CudaGraphSession({"double": lambda: context.enqueue(fill, source, out=target)})
        for value in (1, 5):
            context.enqueue(source.fill, value)
            session.replay("double")
            seen = context.enqueue(np.copy, target)
            assert seen.result(WAIT_S).tolist() == [2 * value] * 3
        session.close()


def test_a_captured_handle_is_not_waited_for(context: StreamContext) -> None:
    """R1: captured work is never over by itself, and a wait for it says so instead of hanging."""
    caught: list[Handle[Any]] = []
    with context.use():
        session = CudaGraphSession({"double": lambda: caught.append(context.enqueue(fill, np.ones(2), out=np.ones(2)))})
        session.close()
    captured = caught[-1]
    with pytest.raises(CaptureError, match="launch"):
        captured.result(WAIT_S)


@pytest.mark.parametrize("bad", [None, 3, "text", [len]])
def test_only_callables_are_enqueued(context: StreamContext, bad: Any) -> None:
    """R1: as submit."""
    with pytest.raises(ContractError, match="enqueue calls its first argument"):
        context.enqueue(bad)


def test_a_coroutine_function_faults_where_it_runs(context: StreamContext) -> None:
    """R8: an enqueued coroutine function is refused; on the host its stream's worker finds out."""

    async def wrong() -> None: ...

    error = context.enqueue(wrong).exception(WAIT_S)
    assert error is not None
    assert isinstance(error.__cause__, ContractError)


def test_arguments_live_until_the_function_ran(context: StreamContext, gate: Gate) -> None:
    """R15: an array made for the call and dropped is there when the worker comes to it."""
    gate.hold(context)
    handles = [context.enqueue(np.sum, np.full(1000, number)) for number in range(50)]
    gate.open()
    assert [handle.result(WAIT_S) for handle in handles] == [1000 * number for number in range(50)]
