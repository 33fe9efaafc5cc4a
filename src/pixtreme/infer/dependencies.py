"""Optional dependencies: imported when a feature is used, with the extra that brings them in the error."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from pixtreme.infer.errors import actionable_error


def require_optional(module_name: str, *, extra: str) -> ModuleType:
    """Import a module that only one feature needs.

    Parameters
    ----------
    module_name
        Absolute name of the module.
    extra
        The extra of ``pixtreme-infer`` that installs it.

    Raises
    ------
    ImportError
        The module is not installed. A failure from *inside* an installed module passes through untouched.
    """
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        parents = {module_name.rsplit(".", count)[0] for count in range(module_name.count(".") + 1)}
        if error.name not in parents:
            raise  # the module is there; what it needs is not
        raise ImportError(
            actionable_error(
                why=f"this feature needs the optional module {module_name!r}",
                what=f"module {error.name!r} was not found; accepted is an environment with the extra {extra!r}",
                how=f"pip install 'pixtreme-infer[{extra}]'",
            ),
            name=error.name,
        ) from error
