"""An HTTP service that upscales posted images x4: one event loop, a pool of streams, a bounded number of requests.

    python examples/serve.py --port 8000 --streams 2
    curl --data-binary @photo.png http://127.0.0.1:8000/upscale > large.png

At the bound it answers 503 with Retry-After, at once. SIGTERM (or Ctrl-C) answers every request that was accepted, then
closes the streams. The body is PNG or JPEG; decoding, blending and encoding run in threads, the network on the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import realesr
import uvicorn
from anyio.to_thread import run_sync
from PIL import Image, UnidentifiedImageError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tiles import Grid, Pixels

from pixtreme.infer.aio import StreamPool
from pixtreme.infer.onnx_module import FACTORY, OnnxArtifact

LARGEST_BODY = 4 << 20  # bytes
LARGEST_IMAGE = 512 * 512  # pixels


class Service:
    """Counts requests and upscales images."""

    def __init__(self, pool: StreamPool[Any], *, tile: int, limit: int) -> None:
        self.pool = pool
        self.tile = tile
        self.limit = limit
        self.in_flight = 0
        self.threads = anyio.CapacityLimiter(2)

    async def upscale(self, request: Request) -> Response:
        """Answer one request, or refuse it at once where too many are under way."""
        if self.in_flight >= self.limit:
            return Response("busy: try again\n", status_code=503, headers={"Retry-After": "1"})
        self.in_flight += 1
        try:
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > LARGEST_BODY:
                    return Response(f"the body is larger than {LARGEST_BODY} bytes\n", status_code=413)
            try:
                tiles = await run_sync(decode, bytes(body), self.tile, limiter=self.threads)
            except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
                return Response(f"not an image to upscale: {error}\n", status_code=400)
            results = await asyncio.gather(*(self.pool.run(piece, host=True) for piece in tiles.pieces))
            png = await run_sync(encode, tiles, [result.data for result in results], limiter=self.threads)
            return Response(png, media_type="image/png")
        finally:
            self.in_flight -= 1

    async def health(self, request: Request) -> Response:
        """Say what is going on."""
        return JSONResponse({"in_flight": self.in_flight, "limit": self.limit, "streams": len(self.pool.live)})


@dataclass(frozen=True)
class Tiles:
    """An image cut into pieces of one size, and what of the result is the image."""

    grid: Grid
    pieces: list[Pixels]
    crop: tuple[slice, slice]


def decode(body: bytes, tile: int) -> Tiles:
    """Decode an image and cut it into tiles; one that is smaller than a tile is padded."""
    with Image.open(io.BytesIO(body), formats=("PNG", "JPEG")) as picture:
        if picture.width * picture.height > LARGEST_IMAGE:
            raise ValueError(f"{picture.width}x{picture.height} has more than {LARGEST_IMAGE} pixels")
        image = np.asarray(picture.convert("RGB"), np.float32) * np.float32(1 / 255)
    height, width = image.shape[:2]
    padded = np.pad(image, [(0, max(tile - height, 0)), (0, max(tile - width, 0)), (0, 0)], mode="edge")
    grid = Grid.over(padded.shape[:2], tile=tile, margin=realesr.RADIUS)
    return Tiles(grid, list(grid.cut(padded)), (slice(height * realesr.SCALE), slice(width * realesr.SCALE)))


def encode(tiles: Tiles, results: list[Pixels]) -> bytes:
    """Blend the upscaled tiles and return a PNG."""
    image = tiles.grid.blend(results, realesr.SCALE)[tiles.crop]
    buffer = io.BytesIO()
    Image.fromarray(np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def make_app(pool: StreamPool[Any], *, tile: int, limit: int) -> Starlette:
    """Return the application; it closes the pool when it shuts down."""
    service = Service(pool, tile=tile, limit=limit)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with pool:
            yield

    routes = [Route("/upscale", service.upscale, methods=["POST"]), Route("/health", service.health)]
    return Starlette(routes=routes, lifespan=lifespan)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--limit", type=int, default=32, help="requests under way at once; more get 503")
    parser.add_argument("--tile", type=int, default=64, help="pixels a side the network runs on")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        artifact = OnnxArtifact(realesr.write_onnx(Path(folder) / "realesr.onnx"))
        hw = (options.tile, options.tile)
        devices = [options.device] * options.streams
        pool = StreamPool.open(
            devices, FACTORY.graph_factory(), artifact, precision="fp32", input_hw=hw, max_in_flight=2
        )
        app = make_app(pool, tile=options.tile, limit=options.limit)
        uvicorn.run(app, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
