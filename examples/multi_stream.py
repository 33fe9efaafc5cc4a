"""Three contexts chained by handles: each waits for the one before on the device, the host waits once at the end."""

from __future__ import annotations

import time

import numpy as np

from pixtreme.infer.streams import StreamContext


def soften(image: np.ndarray) -> np.ndarray:
    """Enqueue a blur of 200 passes on the current stream; the result's pixels arrive in stream order."""
    result = np.empty_like(image)

    def work() -> None:
        result[...] = image
        for _ in range(200):
            result[1:-1] = (result[:-2] + result[1:-1] + result[2:]) / 3

    StreamContext.current().stream.enqueue(work)
    return result


def main() -> None:
    image = np.random.default_rng(0).random((512, 512), np.float32)
    with StreamContext.open("cpu") as first, StreamContext.open("cpu") as second, StreamContext.open("cpu") as third:
        started = time.perf_counter()
        handle = first.submit(soften, image).then(second, soften).then(third, soften)
        submitted = time.perf_counter()
        result = handle.result()
    print(
        f"submitted in {1e3 * (submitted - started):.2f} ms, done after {1e3 * (time.perf_counter() - started):.1f} ms"
    )
    print(f"standard deviation {image.std():.3f} became {result.std():.3f}")


if __name__ == "__main__":
    main()
