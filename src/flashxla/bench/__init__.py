"""flashxla bench: what the operations cost on this machine, beside what else could do the work.

One file a topic (prefill, decode, kv_write, strategies); a topic is a table of cases, our operation and its
peers (`topic`), measured by `runner` and shown by `report`. The larger study of NVIDIA GPUs is not in the package:
it is the folder benchmarks of a checkout, which `cli` finds.
"""
