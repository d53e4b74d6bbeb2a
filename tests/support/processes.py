"""Several processes of one gloo group, which start as forks of a clean server that has imported PyTorch once."""

import json
import multiprocessing
import os
from pathlib import Path

TIMEOUT = 200  # seconds that all of them have
PRELOADED = ("torch.distributed", "opgrad.torch")


def run_processes(work, count, folder, *arguments):
    """What work(rank, *arguments) returns in each of so many processes of a group: JSON values, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    started = [context.Process(target=_begin, args=(work, rank, count, folder, arguments)) for rank in range(count)]
    for process in started:
        process.start()
    try:
        for process in started:
            process.join(TIMEOUT)
        assert [process.exitcode for process in started] == [0] * count
    finally:
        for process in started:
            process.kill()
    return [json.loads((Path(folder) / f"found{rank}.json").read_text()) for rank in range(count)]


def _begin(work, rank, count, folder, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    import opgrad

    torch.set_num_threads(1)
    opgrad.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
    found = work(rank, *arguments)
    torch.distributed.destroy_process_group()
    (Path(folder) / f"found{rank}.json").write_text(json.dumps(found))
