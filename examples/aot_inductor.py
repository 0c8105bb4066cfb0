"""A decode step with a paged cache as an AOTInductor package: exported, compiled, loaded, run.

    python examples/aot_inductor.py [--package step.pt2]

torch.export keeps flashxla's operations as they are, and the package writes the caches in place. The process that
loads a package imports flashxla.torch, which defines the operations. It needs neither the model's code nor a compiler.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

# Where TorchTPU is installed, `import torch` would start it.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch

import flashxla.torch as fx

HEADS, KV_HEADS, HEAD_SIZE, WIDTH = 4, 2, 16, 64
BLOCKS, BLOCK_SIZE, BLOCKS_PER_SEQUENCE = 32, 16, 4
SEQUENCES = 3


class Layer(torch.nn.Module):
    """Attention of one new token of each sequence to all of its tokens in the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, bias=False)
        self.out = torch.nn.Linear(HEADS * HEAD_SIZE, WIDTH, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_seqs: torch.Tensor,
    ) -> torch.Tensor:
        """x [SEQUENCES, WIDTH]. Writes the new keys and values into the caches and returns [SEQUENCES, WIDTH]."""
        q, k, v = self.qkv(x).unflatten(1, (-1, HEAD_SIZE)).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        out = fx.ragged_paged_attention(
            q,
            k,
            v,
            (key_cache, value_cache),
            context_lens,
            block_tables,
            query_start_loc,
            num_seqs,
            HEAD_SIZE**-0.5,
            max_seqlen_q=1,
        )
        return x + self.out(out.flatten(1))


def new_arguments() -> tuple[torch.Tensor, ...]:
    """Tokens, caches that hold earlier tokens, and where each sequence's tokens lie."""
    generator = torch.Generator().manual_seed(1)
    shape = BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE
    tables = torch.randperm(BLOCKS, generator=generator)[: SEQUENCES * BLOCKS_PER_SEQUENCE]
    return (
        torch.randn(SEQUENCES, WIDTH, generator=generator),
        torch.randn(shape, generator=generator),
        torch.randn(shape, generator=generator),
        torch.tensor([5, 40, 64], dtype=torch.int32),  # with the new token
        tables.view(SEQUENCES, BLOCKS_PER_SEQUENCE).int(),
        torch.arange(SEQUENCES + 1, dtype=torch.int32),
        torch.tensor([SEQUENCES], dtype=torch.int32),
    )


@torch.no_grad()
def main() -> None:
    """Export and compile the step, then compare the package with the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", type=Path, help="file to write (default: a temporary one)")
    options = parser.parse_args()

    torch.manual_seed(0)
    layer = Layer().eval()
    exported = torch.export.export(layer, new_arguments())
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(options.package or Path(folder) / "step.pt2")
        )
        print(f"compiled in {time.monotonic() - started:.1f} s")
        step = torch._inductor.aoti_load_package(package)

        expected, got = new_arguments(), new_arguments()
        places = [cache.data_ptr() for cache in got[1:3]]
        torch.testing.assert_close(step(*got), layer(*expected))
        # The caches are those that were given, with the new tokens in them.
        torch.testing.assert_close(got[1:3], expected[1:3], rtol=1e-5, atol=1e-5)
        assert not torch.equal(got[1], new_arguments()[1])
        assert places == [cache.data_ptr() for cache in got[1:3]]
    print("the package gives the model's results, and writes the caches in place")


if __name__ == "__main__":
    main()
