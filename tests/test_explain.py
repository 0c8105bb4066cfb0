"""flashxla.explain: what serves a call, without running it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashxla
from flashxla import native
from flashxla.ops import functions

T, S, M, P, B, HQ, HK, D = 5, 2, 3, 9, 16, 4, 2, 64
INDEX: tuple[tuple[int, ...], ...] = ((S,), (S, M), (S + 1,), (1,))


def jax_arguments() -> tuple[Any, ...]:
    jax = pytest.importorskip("jax")
    cache = jax.ShapeDtypeStruct((P, B, HK, D), "float32")
    index = [jax.ShapeDtypeStruct(shape, "int32") for shape in INDEX]
    return (jax.ShapeDtypeStruct((T, HQ, D), "float32"), (cache, cache), *index, 0.125)


def torch_arguments() -> tuple[Any, ...]:
    torch = pytest.importorskip("torch")
    caches = tuple(torch.zeros(P, B, HK, D) for _ in "kv")
    index = [torch.zeros(shape, dtype=torch.int32) for shape in INDEX]
    return (torch.zeros(T, HQ, D), caches, *index, 0.125)


ARGUMENTS = {"jax": jax_arguments, "torch": torch_arguments}


# query tokens, head size: of the CPU's kernels the work, the name, and a word of why it is not the fastest for it
ON_CPU = [
    (1, 64, [("all queries", "few_rows", "")]),
    (4, 64, [("all queries", "few_rows", "")]),  # 8 rows of a KV head
    (5, 64, [("few queries", "few_rows", ""), ("many queries", "tiles", "")]),
    (500, 512, [("few queries", "few_rows", ""), ("many queries", "tiles", "")]),
    (1, 1, [("all queries", "tiles", "head")]),
    (9, 1, [("all queries", "tiles", "head")]),
]


@pytest.mark.parametrize(("tokens", "dim", "kernels"), ON_CPU)
def test_kernels_of_the_cpu(tokens: int, dim: int, kernels: list[tuple[str, str, str]]) -> None:
    jax = pytest.importorskip("jax")
    _, _, *rest = jax_arguments()
    query = jax.ShapeDtypeStruct((tokens, HQ, dim), "float32")
    cache = jax.ShapeDtypeStruct((P, B, HK, dim), "float32")
    got = flashxla.explain("paged_attention", query, (cache, cache), *rest, platform="cpu")
    assert [(kernel.work, kernel.name) for kernel in got.kernels] == [row[:2] for row in kernels]
    for kernel, (_, _, why) in zip(got.kernels, kernels, strict=True):
        assert bool(kernel.reason) == bool(why) and why in kernel.reason, kernel
    assert got.plan_bytes == got.workspace_bytes == 0
    lines = ["paged_attention on cpu"]
    for kernel in got.kernels:
        assert kernel.description
        lines.append(f"  {kernel.work:<16} {kernel.name}: {kernel.description}, {got.instruction_set}")
        lines += [f"{'':<19}because: {kernel.reason}"] if kernel.reason else []
    assert str(got).splitlines() == lines


def test_strides_are_a_reason() -> None:
    torch = pytest.importorskip("torch")
    query, (k, v), *rest = torch_arguments()
    apart = (torch.empty(*k.shape, 2)[..., 0], v)
    got = flashxla.explain("paged_attention", query, apart, *rest)
    assert got.reason and got.few_queries.startswith("tiles: ")
    assert flashxla.explain("paged_attention", query, (k, v), *rest).reason == ""


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_cpu(framework: str) -> None:
    arguments = ARGUMENTS[framework]()
    got = flashxla.explain("paged_attention", *arguments, platform="cpu")
    assert (got.operation, got.platform, got.reason) == ("paged_attention", "cpu", "")
    assert got.instruction_set == native.library("cpu").instruction_set
    assert got.instruction_set in got.few_queries
    assert got.few_queries in str(got) and got.many_queries in str(got)
    assert [kernel.name for kernel in got.kernels] == ["few_rows", "tiles"]


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_cuda(framework: str) -> None:
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    got = flashxla.explain("paged_attention", *ARGUMENTS[framework](), platform="cuda")
    assert [kernel.work for kernel in got.kernels] == ["all queries"] and got.plan_bytes > 0
    assert got.few_queries == got.many_queries == str(got.kernels[0]) and got.instruction_set == ""
    assert f"{got.plan_bytes} bytes" in str(got) and f"because: {got.reason}" in str(got)


def test_a_step_that_only_decodes() -> None:
    """With one query promised for each sequence there is a kernel for few queries and no other."""
    torch = pytest.importorskip("torch")
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    query, cache = torch.ones(64, 32, 128).bfloat16(), torch.ones(9, 16, 8, 256).bfloat16()
    index = [torch.zeros(shape, dtype=torch.int32) for shape in ((64,), (64, 9), (65,), (1,))]
    options = {"scale": 0.1, "layout": "packed_NHD", "platform": "cuda"}
    any_length = flashxla.explain("paged_attention", query, cache, *index, **options)
    decode = flashxla.explain("paged_attention", query, cache, *index, **options, max_seqlen_q=1)
    assert len(any_length.kernels) > 1
    assert [kernel.work for kernel in decode.kernels] == ["all queries"]
    assert decode.kernels[0].name == any_length.kernels[0].name == "swap"


# What TMA does not take: the page size, the head size, the dtype of the keys.
NOT_FOR_TMA = [
    (17, 128, "bfloat16", "page size is not a multiple of 8"),
    (4, 128, "float8_e4m3fn", "page size is not a multiple of 8"),
    (16, 44, "bfloat16", "strides"),
    (16, 72, "float8_e5m2", "strides"),
    (16, 45, "bfloat16", "not multiples of 4 bytes"),
]


@pytest.mark.parametrize("tokens", [T, 500])
@pytest.mark.parametrize(("page", "dim", "dtype", "why"), NOT_FOR_TMA)
def test_few_queries_without_tma(page: int, dim: int, dtype: str, why: str, tokens: int) -> None:
    """They are served, and the reason is said: of all queries (5 tokens), and of few beside many."""
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    jax = pytest.importorskip("jax")
    _, _, *rest = jax_arguments()
    query = jax.ShapeDtypeStruct((tokens, HQ, dim), "bfloat16")
    cache = jax.ShapeDtypeStruct((P, page, HK, dim), dtype)
    kernel, *_ = flashxla.explain("paged_attention", query, (cache, cache), *rest, platform="cuda").kernels
    assert kernel.work == ("all queries" if tokens == T else "few queries")
    assert why in kernel.reason, kernel
    assert kernel.name == ("split" if dim % 2 else "swap"), kernel
    assert ("threads copy the keys" in kernel.description) == (kernel.name == "swap"), kernel


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_functions_and_keywords(framework: str) -> None:
    arguments = ARGUMENTS[framework]()
    module = pytest.importorskip(f"flashxla.{framework}")
    by_function = flashxla.explain(module.paged_attention, *arguments[:-1], scale=0.125, platform="cpu")
    assert by_function == flashxla.explain("paged_attention", *arguments, platform="cpu")


def test_nothing_runs() -> None:
    torch = pytest.importorskip("torch")
    cache, key = torch.zeros(2, 4, 1, 8), torch.ones(1, 1, 8)
    got = flashxla.explain("reshape_and_cache_flash", key, key, cache, cache.clone(), torch.tensor([5]))
    assert got.platform == "cpu" and got.few_queries == got.many_queries
    assert [(kernel.work, kernel.name) for kernel in got.kernels] == [("all", "kv_cache")]
    assert not cache.any()


def new_tokens(framework: str, *shape: int) -> Any:
    if framework == "jax":
        return pytest.importorskip("jax").ShapeDtypeStruct(shape, "float32")
    return pytest.importorskip("torch").ones(shape)


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_write_and_attend(framework: str) -> None:
    """As paged_attention; on a GPU its plan also says where the tokens go. Nothing runs."""
    query, caches, *rest = ARGUMENTS[framework]()
    new = [new_tokens(framework, T, HK, D) for _ in "kv"]
    for platform in ("cpu", "cuda"):
        if not native.is_installed(platform):
            continue
        got = flashxla.explain("ragged_paged_attention", query, *new, caches, *rest, platform=platform)
        alone = flashxla.explain("paged_attention", query, caches, *rest, platform=platform)
        assert got.operation == "ragged_paged_attention"
        assert got.kernels == alone.kernels
        more = got.plan_bytes - alone.plan_bytes
        assert more > 0 if platform == "cuda" else more == 0
    if framework == "torch":
        assert not caches[0].any() and not caches[1].any()


def test_other_head_sizes_are_a_reason_on_a_gpu() -> None:
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    jax = pytest.importorskip("jax")
    _, _, *rest = jax_arguments()
    caches = tuple(jax.ShapeDtypeStruct((P, B, HK, dim), "bfloat16") for dim in (576, 512))

    def explained(num_heads: int) -> flashxla.Explanation:
        query = jax.ShapeDtypeStruct((T, num_heads, 576), "bfloat16")
        return flashxla.explain("paged_attention", query, caches, *rest, platform="cuda")

    got = explained(HQ)
    assert got.few_queries.startswith("swap:") and "threads copy the keys" in got.few_queries
    got = explained(10 * HQ)
    assert got.few_queries.startswith("large_split:") and got.many_queries.startswith("large:")
    assert [kernel.reason for kernel in got.kernels] == [
        "head sizes are above 256, and a KV head may have more than 16 rows",
        "a head size, of 576 and 512, is above 256",
    ]


@pytest.mark.parametrize("tokens", [0, 1, 40, 5000])
def test_batch_invariant_on_a_gpu(tokens: int) -> None:
    """Thread blocks share the keys of few tokens, and there is room for what they add up."""
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    jax = pytest.importorskip("jax")
    integers = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((1,), (1, 2000), (2,), (1,))]
    caches = tuple(jax.ShapeDtypeStruct((2000, 16, 2, 128), "bfloat16") for _ in "kv")
    query = jax.ShapeDtypeStruct((tokens, 8, 128), "bfloat16")
    options = {"platform": "cuda", "batch_invariant": True, "max_seqlen_q": 1}
    got = flashxla.explain("paged_attention", query, caches, *integers, 0.1, **options)
    kernel = got.kernels[0]
    assert (kernel.name, kernel.work) == ("wide", "all queries")
    assert ("fixed parts of the keys" in kernel.description) == (tokens < 5000)
    assert 0 < got.workspace_bytes < 200 * 2**20


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("framework", ARGUMENTS)
def test_gradients(framework: str, lse: bool) -> None:
    """What computes them is said with the call."""
    fx = pytest.importorskip(f"flashxla.{framework}")
    if framework == "jax":
        q, k, offsets = (
            fx.jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (((T, HQ, D), "float32"), ((T, HK, D), "float32"), ((S + 1,), "int32"))
        )
    else:
        q, k = fx.torch.zeros(T, HQ, D), fx.torch.zeros(T, HK, D)
        offsets = fx.torch.zeros(S + 1, dtype=fx.torch.int32)
    given = (fx.flash_attn_varlen_func, q, k, k, T, offsets, T, offsets)
    got = flashxla.explain(*given, return_softmax_lse=lse, platform="cpu")
    assert got.gradients is not None and got.gradients.gradients is None
    assert got.gradients.operation == "gradients of flash_attn_varlen_func"
    assert [(kernel.work, kernel.name) for kernel in got.gradients.kernels] == [("all", "tiles")]
    assert str(got).endswith(f"\n{got.gradients}")
    scale = np.ones(1, np.float32) if framework == "jax" else fx.torch.ones(1)
    assert flashxla.explain(*given, k_descale=scale, platform="cpu").gradients is None


# Head sizes and dtype; on a Hopper GPU the engine of the gradients, and which head sizes it has copies of.
GRADIENTS_ON_A_GPU: list[tuple[tuple[int, int], str, str, set[int]]] = [
    ((104, 104), "bfloat16", "wide", set()),
    ((100, 100), "bfloat16", "wide", {100}),
    ((128, 100), "float16", "wide", {100}),
    ((36, 99), "bfloat16", "wide", {36, 99}),
    ((250, 250), "float16", "wide", {250}),
    ((60, 60), "float32", "tile32", set()),
    ((30, 99), "float32", "tile32", {30, 99}),
    ((257, 100), "bfloat16", "general", set()),
    ((300, 300), "float32", "general", set()),
]


@pytest.mark.parametrize(("dims", "dtype", "engine", "copied"), GRADIENTS_ON_A_GPU)
def test_gradients_on_a_gpu(dims: tuple[int, int], dtype: str, engine: str, copied: set[int]) -> None:
    """Tensors with heads that are no multiple of 16 bytes have copies in the workspace, where that helps."""
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    jax = pytest.importorskip("jax")
    tokens, unit = 64, 16 // jax.numpy.dtype(dtype).itemsize

    def gradients(dim: int, v_dim: int) -> flashxla.Explanation:
        q, k, v = (
            jax.ShapeDtypeStruct((tokens, heads, size), dtype)
            for heads, size in ((HQ, dim), (HK, dim), (HK, v_dim))
        )
        offsets = jax.ShapeDtypeStruct((S + 1,), "int32")
        given = ("flash_attn_varlen_func", q, k, v, tokens, offsets, tokens, offsets)
        got = flashxla.explain(*given, platform="cuda").gradients
        assert got is not None
        return got

    got = gradients(*dims)
    (kernel,) = got.kernels
    assert kernel.name == engine and ("aligned copies" in kernel.description) == bool(copied), kernel
    # Of queries and of keys or values, each with its gradient, and out is like queries with heads of values.
    elements = sum(tokens * 2 * (HQ + HK) * (-(-dim // unit) * unit) for dim in dims if dim in copied)
    padded = gradients(*(-(-dim // unit) * unit for dim in dims))
    assert got.workspace_bytes - padded.workspace_bytes == elements * 16 // unit


def test_no_gradients() -> None:
    query, *rest = torch_arguments()
    assert flashxla.explain("paged_attention", query, *rest).gradients is None


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_wrong_calls_raise_what_the_call_raises(framework: str) -> None:
    query, *rest = ARGUMENTS[framework]()
    with pytest.raises(ValueError, match="paged_attention: sliding_window: got 0"):
        flashxla.explain("paged_attention", query, *rest, sliding_window=0)


def shaped(framework: str, *shape: int, dtype: str = "float32") -> Any:
    """An array of a shape, in JAX without values."""
    if framework == "jax":
        return pytest.importorskip("jax").ShapeDtypeStruct(shape, dtype)
    torch = pytest.importorskip("torch")
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def kv_cache_call(framework: str) -> dict[str, Any]:
    """A call of flash_attn_with_kvcache that writes 5 tokens and attends: queries enough for two kernels."""
    q, new, cache = ((S, T, HQ, D), (S, T, HK, D), (S, M * B, HK, D))
    arrays = {"q": q, "k_cache": cache, "v_cache": cache, "k": new, "v": new}
    given = {name: shaped(framework, *shape) for name, shape in arrays.items()}
    return given | {"cache_seqlens": shaped(framework, S, dtype="int32")}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("framework", ARGUMENTS)
def test_a_write_and_attention(framework: str, by_name: bool) -> None:
    """All operations are explained, in their order."""
    name = "flash_attn_with_kvcache"
    function = name if by_name else getattr(pytest.importorskip(f"flashxla.{framework}"), name)
    got = flashxla.explain(function, **kv_cache_call(framework), platform="cpu")
    assert (got.operation, got.platform) == (name, "cpu")
    assert [part.operation for part in got.parts] == ["reshape_and_cache_flash", "flash_attn_varlen_func"]
    write, attention = got.parts
    assert got.kernels == write.kernels + attention.kernels
    assert [(kernel.work, kernel.name) for kernel in got.kernels] == [
        ("all", "kv_cache"),
        ("few queries", "few_rows"),
        ("many queries", "tiles"),
    ]
    assert got.few_queries == attention.few_queries and got.many_queries == attention.many_queries
    assert got.instruction_set == attention.instruction_set and got.gradients is None
    lines = [f"  {line}" for part in got.parts for line in str(part).splitlines()]
    assert str(got).splitlines() == [f"{name} on cpu", *lines]


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_one_kernel_for_all_queries_behind_a_write(framework: str) -> None:
    """Those of the queries are the attention's, not the write's."""
    call = kv_cache_call(framework) | {"q": shaped(framework, S, 1, HQ, D)}
    got = flashxla.explain("flash_attn_with_kvcache", **call, platform="cpu")
    assert got.few_queries == got.many_queries == got.parts[1].few_queries
    assert got.few_queries.startswith("few_rows: ")


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_what_several_operations_need(framework: str) -> None:
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    got = flashxla.explain("flash_attn_with_kvcache", **kv_cache_call(framework), platform="cuda")
    assert got.kernels[0].work == "all" and len(got.kernels) > 1
    assert got.plan_bytes == sum(part.plan_bytes for part in got.parts) > 0
    assert got.workspace_bytes == max(part.workspace_bytes for part in got.parts)


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_a_call_of_one_operation_has_no_parts(framework: str) -> None:
    """Whatever the function: the operation is named."""
    call = kv_cache_call(framework) | {"k": None, "v": None}
    got = flashxla.explain("flash_attn_with_kvcache", **call, platform="cpu")
    assert got.operation == "flash_attn_varlen_func" and got.parts == ()
    q, k = call["q"], call["k_cache"]
    got = flashxla.explain("flash_attn_func", q, k, k, platform="cpu")
    assert got.operation == "flash_attn_varlen_func" and got.parts == ()
    assert got.gradients is not None


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_merges(framework: str) -> None:
    outs, lses = [shaped(framework, T, HQ, D)] * 3, [shaped(framework, HQ, T)] * 3
    got = flashxla.explain("merge_all_attn_states", outs, lses, platform="cpu")
    assert [part.operation for part in got.parts] == ["merge_attn_states"] * 2
    assert [kernel.name for kernel in got.kernels] == ["merge_states"] * 2


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_wrong_calls_of_several_operations(framework: str) -> None:
    call = kv_cache_call(framework) | {"softcap": -1.0}
    with pytest.raises(ValueError, match=r"^flash_attn_with_kvcache: softcap: got -1\.0"):
        flashxla.explain("flash_attn_with_kvcache", **call)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_several_operations_leave_their_tensors_alone(requires_grad: bool) -> None:
    """Also after calls like them, and where autograd would mark the caches."""
    torch = pytest.importorskip("torch")
    fx = pytest.importorskip("flashxla.torch")
    call = kv_cache_call("torch")
    for name in "kv":
        call[name] += 1
    for _ in range(2):
        fx.flash_attn_with_kvcache(**call)
    caches = call["k_cache"], call["v_cache"]
    for cache in caches:
        cache.zero_()
    versions = [cache._version for cache in caches]
    call["q"].requires_grad_(requires_grad)
    got = flashxla.explain(fx.flash_attn_with_kvcache, **call)
    assert len(got.parts) == 2
    assert not any(cache.any() or cache.requires_grad for cache in caches)
    assert [cache._version for cache in caches] == versions
    assert type(call["q"]) is torch.Tensor


@pytest.mark.parametrize("framework", ARGUMENTS)
def test_names_of_functions(framework: str) -> None:
    """Each public function has its name taken: it gets as far as the function's own look at its arguments."""
    module = pytest.importorskip(f"flashxla.{framework}")
    for name in functions.__all__:
        assert name in module.__all__
        with pytest.raises(TypeError, match=f"^{name}\\(\\)"):
            flashxla.explain(name, extra=[shaped(framework, 1)])


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="operation: got 'attention'; accepted: append_paged_kv_cache, "):
        flashxla.explain("attention", np.zeros(3))
    with pytest.raises(ValueError, match=r"operation: got <function .*, which calls no operation"):
        flashxla.explain(pytest.importorskip("flashxla.jax").setup_custom_call)
    with pytest.raises(ValueError, match=r"operation: got <function .*, which calls no operation"):
        flashxla.explain(pytest.importorskip("flashxla.torch").setup_custom_call)
    with pytest.raises(ValueError, match="platform: got 'tpu'"):
        flashxla.explain("paged_attention", platform="tpu")


