"""Makes a stage misbehave in its spawn phase: before its worker has said a word. On PYTHONPATH for such tests only.

``STAGELAUNCH_TEST_SPAWN_FAULT=STAGE_ID:KIND`` names who and how.
"""

import importlib.abc
import importlib.machinery
import os
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "stagelaunch.worker.main":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            run = module.run

            def misbehaving(run_file, stage_id, *more):
                wanted, _, kind = os.environ["STAGELAUNCH_TEST_SPAWN_FAULT"].partition(":")
                if stage_id == int(wanted):
                    from misbehaviour import misbehave

                    misbehave(kind)
                run(run_file, stage_id, *more)

            module.run = misbehaving

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
