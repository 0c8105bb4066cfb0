"""What each of several processes does, one GPU each: a sum over all of them, and a cache write of its own.

`python -m tests.cuda.launch_steps launch`, or `torchrun --nproc-per-node=2 -m tests.cuda.launch_steps torchrun`.
Rank 0 prints what all of them found.
"""

from __future__ import annotations

import json
import sys

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

import flashxla.torch as fx


def work() -> None:
    rank, size, device = xr.global_ordinal(), xr.world_size(), torch_xla.device()
    # All processes must compile the same programs: what differs is data.
    number = torch.tensor([rank + 1.0]).to(device)
    slots = torch.tensor([17 + rank], dtype=torch.int32).to(device)
    total = xm.all_reduce(xm.REDUCE_SUM, number)
    keys, values = (torch.zeros(4, 16, 2, 64, device=device) for _ in range(2))
    key = number.expand(1, 2, 64).contiguous()
    fx.reshape_and_cache_flash(key, key, keys, values, slots)
    torch_xla.sync(wait=True)
    written = keys.cpu().view(-1, 2, 64)
    found = [rank, total.cpu()[0].item(), written[17 + rank, 0, 0].item(), written.abs().sum().item()]
    everyone = xm.all_gather(torch.tensor([found]).to(device)).cpu()
    if rank == 0:
        devices = torch_xla._XLAC._xla_get_all_devices()
        print(json.dumps({"size": size, "devices": devices, "found": everyone.tolist()}), flush=True)


def _process(index: int) -> None:
    work()


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        torch_xla.launch(_process)
    else:
        import torch.distributed as dist
        import torch_xla.distributed.xla_backend

        dist.init_process_group("xla", init_method="xla://")
        work()
