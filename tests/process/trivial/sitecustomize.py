"""On PYTHONPATH, stages have a worker that does nothing: for timing what starts and ends them."""

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "stagelaunch.worker.main":
            return None
        file = str(Path(__file__).with_name("trivial_worker.py"))
        return importlib.machinery.ModuleSpec(name, importlib.machinery.SourceFileLoader(name, file), origin=file)


sys.meta_path.insert(0, _Finder())