def decode_of(sequences: int, keys: int, heads: tuple[int, int], blocks: int = P) -> tuple[Any, ...]:
    """A decode batch of paged_attention, as shapes: pages of 16 tokens, head size 128, bfloat16."""
    jax = pytest.importorskip("jax")
    cache = jax.ShapeDtypeStruct((blocks, 16, heads[1], 128), "bfloat16")
    shapes: tuple[tuple[int, ...], ...] = ((sequences,), (sequences, keys // 16), (sequences + 1,), (1,))
    index = [jax.ShapeDtypeStruct(shape, "int32") for shape in shapes]
    query = jax.ShapeDtypeStruct((sequences, heads[0], 128), "bfloat16")
    return (query, (cache, cache), *index, 0.125)


# Batches whose keys are shared out: long contexts, many heads, caches of more than 64 GiB.
LARGE = [
    (256, 2**20, (128, 8), 1000),
    (4096, 2**17, (64, 8), 1000),
    (8, 16384, (128, 1), 1000),
    (64, 2048, (32, 8), 2**21 + 8),  # 64 GiB and 256 KiB of keys
    (64, 2048, (32, 8), 2**23),
]


@pytest.mark.parametrize(("sequences", "keys", "heads", "blocks"), LARGE)
def test_large_batches_are_shared_out(sequences: int, keys: int, heads: tuple[int, int], blocks: int) -> None:
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    arguments = decode_of(sequences, keys, heads, blocks)
    got = flashxla.explain("paged_attention", *arguments, platform="cuda")
    assert got.few_queries.startswith("swap:"), got


@pytest.mark.parametrize("blocks", [2**21 + 8, 2**23])
def test_a_cache_beyond_64_gib_is_no_reason(blocks: int) -> None:
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    jax = pytest.importorskip("jax")
    query, *rest = decode_of(4, 4096, (32, 8), blocks)
    prefill = jax.ShapeDtypeStruct((4096, *query.shape[1:]), query.dtype)
    got = flashxla.explain("paged_attention", prefill, *rest, platform="cuda")
    assert got.many_queries.startswith("wide:") and got.reason == "", got


# What the kernels count in 32 bits: (query tokens, heads, sequences, keys of a table row, blocks, argument)
TOO_LARGE = [
    (2**31, (1, 1), 1, 64, 4, "query: tokens times heads"),
    (2**26, (64, 1), 1, 64, 4, "query: tokens times heads"),
    (4, (32, 1), 2**27, 64, 4, "query_start_loc: sequences times heads"),
    (4, (1, 1), 1, 64, 2**31, "key_cache: blocks"),
    (4, (1, 1), 1, 2**31, 4, "block_tables: room for tokens"),
]


@pytest.mark.parametrize(("tokens", "heads", "sequences", "keys", "blocks", "what"), TOO_LARGE)
def test_sizes_beyond_the_kernels_are_refused(
    tokens: int, heads: tuple[int, int], sequences: int, keys: int, blocks: int, what: str
) -> None:
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    jax = pytest.importorskip("jax")
    query, *rest = decode_of(sequences, keys, heads, blocks)
    query = jax.ShapeDtypeStruct((tokens, *query.shape[1:]), query.dtype)
    with pytest.raises(ValueError, match=f"paged_attention: {what}: got .*; accepted: at most"):
        flashxla.explain("paged_attention", query, *rest, platform="cuda")


def test_sequences_longer_than_promised_stay_countable() -> None:
    """A million queries of a call that promised one each: they do not all go to the kernel for few, whatever comes."""
    if not native.is_installed("cuda"):
        pytest.skip("libflashxla_cuda.so is not installed")
    jax = pytest.importorskip("jax")
    fx = pytest.importorskip("flashxla.jax")

    def kernels(tokens: int) -> list[str]:
        q = jax.ShapeDtypeStruct((tokens, 8, 128), "bfloat16")
        k = jax.ShapeDtypeStruct((2**21, 1, 128), "bfloat16")
        offsets = jax.ShapeDtypeStruct((2,), "int32")
        got = flashxla.explain(
            fx.flash_attn_varlen_func, q, k, k, 1, offsets, 2**21, offsets, platform="cuda"
        )
        return [kernel.work for kernel in got.kernels]

    assert kernels(16) == ["all queries"]
    assert kernels(2**20) != ["all queries"]
