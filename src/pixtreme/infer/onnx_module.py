"""The ONNX module: any NHWC image model in an ``.onnx`` file as a module of this library (extra ``ort``).

``FACTORY`` opens it plainly, ``FACTORY.graph_factory()`` as a captured graph. Both enqueue an ONNX Runtime session,
bound to fixed buffers, on the context's stream: on the host runtime with the CPU provider, on CUDA with the CUDA
provider, whose own graphs stay off. The CUDA form has not been run on a card yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, NoReturn

import numpy as np

from pixtreme.infer._onnx_header import INPUT_NAME, OUTPUT_NAME, OnnxHeader, read_header
from pixtreme.infer.contracts import (
    Exact,
    FrameContract,
    FrameField,
    Precision,
    StatelessFamilyContract,
    StatelessOpenContract,
    UnconstrainedWithReference,
    check_frame,
    validate_call_params,
)
from pixtreme.infer.cuda_graph import CudaGraphBuffers, CudaGraphSession
from pixtreme.infer.declarations import check_input_hw, check_precision, is_positive_int
from pixtreme.infer.dependencies import require_optional
from pixtreme.infer.errors import ClosedError, ContextError, ContractError, refuse_pickle
from pixtreme.infer.frames import FrameLike
from pixtreme.infer.onnx import open_session
from pixtreme.infer.runtimes import NativeArray, Runtime
from pixtreme.infer.streams import BoundInference, StreamContext, _loops
from pixtreme.infer.streams._scopes import current_stream
from pixtreme.infer.streams._stream import Stream

__all__ = ("FACTORY", "OnnxArtifact", "OnnxFactory", "OnnxInference", "bind_onnx", "bind_onnx_async")

_DTYPES: dict[Precision, str] = {"fp32": "float32", "fp16": "float16"}
_CHANNELS = {1: ("Y",), 3: ("R", "G", "B"), 4: ("R", "G", "B", "A")}

OnnxContract = StatelessOpenContract["OnnxArtifact"]


@dataclass(frozen=True)
class OnnxArtifact:
    """An ``.onnx`` file.

    Parameters
    ----------
    path
        The file: one input named ``input`` and one output named ``output``, both NHWC with batch 1.
    scale
        Output pixels a side for each input pixel. None takes it from the file's metadata, key
        ``pixtreme.infer.contract``.
    """

    path: str | PathLike[str]
    scale: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | PathLike):
            _refuse(f"path={self.path!r}", "a path", "pass the path of an .onnx file")
        if self.scale is not None and not is_positive_int(self.scale):
            _refuse(f"scale={self.scale!r}", "None or a positive int (not a bool)", "pass the network's scale")

    @property
    def precision(self) -> Precision:
        """The precision of the file's tensors, read from its header; what is neither, opening refuses."""
        return "fp16" if read_header(self.path, runtime=False).input.dtype == "float16" else "fp32"


