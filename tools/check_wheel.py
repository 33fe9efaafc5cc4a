"""Look into a built wheel: it owns ``pixtreme/infer/`` and its metadata, and nothing else."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def problems(wheel: Path) -> list[str]:
    """Return what is wrong with the wheel's contents."""
    names = zipfile.ZipFile(wheel).namelist()
    foreign = [name for name in names if not name.startswith(("pixtreme/infer/", "pixtreme_infer-"))]
    wanted = ["pixtreme/infer/py.typed", "pixtreme/infer/__init__.py", "pixtreme/infer/runtimes/host/_runtime.py"]
    found = [f"{name} does not belong here" for name in foreign]
    found += [f"{name} is missing" for name in wanted if name not in names]
    if not any(name.endswith("licenses/LICENSE") for name in names):
        found.append("the license is missing")
    return found


if __name__ == "__main__":
    wheels = list(Path(sys.argv[1]).glob("*.whl"))
    found = [f"{wheel.name}: {problem}" for wheel in wheels for problem in problems(wheel)]
    print("\n".join(found or [f"{wheel.name} holds pixtreme/infer and its metadata only" for wheel in wheels]))
    sys.exit(len(wheels) != 1 or bool(found))
