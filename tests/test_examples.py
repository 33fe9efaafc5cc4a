"""The examples, run as a user runs them, and the main job held to its promises."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import multi_stream
import numpy as np
import onnxruntime
import pytest
import realesr
import serve
import sync_call
import trio_fanout
import upscale_photo
import video_pipeline
from PIL import Image
from rich.progress import Progress
from tiles import Grid


@pytest.mark.network
@pytest.mark.parametrize("streams", [1, 2, 3])
def test_tiles_on_streams_equal_one_run(network: Path, streams: int) -> None:
    """The blended tiles equal the network run on the whole image by plain ONNX Runtime, seams included."""
    image = upscale_photo.load(None)[120:260, 200:400]
    grid = Grid.over(image.shape[:2], tile=96, margin=realesr.RADIUS)
    assert len(grid.corners) >= 6
    with Progress(disable=True) as progress:
        result, _ = asyncio.run(
            upscale_photo.upscale(image, network, grid, device="cpu", streams=streams, progress=progress)
        )
    session = onnxruntime.InferenceSession(str(network), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"input": image[None]})
    assert np.abs(result - expected[0]).max() <= 1e-5


@pytest.mark.network
@pytest.mark.slow
def test_main_writes_a_sharper_picture(tmp_path: Path) -> None:
    """The command line writes a PNG four times as large, with steeper edges than an interpolation, from any folder."""
    small = Image.fromarray((upscale_photo.load(None)[150:250, 260:400] * 255).astype(np.uint8))
    small.save(tmp_path / "photo.png")
    script = Path(upscale_photo.__file__)
    done = subprocess.run(
        [sys.executable, script, "photo.png", "--streams", "2", "--tile", "96", "--output", "out.png"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    )
    assert "speed-up of 2 streams over one" in done.stdout
    assert "frames (tiles) per second" in done.stdout
    picture = Image.open(tmp_path / "out.png")
    assert picture.size == (560, 400)
    assert _steepness(picture) > 1.3 * _steepness(small.resize(picture.size, Image.Resampling.BICUBIC))


def _steepness(picture: Image.Image) -> float:
    """Mean of the steepest hundredth of the gradients: how sharp edges are."""
    values = np.asarray(picture.convert("L"), np.float64)
    slopes = np.sort(np.abs(np.diff(values, axis=1)), axis=None)
    return float(slopes[-slopes.size // 100 :].mean())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["absent.png"], "absent.png"),
        (["--device", "cuda:0"], "available here are"),
        (["--tile", "20"], "too small"),
    ],
)
def test_main_explains_what_is_wrong(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Bad input ends with the error's text and exit code 1, not with a traceback."""
    assert upscale_photo.main([*arguments, "--output", str(tmp_path / "out.png")]) == 1
    assert word in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize("tile", [64, 97, 500])
@pytest.mark.parametrize("size", [(64, 64), (140, 201), (65, 300)])
def test_blending_an_identity_gives_the_image_back(size: tuple[int, int], tile: int) -> None:
    """The weights of each pixel add up to one, whatever the grid."""
    image = np.random.default_rng(1).random((*size, 3), np.float32)
    grid = Grid.over(size, tile=tile, margin=18)
    enlarged = [piece.repeat(2, 0).repeat(2, 1) for piece in grid.cut(image)]
    np.testing.assert_allclose(grid.blend(enlarged, 2), image.repeat(2, 0).repeat(2, 1), atol=1e-6)


@pytest.mark.network
def test_sync_call(capsys: pytest.CaptureFixture[str]) -> None:
    """The synchronous example."""
    sync_call.main()
    assert "HostFrame(512x384 float32" in capsys.readouterr().out


def test_multi_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """The three-context example."""
    multi_stream.main()
    assert "became" in capsys.readouterr().out


def test_small_examples_are_small() -> None:
    """Two of the examples fit on a screen: at most 40 lines."""
    for module in (sync_call, multi_stream):
        assert len(Path(str(module.__file__)).read_text("utf-8").splitlines()) <= 40


@pytest.mark.network
@pytest.mark.slow
def test_video_pipeline(tmp_path: Path) -> None:
    """Decode, upload, upscale, download and encode a short video: every frame arrives, x4, in order."""
    done = subprocess.run(
        [sys.executable, video_pipeline.__file__, "--frames", "6", "--size", "48", "64", "--output", "out.mp4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    )
    assert "6 frames in" in done.stdout
    assert "longest block of the event loop" in done.stdout
    frames = list(video_pipeline.decode(tmp_path / "out.mp4"))
    assert [frame.shape for frame in frames] == [(192, 256, 3)] * 6
    expected = [Image.fromarray(frame).resize((256, 192)) for frame in video_pipeline.pan(6, (48, 64))]
    for number, frame in enumerate(frames):
        distances = [float(np.abs(np.asarray(other, np.float32) / 255 - frame).mean()) for other in expected]
        assert distances[number] == min(distances)
        assert distances[number] < 0.08


@pytest.mark.network
def test_video_pipeline_explains_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there ends with its name and exit code 1."""
    assert video_pipeline.main([str(tmp_path / "absent.mp4"), "--output", str(tmp_path / "out.mp4")]) == 1
    assert "absent.mp4" in capsys.readouterr().err


@pytest.mark.network
def test_trio_fanout(capsys: pytest.CaptureFixture[str]) -> None:
    """The trio example."""
    trio_fanout.main()
    assert capsys.readouterr().out.count("HostFrame(384x256 float32") == 4


class Server:
    """`examples/serve.py` in a process of its own."""

    def __init__(self, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, str(serve.__file__), "--port", str(self.port), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while True:
            try:
                self.ask("GET", "/health")
                break
            except ConnectionRefusedError:
                assert self.process.poll() is None, self.process.communicate()[1]

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=50)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def in_flight(self) -> int:
        number: int = json.loads(self.ask("GET", "/health")[2])["in_flight"]
        return number


def _png(hw: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(next(video_pipeline.pan(1, hw))).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.network
@pytest.mark.slow
def test_serve() -> None:
    """It upscales, refuses what is no image and what is too much, and after SIGTERM answers all it had accepted."""
    server = Server("--limit", "4", "--tile", "64", "--device", "cpu")
    try:
        status, headers, body = server.ask("POST", "/upscale", _png((50, 70)))
        assert (status, headers["content-type"]) == (200, "image/png")
        assert Image.open(io.BytesIO(body)).size == (280, 200)
        assert server.ask("POST", "/upscale", b"no picture")[0] == 400
        assert server.ask("POST", "/upscale", bytes(serve.LARGEST_BODY + 1))[0] == 413
        with ThreadPoolExecutor(4) as clients:
            answers = [clients.submit(server.ask, "POST", "/upscale", _png((150, 400))) for _ in range(4)]
            while server.in_flight() < 4:
                assert not any(answer.done() for answer in answers)
            status, headers, _ = server.ask("POST", "/upscale", _png((50, 70)))
            assert (status, headers["retry-after"]) == (503, "1")
            server.process.send_signal(signal.SIGTERM)
            results = [answer.result() for answer in answers]
        assert [status for status, _, _ in results] == [200] * 4
        assert {Image.open(io.BytesIO(body)).size for _, _, body in results} == {(1600, 600)}
        errors = server.process.communicate(timeout=20)[1]
        assert server.process.returncode in (0, -signal.SIGTERM)  # uvicorn passes the signal on when it is done
        assert "Traceback" not in errors
    finally:
        server.process.kill()
        server.process.wait()
