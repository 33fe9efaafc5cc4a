"""Three contexts chained by handles: each waits for the one before on the device, the host waits once at the end."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from pixtreme.infer.streams import StreamContext


def soften(image: Any, *, out: Any) -> None:
    """Blur in 200 passes: arrays of NumPy or CuPy."""
    out[...] = image
    for _ in range(200):
        out[1:-1] = (out[:-2] + out[1:-1] + out[2:]) / 3


def main(device: str = "auto") -> np.ndarray:
    image = np.random.default_rng(0).random((512, 512), np.float32)
    with StreamContext.open(device) as first, StreamContext.open(device) as second, StreamContext.open(device) as third:
        started = time.perf_counter()
        handle = first.from_host(image)
        for context in (first, second, third):
            handle = context.enqueue(soften, handle, out=context.empty(image.shape))
        handle = third.to_host(handle)
        submitted = time.perf_counter()
        result: np.ndarray = handle.result()
    print(
        f"submitted in {1e3 * (submitted - started):.2f} ms, done after {1e3 * (time.perf_counter() - started):.1f} ms"
    )
    print(f"standard deviation {image.std():.3f} became {result.std():.3f}")
    return result


if __name__ == "__main__":
    main()
