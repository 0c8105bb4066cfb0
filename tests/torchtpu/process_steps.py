"""What each of two processes does on its device: torchrun --nproc-per-node 2 -m tests.torchtpu.process_steps."""

from __future__ import annotations

import os

from tests.torchtpu import device

GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
before = {name: os.environ[name] for name in GROUP}
device.start()
assert {name: os.environ[name] for name in GROUP} == before

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from flashxla.torch import flash_attn_varlen_func  # noqa: E402

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, atol=2e-5, rtol=2e-5)


def collectives() -> None:
    """Each changes the tensors of TorchTPU that it is given, and those of the CPU."""
    for where in ("tpu", "cpu"):
        of_rank = [torch.arange(4.0) + 10 * r for r in range(SIZE)]
        mine, total = of_rank[RANK].to(where), sum(of_rank)
        x = mine.clone()
        dist.all_reduce(x)
        close(x, total)
        x = mine.clone()
        dist.broadcast(x, src=1)
        close(x, of_rank[1])
        x = mine.clone()
        dist.reduce(x, dst=0)
        close(x, total if RANK == 0 else x.cpu())
        parts = [torch.empty(4, device=where) for _ in range(SIZE)]
        dist.all_gather(parts, mine)
        close(torch.stack(parts), torch.stack(of_rank))
        x = torch.empty(4 * SIZE, device=where)
        dist.all_gather_into_tensor(x, mine)
        close(x, torch.cat(of_rank))
        x = torch.empty(4 // SIZE, device=where)
        dist.reduce_scatter_tensor(x, mine)
        close(x, total.chunk(SIZE)[RANK])
        x = torch.empty(4, device=where)
        dist.all_to_all_single(x, mine)
        close(x, torch.cat([y.chunk(SIZE)[RANK] for y in of_rank]))
        dist.scatter(x, [y.to(where) for y in of_rank] if RANK == 0 else None, src=0)
        close(x, of_rank[RANK])
        if RANK == 0:
            dist.send(mine, dst=1)
        elif RANK == 1:
            dist.recv(x, src=0)
            close(x, of_rank[0])
    objects = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": r} for r in range(SIZE)]
    dist.barrier()


def data_parallel() -> None:
    """Three steps on the parts of a batch, by DistributedDataParallel, are three steps on the batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    reference = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    reference.load_state_dict(model.state_dict())
    parallel = DistributedDataParallel(model.to("tpu"))
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (parallel, reference)]
    for _ in range(3):
        batch = torch.randn(6 * SIZE, 8)  # the same in each process
        for module, optimizer, x in zip(
            (parallel, reference), optimizers, (batch.chunk(SIZE)[RANK].to("tpu"), batch), strict=True
        ):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    for x, expected in zip(model.parameters(), reference.parameters(), strict=True):
        close(x.detach(), expected.detach())


def heads() -> None:
    """Tensor parallelism: each process has its heads; the projections' parts are added up."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(9, n, 16) for n in (4, 2, 2))
    projection = torch.randn(4, 16, 8)
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        cu = offsets.to(q.device)
        out = flash_attn_varlen_func(q, k, v, 6, cu, 6, cu, causal=True)
        return torch.einsum("thd,hdo->to", out, w)

    part = attend(
        *(x.chunk(SIZE, dim)[RANK].to("tpu") for x, dim in ((q, 1), (k, 1), (v, 1), (projection, 0)))
    )
    dist.all_reduce(part)
    close(part, attend(q, k, v, projection))


dist.init_process_group("flashxla_gloo")
collectives()
data_parallel()
heads()
dist.destroy_process_group()
print(f"rank {RANK}: done", flush=True)
