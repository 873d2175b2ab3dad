"""An engine whose module waits, when it is imported, until the FIFO named in the environment says something."""

import os

with open(os.environ["ODD_WAIT"], "rb") as fifo:
    fifo.read(1)
