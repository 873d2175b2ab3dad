"""What stands in for ``stagelaunch.worker.main``: the same child, that also tells its supervisor it is ready."""

import os
import time

from trivial_child import announce

from stagelaunch.core import messages as m


def run(run_file, stage_id, channel):
    channel.sendall(m.encode(m.Ready(time.monotonic())))
    announce()
    with channel.makefile("rb") as lines:
        for line in lines:
            match m.decode(line):
                case m.Ping(request_id):
                    channel.sendall(m.encode(m.Pong(request_id)))
                case m.Stop():
                    break
    os._exit(0)