@dataclass(frozen=True)
class OnnxFactory:
    """Describes and opens ONNX artifacts: a ``StatelessInferenceFactory`` and a ``CudaGraphFactoryProvider``.

    Parameters
    ----------
    graph
        Open instances that replay a captured graph.
    threads
        Intra-op threads of each session. One a stream lets streams overlap instead of fighting for cores.
    """

    graph: bool = False
    threads: int = 1

    def __post_init__(self) -> None:
        if not is_positive_int(self.threads):
            _refuse(f"threads={self.threads!r}", "a positive int", "pass how many threads one session may use")

    @property
    def family_contract(self) -> StatelessFamilyContract:
        """What is true of every ONNX artifact: hardly anything but the metadata it was probably made with."""
        frame = _frame_contract(UnconstrainedWithReference(_CHANNELS[3]), UnconstrainedWithReference("float32"))
        return StatelessFamilyContract(frame, frame, ())

    def graph_factory(self) -> OnnxFactory:
        """Return the factory that opens graph instances; allocates nothing and leaves this one as it is.

        Host synchronization
        --------------------
        None.
        """
        return OnnxFactory(graph=True, threads=self.threads)

    def query_contract(
        self, artifact: OnnxArtifact, /, *, precision: Precision, input_hw: tuple[int, int]
    ) -> OnnxContract:
        """Validate and describe one artifact from its header; no session is made and nothing allocated.

        Returns
        -------
        StatelessOpenContract
            Its family contract is narrowed to this artifact: dtype and channels are `Exact`.

        Raises
        ------
        ContractError
            The artifact, precision or size does not fit; says what the file holds.
        ImportError
            The extra ``ort`` is not installed.

        Host synchronization
        --------------------
        None: it reads the file's header.
        """
        return _described(artifact, precision, input_hw, runtime=False)[1]

    def open(self, artifact: OnnxArtifact, /, *, precision: Precision, input_hw: tuple[int, int]) -> OnnxInference:
        """Validate as `query_contract`, then open an instance on the current stream.

        Raises
        ------
        ContractError
            As `query_contract`, or the network's output has another shape than declared.
        ContextError
            No explicit stream is current.

        Stream order
        ------------
        The instance belongs to the stream that is current now.

        Host synchronization
        --------------------
        Runs the network once in this thread; a graph instance also waits for its warm-up.
        """
        header, contract = _described(artifact, precision, input_hw, runtime=True)
        stream = current_stream("an instance is opened on an explicit stream")
        network = _Network(header, contract, self.threads, stream)
        return OnnxInference(contract, network, stream, graph=self.graph)


class _Network:
    """An ONNX Runtime session bound to fixed buffers on the runtime's device."""

    def __init__(self, header: OnnxHeader, contract: OnnxContract, threads: int, stream: Stream) -> None:
        runtime = stream.runtime
        device, _, ordinal = runtime.device.partition(":")
        self._stream = stream
        self.session = open_session(header, threads=threads, device=runtime.device, pointer=stream.key.pointer)
        # Stream order is all a caller needs: on CUDA run() must not wait for the device (O9).
        self._options = require_optional("onnxruntime", extra="ort").RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        frames = contract.module_contract
        height, width = contract.input_hw
        scale = contract.scale
        self.input, source = _zeros(runtime, (height, width), frames.input_frame)
        self.output, target = _zeros(runtime, (height * scale, width * scale), frames.output_frame)
        self.binding = self.session.io_binding()
        for bind, name, array in (
            (self.binding.bind_input, INPUT_NAME, source),
            (self.binding.bind_output, OUTPUT_NAME, target),
        ):
            shape = (1, *array.shape)
            bind(name, device, int(ordinal or 0), np.dtype(array.dtype), shape, runtime.address(array))
        try:
            self.run()
        except Exception as error:
            raise ContractError(
                why="a network runs on the size it is opened for and returns what its metadata declares",
                what=f"{str(header.path)!r} on {self.input.shape} for {self.output.shape}: {error}",
                how="check scale and output channels in the metadata, or open another input size",
            ) from error

    def run(self) -> None:
        """Run the network from the fixed input to the fixed output: on this thread, or enqueued on the CUDA stream."""
        self.session.run_with_iobinding(self.binding, self._options)

    def enqueue(self) -> None:
        """Enqueue a run on the stream."""
        self._stream.runtime.enqueue(self._stream.native, self.run)


