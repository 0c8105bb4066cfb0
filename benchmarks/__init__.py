"""The study on NVIDIA GPUs: our operations beside what else could do the work, timed by the device's own clock.

`flashxla bench` runs it from a checkout (`command`); it is no part of the wheel. A section (prefill, decode, mixed,
kv_write, overhead, plan, step) is a list of cases; a case is a list of contenders that are checked against float64
(`reference`), timed in turn (`timers`, `compare`) and emitted as rows. They run in processes (`worker`) that another
one watches (`supervisor`), so that a kernel that crashes or hangs is one failed row of the report.

The same code runs on the CPU at tiny sizes (--quick), which is how it is tested. `document` writes docs/benchmarks.md.
"""

import os

# Where TorchTPU is installed, `import torch` would start it, without a plugin. Those who want it start it.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
