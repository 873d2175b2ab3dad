"""A light engine whose steps take as long as they are told: what a device would work on is slept through.

``options``: ``import_s``; ``read_s``, over which the weights come in; ``warm_s``, the first batch of a process (what
compiling and tuning take), then ``batch_s`` for each; ``graph_s`` for each capture. Used by ``boot_bench``.
"""

from __future__ import annotations

import time

from light_engine import LightEngine

from stagelaunch.engines.base import Progress

PIECES = 20


class PacedEngine(LightEngine):
    _is_warm = False

    def _pace(self, name: str, share: float = 1.0) -> None:
        time.sleep(float(self._spec.options.get(name, "0")) * share)

    def import_libraries(self) -> None:
        super().import_libraries()
        self._pace("import_s")

    def read_weights(self, progress: Progress) -> None:
        for piece in range(PIECES):
            progress(piece * self._ballast.nbytes // PIECES, self._ballast.nbytes)
            self._pace("read_s", 1 / PIECES)
        super().read_weights(progress)

    def run_largest_batch(self) -> None:
        self._pace("batch_s" if self._is_warm else "warm_s")
        self._is_warm = True
        super().run_largest_batch()

    def capture(self, size: int) -> None:
        self._pace("graph_s")
        super().capture(size)
