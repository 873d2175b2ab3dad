"""What stands in for ``stagelaunch.worker.main``: says when it can use what its engine needs."""

import os


def run(run_file, stage_id, channel):
    from stagelaunch.engines.base import import_engine

    import_engine("qwen3-omni")
    import torch

    channel.sendall(str(int(torch.ones(2).sum())).encode())
    os._exit(0)
