"""transformers' models with flashxla's attention: one call, then a name.

    import flashxla.transformers
    flashxla.transformers.enable()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="flashxla")

See docs/transformers.md.
"""

from __future__ import annotations

try:
    import transformers as _transformers
except ImportError as error:
    from flashxla import install

    raise ImportError(f"flashxla.transformers needs transformers: {install.command('generate')}") from error

from transformers import AttentionInterface, AttentionMaskInterface

from flashxla.generate import DEFAULT_MODEL
from flashxla.transformers import interface, loading, masks, own_cache

# The attention implementations that `enable` adds. The second is the same for tools that take the names of kernels on
# the hub only, as `transformers serve` does; the third is for programs that hold the paged cache themselves.
NAME = "flashxla"
KERNEL_NAME = "flashxla/attention"
OWN_CACHE = "flashxla_own_cache"
# What transformers 5.6 puts before a model's name for the time of continuous batching.
_PAGED = "paged|"


def enable() -> None:
    """Make attn_implementation="flashxla" known to transformers. A second call does nothing.

    It serves from_pretrained and set_attn_implementation: forward, training, generate with dynamic and static caches,
    and continuous batching. A model or call that the operations cannot express raises a ValueError.

    Raises:
        ImportError: a version of transformers without its attention interface.
    """
    names = (NAME, KERNEL_NAME, *(_PAGED + name for name in (NAME, KERNEL_NAME)))
    loading.accept((*names, OWN_CACHE), _transformers.PreTrainedModel)
    for name in names:
        AttentionInterface.register(name, interface.attention)
        AttentionMaskInterface.register(name, masks.spans)
    # No mask function: transformers then makes no mask, and reads no positions to find out whether it should.
    AttentionInterface.register(OWN_CACHE, own_cache.attention)


__all__ = ["DEFAULT_MODEL", "KERNEL_NAME", "NAME", "OWN_CACHE", "enable"]
