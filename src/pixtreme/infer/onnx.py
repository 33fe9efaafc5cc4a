"""`run_onnx`: an ONNX artifact on ONNX Runtime's CPU provider, the reference a device engine is compared with.

Also how every session of this library is made (`open_session`). Needs the extra ``ort``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pixtreme.infer._onnx_header import INPUT_NAME, OUTPUT_NAME, AnyPath, OnnxHeader, read_header
from pixtreme.infer.dependencies import require_optional
from pixtreme.infer.errors import ContractError

__all__ = ("clear", "run_onnx")

PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
_SESSIONS_KEPT = 4
_HEADER_BYTES = 1 << 16  # from each end of a file: the graph stands first, opsets and metadata last

_Fingerprint = tuple[tuple[int, int, bytes], ...]
_lock = threading.Lock()
_sessions: OrderedDict[Path, tuple[_Fingerprint, OnnxHeader, Any]] = OrderedDict()


def run_onnx(onnx_path: AnyPath, input_nhwc: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Run an artifact on the CPU and return its output.

    Parameters
    ----------
    onnx_path
        A model with one input ``input`` and one output ``output`` that declares its output in the metadata key
        ``pixtreme.infer.contract``: ``{"output": {"batch": 1, "channels": 3, "spatial_scale": 4, "dtype": "float32",
        "layout": "NHWC"}}``.
    input_nhwc
        Shape ``(1, H, W, 3)``, float32.

    Returns
    -------
    numpy.ndarray
        Shape ``(batch, H * spatial_scale, W * spatial_scale, channels)`` and dtype as declared.

    Raises
    ------
    ContractError
        The array, the artifact or its result is not as said above; every problem of the artifact is listed. What
        onnxruntime raised is the cause.
    ImportError
        The extra ``ort`` is not installed.

    The session, the slow part, is kept for the next call on the same unchanged file; `clear` lets go of it. It uses at
    most half of the processors this process may use, and at most four.

    Host synchronization
    --------------------
    Runs in this thread.
    """
    _check_input(input_nhwc)
    header, session = _opened(onnx_path)
    declared = header.declared
    assert declared is not None  # read_header(metadata=True)
    height, width = input_nhwc.shape[1:3]
    misfits = header.misfits((height, width), 3, declared.spatial_scale)
    if misfits:
        raise ContractError(
            why="an artifact runs on sizes its signature allows",
            what=f"{str(header.path)!r} with an input of {input_nhwc.shape!r}: {'; '.join(misfits)}",
            how="pass an array of the size the model was exported for, or export it with free height and width",
        )
    try:
        (result,) = session.run([OUTPUT_NAME], {INPUT_NAME: np.ascontiguousarray(input_nhwc)})
    except Exception as error:  # onnxruntime's own classes share no public base
        raise ContractError(
            why="an artifact runs on every input of its contract",
            what=f"{str(header.path)!r} failed on an input of {input_nhwc.shape!r}: {error}",
            how="look at the cause; export the model again",
        ) from error
    expected = (declared.batch, height * declared.spatial_scale, width * declared.spatial_scale, declared.channels)
    if result.shape != expected or result.dtype.name != declared.dtype:
        raise ContractError(
            why="an artifact's result is what its metadata declares",
            what=f"{str(header.path)!r} returned {result.dtype.name} {result.shape!r}; "
            f"accepted is {declared.dtype} {expected!r}",
            how="correct the metadata, or export the model again",
        )
    return np.asarray(result)


def clear() -> None:
    """Let go of the sessions `run_onnx` keeps."""
    with _lock:
        _sessions.clear()


