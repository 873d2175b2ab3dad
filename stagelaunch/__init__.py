"""stagelaunch boots every stage of a multi-stage model on shared GPUs: all of them, or none.

The names below are the library; the rest is used by the ``stagelaunch`` command. Importing this imports no torch.
"""

from stagelaunch.core.admission import admission_check
from stagelaunch.core.errors import StagelaunchError
from stagelaunch.core.groups import init_groups
from stagelaunch.init import InitError, run_init

__all__ = ["InitError", "StagelaunchError", "admission_check", "init_groups", "run_init"]
