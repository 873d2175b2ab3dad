"""On PYTHONPATH, stages have another worker: one that does nothing, for timing what starts and ends them, or the one
that ``STAGELAUNCH_TEST_WORKER`` names."""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "stagelaunch.worker.main":
            return None
        file = str(Path(__file__).with_name(os.environ.get("STAGELAUNCH_TEST_WORKER", "trivial_worker.py")))
        return importlib.machinery.ModuleSpec(name, importlib.machinery.SourceFileLoader(name, file), origin=file)


sys.meta_path.insert(0, _Finder())
