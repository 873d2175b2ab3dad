"""An engine whose module starts a thread when it is imported."""

import threading

from light_engine import LightEngine

__all__ = ["LightEngine"]

threading.Thread(target=threading.Event().wait, daemon=True).start()