class OnnxInference:
    """An opened ONNX artifact: one frame in, one frame ``scale`` times as large out.

    Made by `OnnxFactory.open`. Requests are enqueued on the stream it was opened on, which must be current.
    """

    def __init__(self, contract: OnnxContract, network: _Network, stream: Stream, *, graph: bool) -> None:
        self._contract = contract
        self._stream = stream
        self._network: _Network | None = network
        self._buffers = CudaGraphBuffers(network.input, network.output)
        self._graphs: CudaGraphSession | None = None
        if graph:
            self._graphs = CudaGraphSession({"run": network.enqueue}, resources=(self._buffers, network))

    @property
    def contract(self) -> OnnxContract:
        """What was opened."""
        return self._contract

    @property
    def scale(self) -> int:
        """Output pixels a side for each input pixel."""
        return self._contract.scale

    def __call__(self, frame: FrameLike, /, **params: Any) -> FrameLike:
        """Enqueue one request.

        Parameters
        ----------
        frame
            A frame of the contract's size, channels and dtype, ready on the current stream.

        Returns
        -------
        FrameLike
            Shape ``(height * scale, width * scale, channels)``; its pixels arrive in stream order. Colorspace, gamma
            and matrix are the input's.

        Raises
        ------
        ContractError, ContextError, ClosedError
            Before any work.

        Stream order
        ------------
        On the stream the instance was opened on, which must be current.

        Host synchronization
        --------------------
        None.

        Lifetime
        --------
        The frame given is kept alive until it is copied; the frame returned is independent of later requests.
        """
        network = self._network
        if network is None:
            raise ClosedError(
                why="a closed module takes no requests",
                what=f"{self!r} was called after close()",
                how="open the artifact again",
            )
        module = self._contract.module_contract
        validate_call_params(module, params)
        if isinstance(frame, FrameLike):
            check_frame(module.input_frame, frame)
        self._check_stream()
        self._buffers.copy_inputs(frame)
        if self._graphs is not None:
            self._graphs.replay("run")
        else:
            network.enqueue()
        labels = module.output_frame.channels
        return self._buffers.copy_output(
            channels=labels.value if isinstance(labels, Exact) else labels.reference,
            colorspace=frame.colorspace,
            gamma=frame.gamma,
            matrix=frame.matrix,
        )

    def close(self) -> None:
        """Release session and buffers. Idempotent; frames already returned stay as they are.

        Host synchronization
        --------------------
        None. Finish outstanding work first; what is enqueued already still runs.
        """
        self._network = None
        self._buffers.close()
        if self._graphs is not None:
            self._graphs.close()

    def _check_stream(self) -> None:
        if self._graphs is not None:
            self._graphs.check_context()
            return
        if not self._stream.is_current:
            raise ContextError(
                why="an instance works on the stream it was opened on",
                what=f"current is {self._stream.runtime.current()!r}; required is {self._stream.native!r}",
                how="call it inside `with context.use():`, or bind it and call the bound inference",
            )

    def __repr__(self) -> str:
        height, width = self._contract.input_hw
        form = "graph" if self._graphs is not None else "plain"
        return f"<OnnxInference {str(self._contract.artifact_identity.path)!r} {width}x{height} x{self.scale} {form}>"

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle(self, "the OnnxArtifact")


FACTORY = OnnxFactory()
"""The factory for plain instances; ``FACTORY.graph_factory()`` opens graph instances."""


def bind_onnx(
    context: StreamContext, path: str | PathLike[str], *, input_hw: tuple[int, int], scale: int | None = None
) -> BoundInference[FrameLike]:
    """Open an ``.onnx`` file on a context as a captured graph, at the precision its tensors have.

    Parameters
    ----------
    path, input_hw, scale
        As for `OnnxArtifact` and `StreamContext.bind`.

    Host synchronization
    --------------------
    As `StreamContext.bind`: waits for the warm-up.
    """
    artifact = OnnxArtifact(path, scale)
    return context.bind(FACTORY.graph_factory(), artifact, precision=artifact.precision, input_hw=input_hw)


async def bind_onnx_async(
    context: StreamContext, path: str | PathLike[str], *, input_hw: tuple[int, int], scale: int | None = None
) -> BoundInference[FrameLike]:
    """Like `bind_onnx`, without blocking the event loop; as `StreamContext.bind_async`.

    Host synchronization
    --------------------
    None: it awaits.
    """
    return await _loops.open_in_thread(partial(bind_onnx, context, path, input_hw=input_hw, scale=scale))


