"""flashxla bench on a GPU: our operations beside what else could do the work, timed by the device's own clock.

A section (prefill, decode, mixed, kv_write, overhead, step) is a list of cases; a case is a list of contenders that
are checked against float64 (`reference`), timed in turn (`timers`, `compare`) and emitted as rows. The sections
run in a process of their own (`worker`) that another one watches (`supervisor`), so that a kernel that crashes or
hangs is one failed row of the report.

The same code runs on the CPU at tiny sizes, which is how it is tested.
"""
