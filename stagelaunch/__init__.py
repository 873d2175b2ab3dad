"""stagelaunch boots every stage of a multi-stage model on shared GPUs: all of them, or none.

The names below are the library; the rest is used by the ``stagelaunch`` command. Importing this imports no torch, and
nothing but the standard library until one of the names is used: the warden has no more than that.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagelaunch.core.admission import admission_check
    from stagelaunch.core.errors import StagelaunchError
    from stagelaunch.core.groups import init_groups
    from stagelaunch.init import InitError, run_init

__all__ = ["InitError", "StagelaunchError", "admission_check", "init_groups", "run_init"]

# Not seen by a type checker, which would take any name for one of ours.
if not TYPE_CHECKING:
    _HOMES = {
        "InitError": "init",
        "StagelaunchError": "core.errors",
        "admission_check": "core.admission",
        "init_groups": "core.groups",
        "run_init": "init",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