def _described(
    artifact: OnnxArtifact, precision: Precision, input_hw: tuple[int, int], *, runtime: bool
) -> tuple[OnnxHeader, OnnxContract]:
    """Validate everything that can be known without a session."""
    check_precision("OnnxFactory", precision)
    check_input_hw("OnnxFactory", input_hw)
    if not isinstance(artifact, OnnxArtifact):
        _refuse(f"artifact={artifact!r}", "an OnnxArtifact", "pass OnnxArtifact(path)")
    header = read_header(artifact.path, runtime=runtime)
    source, target, declared = header.input, header.output, header.declared
    path = str(header.path)
    if _DTYPES.get(precision) != source.dtype:
        held = {dtype: name for name, dtype in _DTYPES.items()}.get(source.dtype, f"none ({source.dtype})")
        _refuse(f"precision={precision!r} for {path!r}", f"what its tensors are: {held}", "open it at that precision")
    if declared is None and artifact.scale is None:
        _refuse(
            f"no scale for {path!r}",
            "metadata 'pixtreme.infer.contract' in the file, or OnnxArtifact(path, scale=N)",
            "write the metadata or pass the scale",
        )
    if declared is not None:
        if artifact.scale not in (None, declared.spatial_scale):
            _refuse(f"scale={artifact.scale!r} for {path!r}", f"{declared.spatial_scale} as declared", "pass None")
        if declared.batch != 1:
            _refuse(f"batch={declared.batch!r} in {path!r}", "1: a frame is one image", "export the model again")
    scale = declared.spatial_scale if declared is not None else artifact.scale or 1
    channels = declared.channels if declared is not None else target.shape[3]
    labels = _labels(path, source.shape[3])
    if misfits := header.misfits(input_hw, len(labels), scale):
        _refuse(
            f"input_hw={input_hw!r} for {path!r}: {'; '.join(misfits)}",
            "a size its signature allows",
            "open the size the model was exported for, or export it with free height and width",
        )
    family = StatelessFamilyContract(
        _frame_contract(Exact(labels), Exact(source.dtype)),
        _frame_contract(Exact(_labels(path, channels)), Exact(target.dtype)),
        (),
    )
    return header, StatelessOpenContract(family, artifact, precision, input_hw, scale)


def _labels(path: str, count: int | str | None) -> tuple[str, ...]:
    if not isinstance(count, int) or count not in _CHANNELS:
        _refuse(
            f"{count!r} channels in {path!r}", f"a fixed number of {sorted(_CHANNELS)!r}", "export the model with it"
        )
    return _CHANNELS[count]


def _frame_contract(channels: FrameField[tuple[str, ...]], dtype: FrameField[str]) -> FrameContract:
    return FrameContract(
        channels=channels,
        colorspace=UnconstrainedWithReference("sRGB"),
        gamma=UnconstrainedWithReference("sRGB"),
        matrix=UnconstrainedWithReference(None),
        dtype=dtype,
    )


def _zeros(runtime: Runtime, size: tuple[int, int], contract: FrameContract) -> tuple[FrameLike, NativeArray]:
    assert isinstance(contract.channels, Exact)
    assert isinstance(contract.dtype, Exact)
    labels, dtype = contract.channels.value, np.dtype(contract.dtype.value)
    array = runtime.empty((*size, len(labels)), dtype)
    runtime.from_host(array, np.zeros(array.shape, dtype))
    return runtime.make_frame(array, channels=labels, colorspace="sRGB", gamma="sRGB"), array


def _refuse(observed: str, accepted: str, how: str) -> NoReturn:
    raise ContractError(
        why="the ONNX module opens what the file holds and nothing else",
        what=f"received {observed}; accepted is {accepted}",
        how=how,
    )
