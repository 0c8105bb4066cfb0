"""flashxla: attention and KV-cache operations for LLMs that run inside XLA.

The operations live in one module per framework, with the same names and arguments in each:

    import flashxla.torch as fx   # PyTorch (cpu, cuda) and PyTorch/XLA
    import flashxla.jax as fx     # JAX
"""

from importlib.metadata import version as _version

from flashxla.explain import Explanation, explain
from flashxla.xla.cpu import use_cpu
from flashxla.xla.gpu import use_gpu

__version__ = _version("flashxla")


def setup_custom_call() -> None:
    """Register the custom calls with JAX, and with PyTorch/XLA if it is imported.

    Happens by itself on first use; a second call does nothing. A program that another process made with jax.export
    needs this call.
    """
    from flashxla.xla import registration

    registration.register_all()


__all__ = ["Explanation", "__version__", "explain", "setup_custom_call", "use_cpu", "use_gpu"]
