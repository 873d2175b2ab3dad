"""What stands in for ``stagelaunch.worker.main``: ends, and leaves a child that floods the channel for ever."""

import os


def run(run_file, stage_id, channel):
    if os.fork() == 0:
        while True:
            # Many lines, so that reading takes longer than writing.
            channel.sendall(b"x\n" * 10_000)
    os._exit(3)