def open_session(header: OnnxHeader, *, threads: int, device: str = "cpu", pointer: int = 0) -> Any:
    """Make a session that spins and logs nothing.

    Parameters
    ----------
    threads
        Intra-op threads on the CPU.
    device, pointer
        ``"cpu"``, or ``"cuda:N"`` with the pointer of a stream: the session runs there and on nothing else.

    Raises
    ------
    ContractError
        ONNX Runtime refuses the model (its exception is the cause), or cannot run it where it was asked to.
    """
    ort = require_optional("onnxruntime", extra="ort")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads  # set, so that onnxruntime neither counts nor pins processors (C42)
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors come as exceptions
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[Any] = [PROVIDER]
    _, on_cuda, ordinal = device.partition(":")
    if on_cuda:
        # Every node on the device, or an error.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        # Its own graphs stay off: captured from outside while they are on, onnxruntime ends the process (O9a).
        settings = {"device_id": ordinal, "user_compute_stream": str(pointer), "enable_cuda_graph": "0"}
        providers = [(CUDA_PROVIDER, settings)]
    try:
        session = ort.InferenceSession(_source(header), options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime's own classes share no public base
        if on_cuda:
            raise ContractError(
                why=f"the network runs on {CUDA_PROVIDER} on the context's stream, and never falls back to the CPU",
                what=f"onnxruntime {ort.__version__} could not run {str(header.path)!r} there: {error}; "
                f"its CUDA library: {_why_cuda_does_not_load(ort)}",
                how="install the CUDA libraries onnxruntime-gpu asks for, or open the artifact on a context of 'cpu'",
            ) from error
        raise ContractError(
            why="an artifact can be opened by ONNX Runtime",
            what=f"{str(header.path)!r} was refused by onnxruntime {ort.__version__}: {error}",
            how="export the model for the opset and operators of the installed onnxruntime",
        ) from error
    check_providers(session, [CUDA_PROVIDER, PROVIDER] if on_cuda else [PROVIDER])
    return session


def check_providers(session: Any, requested: list[str]) -> None:
    """Compare the providers a session really got with those asked for (O12)."""
    if (actual := session.get_providers()) != requested:
        raise ContractError(
            why="a session runs on the providers it was asked to run on",
            what=f"asked for {requested!r}; the session has {actual!r}",
            how="install the libraries the missing provider needs; nothing falls back to another one",
        )


def _why_cuda_does_not_load(ort: Any) -> str:
    """Return the loader's message: onnxruntime only logs it."""
    library = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return "loads"


def _source(header: OnnxHeader) -> str | bytes:
    path = str(header.path)
    try:
        path.encode()
    except UnicodeEncodeError:  # a name that is no text: onnxruntime takes none, but does take the bytes
        return header.path.read_bytes()
    return path


def _opened(path: AnyPath) -> tuple[OnnxHeader, Any]:
    where = Path(os.path.abspath(os.fsdecode(path)))
    with _lock:
        if (kept := _sessions.get(where)) is not None:
            if kept[0] == _fingerprint(where, *kept[1].external):
                _sessions.move_to_end(where)
                return kept[1:]
            del _sessions[where]
        before = _fingerprint(where)
        header = read_header(where, dtypes=("float32",), metadata=True, runtime=True)
        fingerprint = before + _fingerprint(*header.external)
        session = open_session(header, threads=min(4, max(1, _processors() // 2)))
        _sessions[where] = fingerprint, header, session
        if len(_sessions) > _SESSIONS_KEPT:
            _sessions.popitem(last=False)
        return header, session


def _fingerprint(*paths: Path) -> _Fingerprint:
    """Return size, mtime and a digest of both ends of each file; an unreadable one has none, and differs from all."""
    found = []
    for path in paths:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                ends = file.read(_HEADER_BYTES)
                file.seek(max(0, status.st_size - _HEADER_BYTES))
                ends += file.read(_HEADER_BYTES)
        except OSError:
            return ()
        found.append((status.st_size, status.st_mtime_ns, hashlib.sha256(ends).digest()))
    return tuple(found)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_input(value: object) -> None:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32:
        observed = f"an array of {value.dtype!r}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        accepted = "a float32 NumPy array in native byte order"
    elif value.ndim != 4 or value.shape[0] != 1 or value.shape[3] != 3 or value.size == 0:
        observed, accepted = f"shape {value.shape!r}", "shape (1, H, W, 3) with H and W from 1"
    else:
        return
    raise ContractError(
        why="run_onnx takes one RGB image, NHWC",
        what=f"received {observed} as input_nhwc; accepted is {accepted}",
        how="convert it, such as image[None].astype(np.float32)",
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
    os.register_at_fork(after_in_child=_sessions.clear)  # their threads did not come along
