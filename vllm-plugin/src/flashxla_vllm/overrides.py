"""Every replacement of an internal of tpu-inference, torchax or vLLM, each with its reason.

tpu-inference runs vLLM's engine as JAX programs, on TPUs. It stays installed as it is; what keeps its programs from
other devices is replaced here, in each process that loads the platform (`on_platform`), configures an engine
(`on_config`) or runs a worker (`on_worker`).
`OVERRIDES` says which upstream code each one relies on; tests/vllm/test_overrides.py fails when that code changes.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

Stage = Callable[[], None]
OVERRIDES: dict[str, tuple[str, ...]] = {}
_PLATFORM: list[Stage] = []
_CONFIG: list[Stage] = []
_WORKER: list[Stage] = []
_MACHINES: list[Stage] = []
_HEADLESS: list[Stage] = []
_done: set[str] = set()


def on_platform() -> None:
    """Before tpu_inference's modules are imported. Starts no JAX backend: vLLM may fork afterwards."""
    _apply(_PLATFORM)


def on_config() -> None:
    """Before vLLM checks a configuration."""
    _apply(_CONFIG)


def on_worker() -> None:
    """In a process that runs the model."""
    _apply(_WORKER)


def on_several_machines() -> None:
    """In a process that runs a part of a model, when its worker has its devices and before it loads weights."""
    _apply(_MACHINES)


def on_headless_machine() -> None:
    """In the process of `vllm serve --headless`, on a machine that has no engine."""
    _apply(_HEADLESS)


def _apply(stages: list[Stage]) -> None:
    for stage in stages:
        if stage.__name__ not in _done:
            _done.add(stage.__name__)
            stage()


def _override(stages: list[Stage], *relies_on: str) -> Callable[[Stage], Stage]:
    """Register a stage, and the upstream functions, classes or modules ("module:name" or "module") it relies on."""

    def register(stage: Stage) -> Stage:
        stages.append(stage)
        OVERRIDES[stage.__name__] = relies_on
        return stage

    return register


def _replace(module: str, name: str, new: Any) -> Any:
    """Replace module.name, wherever tpu_inference has imported it to; returns what it was."""
    __import__(module)
    old = getattr(sys.modules[module], name)
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith("tpu_inference") and other.__dict__.get(name) is old:
            setattr(other, name, new)
    setattr(sys.modules[module], name, new)
    return old


# --- before tpu_inference is imported ---------------------------------------------------------------------------------


@_override(_PLATFORM, "tpu_inference", "tpu_inference.env_override", "tpu_inference.envs")
def no_environment_of_tpus() -> None:
    """tpu_inference.env_override imports vllm.sampling_params while vLLM resolves its platform, a cycle in which torch
    >= 2.11 sees a type registered twice; it also limits XLA's CPU code to AVX2. Its two settings that matter are made
    here. Without the TPU_* variables tpu_inference asks Google's metadata server for them, and waits.
    """
    sys.modules.setdefault("tpu_inference.env_override", types.ModuleType("tpu_inference.env_override"))
    settings = {
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",
        "VLLM_USE_AOT_COMPILE": "0",
        "TPU_ACCELERATOR_TYPE": "none-1",
        "TPU_NAME": "none",
        "TPU_WORKER_ID": "0",
        # One program for each bucket of tokens; tpu-inference's default is to compile one after the other.
        "NUM_PRECOMPILE_WORKERS": str(min(8, os.cpu_count() or 1)),
        # vLLM's models rather than tpu-inference's few: merged projections, and their programs compile side by side.
        "MODEL_IMPL_TYPE": "vllm",
        # Keep the small programs for the next start, too: there are a hundred of them.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


@_override(_PLATFORM, "tpu_inference.envs:environment_variables")
def any_jax_platform() -> None:
    """tpu_inference.envs knows the JAX_PLATFORMS tpu, cpu and proxy and raises for cuda. Only JAX needs to read it; ""
    is what tpu_inference takes for "nothing special".
    """
    platforms = os.environ.pop("JAX_PLATFORMS", None)
    try:
        from tpu_inference import envs
    finally:
        if platforms is not None:
            os.environ["JAX_PLATFORMS"] = platforms
    envs.environment_variables["JAX_PLATFORMS"] = lambda: ""


@_override(
    _PLATFORM,
    "tpu_inference.models.common.compiler_options:get_step_fn_compiler_options",
    "tpu_inference.models.common.compiler_options:get_sampling_compiler_options",
)
def no_compiler_options_of_tpus() -> None:
    """tpu_inference compiles its steps with options xla_tpu_*, which XLA refuses for other devices."""
    module = "tpu_inference.models.common.compiler_options"
    _replace(module, "get_step_fn_compiler_options", dict)
    _replace(module, "get_sampling_compiler_options", dict)


@_override(_PLATFORM, "vllm.third_party.flash_linear_attention.ops.utils:get_available_device")
def cuda_is_left_to_jax() -> None:
    """Where PyTorch is built with CUDA, this module starts it when it is imported, to ask for the name of the device.
    That takes memory of JAX, and a process that has it cannot fork an engine: a new process imports everything again,
    for a quarter of a minute. The module takes a RuntimeError for "no such device".
    """
    import torch

    if torch.cuda.is_initialized():
        return
    name, original = "vllm.third_party.flash_linear_attention.ops.utils", torch.cuda._lazy_init

    def lazy_init() -> None:
        module = sys.modules.get(name)
        if module is not None and getattr(module.__spec__, "_initializing", False):
            raise RuntimeError("flashxla: CUDA is left to JAX")
        original()

    torch.cuda._lazy_init = lazy_init


# --- before a configuration is checked --------------------------------------------------------------------------------


@_override(_CONFIG, "vllm.model_executor.models.registry:_run_in_subprocess")
def models_inspected_in_this_process() -> None:
    """vLLM imports a model's module in a process of its own, lest it start CUDA in this one. That process imports
    PyTorch and vLLM again, for up to half a minute. Here CUDA is JAX's; the one module that starts it is seen to below.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


@_override(
    _CONFIG,
    "vllm.v1.engine.async_llm:AsyncLLM.sleep",
    "vllm.v1.engine.core:EngineCore.sleep",
    "vllm.v1.engine.llm_engine:LLMEngine.sleep",
    "tpu_inference.worker.tpu_worker:TPUWorker.sleep",
)
def sleep_is_refused_before_it_pauses() -> None:
    """vLLM's engine pauses its scheduler, then asks the worker to sleep. 0.32.0's worker raises, and the engine stays
    paused: it looks healthy, and every later request hangs.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    from flashxla_vllm import refusals

    sleep, sleep_async = LLMEngine.sleep, AsyncLLM.sleep

    def checked(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> None:
        refusals.check_sleep(level)
        sleep(self, level, *args, **kwargs)

    async def checked_async(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> None:
        refusals.check_sleep(level)
        await sleep_async(self, level, *args, **kwargs)

    LLMEngine.sleep, AsyncLLM.sleep = checked, checked_async


@_override(_CONFIG, "vllm.model_executor.layers.quantization.mxfp4:Mxfp4Config.get_supported_act_dtypes")
def mxfp4_in_any_dtype() -> None:
    """vLLM allows MXFP4 with bfloat16 alone, for its kernels; here the weights are dequantised to the model's dtype."""
    import torch
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

    GptOssMxfp4Config.get_supported_act_dtypes = classmethod(
        lambda cls: [torch.bfloat16, torch.float16, torch.float32]
    )


# --- in a worker ------------------------------------------------------------------------------------------------------


@_override(
    _WORKER,
    "tpu_inference.layers.common.fused_moe_gmm:gmm_wrapper",
    "tpu_inference.layers.common.linear:_safe_calculate_tiling",
)
def kernels_of_tpus_are_not_imported() -> None:
    """tokamax's grouped product is a Pallas kernel for TPUs, which experts_without_pallas replaces. Its import is more
    than half of what an engine's process imports: seconds of each start.
    """

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("flashxla-vllm: tokamax's gmm_v2 is a kernel for TPUs")

    name = "tokamax._src.ops.experimental.gmm_v2.gmm_v2"
    if name not in sys.modules:
        stub = types.ModuleType(name)
        stub.__dict__.update(gmm_v2=missing, calculate_tiling=missing)
        sys.modules[name] = stub


@_override(_WORKER, "tpu_inference.utils:get_padded_head_dim")
def heads_of_any_size() -> None:
    """TPUs want head sizes padded to 128 lanes; flashxla's cache holds them as they are."""
    _replace("tpu_inference.utils", "get_padded_head_dim", lambda head_dim: head_dim)


@_override(
    _WORKER,
    "tpu_inference.utils:hbm_usage_bytes",
    "tpu_inference.utils:get_device_hbm_limit",
)
def memory_of_any_device() -> None:
    """tpu_inference knows the memory of TPUs by a table; JAX reports a GPU's, and memory.py the CPU's."""
    from flashxla_vllm import memory, processes

    def hbm_usage_bytes(devices: Sequence[Any]) -> list[tuple[int, int]]:
        own = processes.own_devices(devices)
        return [(memory.used_bytes(device), memory.device_limit(device)) for device in own]

    _replace("tpu_inference.utils", "hbm_usage_bytes", hbm_usage_bytes)


@_override(
    _WORKER,
    "tpu_inference.utils:make_optimized_mesh",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._create_2d_mesh",
)
def mesh_without_coordinates() -> None:
    """make_optimized_mesh sorts devices by TPU coordinates, which others lack."""
    import jax

    def make_mesh(shape: Sequence[int], names: Sequence[str], *, devices: Sequence[Any] | None = None) -> Any:
        auto = (jax.sharding.AxisType.Auto,) * len(names)
        return jax.make_mesh(tuple(shape), tuple(names), auto, devices=devices)

    _replace("tpu_inference.utils", "make_optimized_mesh", make_mesh)


@_override(
    _WORKER, "tpu_inference.utils:device_array", "tpu_inference.layers.common.utils:general_device_put"
)
def staging_buffers_are_copied() -> None:
    """device_put returns before it has read its operand, and on a CPU aliases it. The runner writes the next step into
    the same NumPy buffers, so a step could see the next one's inputs.
    """
    import jax
    import numpy as np

    def copied(x: Any) -> Any:
        return np.array(x) if isinstance(x, np.ndarray) else x

    def device_array(mesh: Any, *args: Any, sharding: Any = None, **kwargs: Any) -> Any:
        sharding = sharding or jax.NamedSharding(mesh, jax.P(None))
        if kwargs or len(args) != 1 or not sharding.is_fully_addressable:
            return original(mesh, *jax.tree.map(copied, args), sharding=sharding, **kwargs)
        # All arrays in one call: a fifth of a millisecond of a step.
        return jax.device_put(jax.tree.map(copied, args[0]), sharding)

    original = _replace("tpu_inference.utils", "device_array", device_array)


@_override(
    _WORKER,
    "tpu_inference.layers.vllm.quantization.unquantized:_load_weight_for_layer",
    "tpu_inference.layers.vllm.quantization.unquantized:VllmUnquantizedEmbeddingMethod",
    "tpu_inference.layers.vllm.process_weights.cleanup_sharding:_convert_to_torchax_and_shard",
    "vllm.model_executor.model_loader.dummy_loader:DummyModelLoader",
    "vllm.model_executor.model_loader.weight_utils:initialize_single_dummy_weight",
)
def weights_go_straight_to_their_devices() -> None:
    """0.32.0 makes a JAX array on the host first (on a CPU of the tensor's own memory, which the loader then frees) and
    widens bfloat16 to float32 on the way. Dummy weights are drawn on the host, for minutes.
    """
    import torch
    from torchax.interop import torch_view
    from tpu_inference.layers.vllm.process_weights import cleanup_sharding
    from tpu_inference.layers.vllm.quantization import unquantized
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader import dummy_loader

    from flashxla_vllm import weights

    def place(tensor: torch.Tensor, sharding: Any) -> Any:
        drawn = get_current_vllm_config().load_config.load_format == "dummy" and tensor.is_floating_point()
        return (weights.dummy if drawn and tensor.numel() >= weights.LARGE else weights.put)(tensor, sharding)

    def load(layer: Any, name: str, sharding: Any, stage_on_host: bool = False) -> Any:
        tensor = getattr(layer, name)
        if tensor.device.type == "meta":  # a layer that an embedding model does not use
            return load_unused(layer, name, sharding)
        return place(tensor, sharding)

    def convert(tensor: Any, sharding: Any) -> Any:
        if isinstance(tensor, cleanup_sharding.torchax.tensor.Tensor):
            return convert_converted(tensor, sharding)
        return torch_view(place(tensor, sharding))

    def initialize(tensor: torch.Tensor, **kwargs: Any) -> None:
        if tensor.numel() < weights.LARGE:
            initialize_small(tensor, **kwargs)

    load_unused = unquantized._load_weight_for_layer
    unquantized._load_weight_for_layer = load
    convert_converted = _replace(cleanup_sharding.__name__, "_convert_to_torchax_and_shard", convert)
    initialize_small = dummy_loader.initialize_single_dummy_weight
    dummy_loader.initialize_single_dummy_weight = initialize


@_override(
    _WORKER,
    "tpu_inference.layers.vllm.quantization.unquantized:VllmUnquantizedLinearMethod._build_linear_weights",
)
def one_program_for_all_linear_layers() -> None:
    """0.32.0 makes a new jax.jit for each layer, so that each is traced and compiled anew."""
    from tpu_inference.layers.vllm.quantization.unquantized import VllmUnquantizedLinearMethod

    from flashxla_vllm import weights

    def build(self: Any, layer: Any, weight: Any, bias: Any) -> Any:
        config = self.linear_config
        return weights.linear_weights(
            weight,
            bias,
            fused=config.fuse_matmuls,
            output_sizes=tuple(config.output_sizes),
            shards=config.n_shards,
        )

    VllmUnquantizedLinearMethod._build_linear_weights = build


@_override(_WORKER, "vllm.model_executor.layers.rotary_embedding.common:ApplyRotaryEmb.forward_static")
def rotary_embedding_in_one_piece() -> None:
    """vLLM puts the two rotated halves of a head together, which XLA does more slowly than tracing.rotated. The results
    are the same, to the bit.
    """
    from torchax.interop import jax_view, torch_view
    from torchax.tensor import Tensor
    from torchax.view import View
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    from flashxla_vllm import tracing

    in_halves = ApplyRotaryEmb.forward_static

    def forward_static(
        x: Any, cos: Any, sin: Any, is_neox_style: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        plain = isinstance(x, (Tensor, View)) and x.dim() == 3 and is_neox_style and not args and not kwargs
        if not plain:
            return in_halves(x, cos, sin, is_neox_style, *args, **kwargs)
        return torch_view(tracing.rotated(*jax_view((x, cos, sin))))

    ApplyRotaryEmb.forward_static = staticmethod(forward_static)


@_override(
    _WORKER,
    "vllm.model_executor.custom_op:CustomOp",
    "tpu_inference.layers.common.quantization.unquantized:UnquantizedLinearMethod._apply_fused",
)
def one_trace_for_all_layers() -> None:
    """The same products, norms and rotary embeddings are traced again for each layer, for seconds a program
    (tracing.py).
    """
    from torchax.tensor import Tensor
    from tpu_inference.layers.common.quantization.unquantized import UnquantizedLinearMethod
    from vllm.model_executor.custom_op import CustomOp

    from flashxla_vllm import tracing

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, tracing.PURE) and any(isinstance(x, Tensor) for x in args):
            return tracing.forward(self, *args, **kwargs)
        return self._forward_method(*args, **kwargs)

    apply_fused = UnquantizedLinearMethod._apply_fused

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        return tracing.linear(apply_fused, self, *args, **kwargs)

    CustomOp.forward = forward
    UnquantizedLinearMethod._apply_fused = apply


@_override(
    _WORKER,
    "tpu_inference.layers.common.attention_backend:AttentionBackend",
    "tpu_inference.layers.common.attention_backend:RPAAttentionBackend",
    "tpu_inference.layers.common.attention_backend:create_attention_backend",
    "tpu_inference.layers.common.attention_interface:attention",
    "tpu_inference.layers.vllm.backends.flash_attn:PallasAttentionBackendImpl",
    "tpu_inference.runner.kv_cache:get_kv_cache_shape_with_mesh",
)
def attention_by_flashxla() -> None:
    """register_attention_backend cannot be used: its enum member does not survive a spawned engine process, and the
    JAX models do not ask for it. The default class is replaced instead.
    """
    from flashxla_vllm.attention import FlashXlaBackend

    __import__("tpu_inference.layers.common.attention_interface")
    _replace("tpu_inference.layers.common.attention_backend", "RPAAttentionBackend", FlashXlaBackend)


@_override(
    _WORKER,
    "tpu_inference.layers.common.fused_moe_gmm:gmm_wrapper",
    "tpu_inference.layers.common.fused_moe_gmm:moe_gmm_local",
    "tpu_inference.kernels.sparse_core.dense_gather_reduce:dense_gather_reduce",
)
def experts_without_pallas() -> None:
    """The grouped products and the sum of experts' results are Pallas kernels for TPUs."""
    from flashxla_vllm import experts

    module = "tpu_inference.layers.common.fused_moe_gmm"
    _replace(module, "gmm_wrapper", experts.grouped_matmul)
    _replace(module, "dense_gather_reduce", experts.gather_and_sum)


@_override(
    _WORKER,
    "tpu_inference.layers.vllm.quantization.mxfp4:VllmMxfp4MoEMethod",
    "tpu_inference.layers.vllm.quantization.unquantized:VllmUnquantizedFusedMoEMethod",
    "vllm.model_executor.layers.quantization.mxfp4:Mxfp4MoEMethod.create_weights",
)
def experts_of_mxfp4_are_dequantised() -> None:
    """0.32.0 quantises MXFP4 weights anew, to blocks of 512 with other values, for its kernel."""
    from tpu_inference.layers.vllm.quantization.mxfp4 import VllmMxfp4MoEMethod as Quantised
    from tpu_inference.layers.vllm.quantization.unquantized import VllmUnquantizedFusedMoEMethod as Plain

    from flashxla_vllm import quantised

    Quantised.process_weights_after_loading = quantised.load_experts(Plain.process_weights_after_loading)
    Quantised.apply_monolithic = Plain.apply_monolithic
    Quantised.get_fused_moe_quant_config = Plain.get_fused_moe_quant_config


@_override(
    _WORKER,
    "tpu_inference.runner.tpu_runner:TPUModelRunner._prepare_inputs",
    "tpu_inference.runner.compilation_manager:CompilationManager._precompile_backbone_text_only",
    "tpu_inference.layers.common.attention_metadata:AttentionMetadata",
    "tpu_inference.layers.common.attention_metadata:SharedAttentionMetadata",
    "tpu_inference.layers.common.attention_metadata:GroupedAttentionMetadata",
)
def decode_steps_have_their_own_programs() -> None:
    """A step in which each sequence has one token needs one of the attention's engines, but its program must know. The
    metadata's static padded_num_reqs, which other models' kernels for TPUs read, tells it.
    """
    import dataclasses

    from tpu_inference.layers.common.attention_metadata import GroupedAttentionMetadata
    from tpu_inference.runner.compilation_manager import CompilationManager
    from tpu_inference.runner.tpu_runner import TPUModelRunner

    from flashxla_vllm.attention import DECODE

    def for_decode(metadata: Any) -> Any:
        if isinstance(metadata, GroupedAttentionMetadata):
            groups = tuple(map(for_decode, metadata.groups))
            return GroupedAttentionMetadata(groups, metadata.layer_names_per_group)
        return dataclasses.replace(metadata, padded_num_reqs=DECODE)

    def prepare_inputs(self: Any, scheduler_output: Any) -> Any:
        inputs = list(prepare(self, scheduler_output))
        if max(scheduler_output.num_scheduled_tokens.values()) == 1:
            inputs[2], inputs[-1] = for_decode(inputs[2]), for_decode(inputs[-1])
        return tuple(inputs)

    def precompile(self: Any) -> None:
        compile_all(self)
        runner = self.runner
        tokens, sequences = runner.num_tokens_paddings, runner.attn_num_reqs_paddings
        fewest = next((n for n in tokens if n >= runner.max_num_reqs), tokens[-1])
        try:
            runner.num_tokens_paddings = [n for n in tokens if n <= fewest]
            runner.attn_num_reqs_paddings = [DECODE]
            compile_all(self)
        finally:
            runner.num_tokens_paddings, runner.attn_num_reqs_paddings = tokens, sequences

    prepare, TPUModelRunner._prepare_inputs = TPUModelRunner._prepare_inputs, prepare_inputs
    compile_all = CompilationManager._precompile_backbone_text_only
    CompilationManager._precompile_backbone_text_only = precompile


@_override(
    _WORKER,
    "tpu_inference.runner.tpu_runner:TPUModelRunner._prepare_inputs",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._execute_model",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._apply_async_token_substitution",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._sample_from_logits",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._select_from_array_fn",
    "tpu_inference.runner.compilation_manager:CompilationManager._precompile_select_from_array",
    "tpu_inference.runner.compilation_manager:CompilationManager._precompile_substitute_placeholder_token",
    "tpu_inference.layers.jax.sample.sampling_metadata:TPUSupportedSamplingMetadata",
    "tpu_inference.utils:DeviceBuffer",
)
def inputs_of_a_step_go_together() -> None:
    """0.32.0 puts ten small arrays on the device for each step, one call after the other, and has programs for each
    pair of numbers of tokens and requests: a quarter of the host's time of a step, and seconds of a start.
    """
    from tpu_inference import utils
    from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata as Metadata
    from tpu_inference.runner.compilation_manager import CompilationManager
    from tpu_inference.runner.tpu_runner import TPUModelRunner as Runner

    from flashxla_vllm import step_inputs

    def prepare_inputs(self: Any, scheduler_output: Any) -> Any:
        inputs = step_inputs.of(self)
        if inputs is None:
            return prepare(self, scheduler_output)
        with inputs.collect() as waiting:
            outputs = list(prepare(self, scheduler_output))
        on_device = (0, 1, 2, 4, -1)  # tokens, positions, metadata, rows of the logits, shared metadata
        for index, value in zip(
            on_device, inputs.finish(waiting, [outputs[i] for i in on_device]), strict=True
        ):
            outputs[index] = value
        return tuple(outputs)

    def device_array(mesh: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = step_inputs.waiting()
        return waiting.put(*args) if waiting is not None else put(mesh, *args, **kwargs)

    def unpack_arrays(buffer: Any, layout: Any) -> Any:
        waiting = step_inputs.waiting()
        return waiting.unpack(buffer, layout) if waiting is not None else unpack(buffer, layout)

    def substitute(self: Any, tokens: Any, previous: Any, targets: Any, sources: Any) -> Any:
        waiting = step_inputs.waiting()
        if waiting is None:
            return substitute_alone(self, tokens, previous, targets, sources)
        waiting.replace_tokens(targets, sources, previous)
        return tokens

    def from_input_batch(cls: Any, mesh: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = step_inputs.waiting()
        if waiting is None:
            return metadata_alone(cls, mesh, batch, *args, **kwargs)
        # sampling.py has the parameters of requests that are not greedy.
        return cls(do_sampling=not batch.all_greedy, logprobs=bool(batch.max_num_logprobs))

    def sample_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = step_inputs.of(self)
        logits = args[5]  # the original widens them, by a program that nothing has compiled
        if inputs is not None and logits.dtype != "float32":
            args = (*args[:5], inputs.widen(logits), *args[6:])
        outputs = sample(self, *args, **kwargs)
        results = self._pre_async_results
        if inputs is not None and results is not None:
            results.next_tokens_in_tpu = inputs.keep(results.next_tokens)
        return outputs

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = step_inputs.of(self)
        if inputs is not None and "_select_from_array_fn" not in self.__dict__:
            self._select_from_array_fn = lambda states, indices, *_: inputs.select(
                states, indices, rows=inputs.rows
            )
        return execute(self, *args, **kwargs)

    def precompile(self: Any) -> None:
        inputs = step_inputs.of(self.runner)
        if inputs is None:
            precompile_select(self)
        else:
            step_inputs.precompile(self, inputs)

    def precompile_substitution(self: Any) -> None:
        if step_inputs.of(self.runner) is None:
            precompile_substitute(self)

    prepare, Runner._prepare_inputs = Runner._prepare_inputs, prepare_inputs
    execute, Runner._execute_model = Runner._execute_model, execute_model
    sample, Runner._sample_from_logits = Runner._sample_from_logits, sample_step
    substitute_alone, Runner._apply_async_token_substitution = (
        Runner._apply_async_token_substitution,
        substitute,
    )
    put = _replace("tpu_inference.utils", "device_array", device_array)
    unpack, utils.DeviceBuffer.unpack_arrays = utils.DeviceBuffer.unpack_arrays, staticmethod(unpack_arrays)
    metadata_alone = Metadata.from_input_batch.__func__
    Metadata.from_input_batch = classmethod(from_input_batch)
    precompile_select = CompilationManager._precompile_select_from_array
    precompile_substitute = CompilationManager._precompile_substitute_placeholder_token
    CompilationManager._precompile_select_from_array = precompile
    CompilationManager._precompile_substitute_placeholder_token = precompile_substitution


@_override(
    _WORKER,
    "tpu_inference.runner.compilation_manager:CompilationManager._run_compilation",
    "tpu_inference.runner.compilation_manager:CompilationManager._precompile_backbone_helper",
)
def precompile_with_shared_metadata() -> None:
    """0.32.0 passes shared_attention_metadata to the log of a compilation but not to the function that it compiles,
    so that it compiles another program than the step's.
    """
    from tpu_inference.runner.compilation_manager import CompilationManager

    original = CompilationManager._run_compilation
    name = "shared_attention_metadata"

    def run(self: Any, title: str, fn: Any, *args: Any, call_kwargs: Any = None, **kwargs: Any) -> None:
        call_kwargs = dict(call_kwargs or {})
        if name in kwargs:
            call_kwargs[name] = kwargs.pop(name)
        original(self, title, fn, *args, call_kwargs=call_kwargs, **kwargs)

    CompilationManager._run_compilation = run


@_override(
    _WORKER,
    "tpu_inference.runner.tpu_runner:AsyncTPUModelRunnerOutput",
    "vllm.v1.outputs:AsyncModelRunnerOutput",
)
def outputs_of_vllm_0_33() -> None:
    """vLLM 0.33 added an abstract method to AsyncModelRunnerOutput; tpu_inference 0.32.0 has no such connector."""
    from tpu_inference.runner.tpu_runner import AsyncTPUModelRunnerOutput as Output

    name = "get_kv_connector_output"
    if name in Output.__abstractmethods__:
        setattr(Output, name, lambda self: None)
        Output.__abstractmethods__ -= {name}


@_override(
    _WORKER,
    "tpu_inference.core.sched.dp_scheduler:DPScheduler",
    "vllm.v1.core.sched.interface:SchedulerInterface",
)
def data_parallel_scheduler_of_vllm_0_33() -> None:
    """vLLM 0.33 added an abstract method to its schedulers that tpu_inference 0.32.0's for data parallelism lacks."""
    from tpu_inference.core.sched.dp_scheduler import DPScheduler

    def has_request(self: Any, request_id: str) -> bool:
        waiting = self._pending_new_requests
        return request_id in self.assigned_dp_rank or any(r.request_id == request_id for r in waiting)

    if "has_request" in DPScheduler.__abstractmethods__:
        DPScheduler.has_request = has_request
        DPScheduler.__abstractmethods__ -= {"has_request"}


@_override(
    _WORKER,
    "tpu_inference.runner.tpu_runner:TPUModelRunner._modify_prev_results",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._update_placeholder",
    "tpu_inference.runner.utils:host_extract_sampled_tokens",
    "tpu_inference.runner.persistent_batch_manager:PersistentBatchManager.update_states",
)
def requests_that_leave_the_batch_keep_their_last_token() -> None:
    """With async scheduling a step's token replaces its placeholder, 0, one step later; 0.32.0 skips that for a request
    that has left the batch by then. One that was preempted was recomputed with the 0, and wrote other tokens.
    It also takes a millisecond for 256 requests, while the device waits.
    """
    import numpy as np
    from tpu_inference.runner import utils
    from tpu_inference.runner.tpu_runner import TPUModelRunner
    from tpu_inference.utils import safe_device_get

    original = TPUModelRunner._modify_prev_results

    def modify_prev_results(self: Any) -> None:
        previous = self._pre_async_results
        if previous.spec_decode_metadata is None:
            replace_placeholders(self, previous)
        else:
            original(self)
            replace_drafts_of_those_that_left(self, previous)

    def replace_placeholders(self: Any, previous: Any) -> None:
        tokens = safe_device_get(previous.next_tokens)
        if previous.logits_indices_selector is not None:
            tokens = tokens[previous.logits_indices_selector]
        numbers = tokens.tolist()
        rows, sources = [], []
        for index, state, _ in previous.request_seq_lens:
            if self.requests.get(state.req_id) is not state:
                continue
            state.output_token_ids[-1] = numbers[index]
            row = self.input_batch.req_id_to_index.get(state.req_id)
            if row is not None:
                rows.append(row)
                sources.append(index)
        last = self.input_batch.num_tokens_no_spec[rows] - 1
        self.input_batch.token_ids_cpu[rows, last] = np.asarray(tokens)[sources]

    def replace_drafts_of_those_that_left(self: Any, previous: Any) -> None:
        left = [
            (index, state)
            for index, state, _ in previous.request_seq_lens
            if state.req_id not in self.input_batch.req_id_to_index
            and self.requests.get(state.req_id) is state
        ]
        if not left:
            return
        sampled = utils.host_extract_sampled_tokens(
            self,
            previous.spec_decode_metadata,
            previous.next_tokens,
            previous.logits_indices_selector,
            previous.discard_sampled_tokens_req_indices,
            len(previous.req_ids),
        )
        for index, state in left:
            if tokens := sampled[index]:
                drafts = previous.scheduler_output.scheduled_spec_decode_tokens.get(state.req_id, ())
                del state.output_token_ids[-1 - len(drafts) :]
                state.output_token_ids.extend(tokens)

    TPUModelRunner._modify_prev_results = modify_prev_results


@_override(
    _WORKER,
    "tpu_inference.runner.tpu_runner:AsyncPreResults",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._execute_model",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._modify_prev_results",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._prepare_async_token_substitution_indices",
    "tpu_inference.runner.persistent_batch_manager:PersistentBatchManager.update_states",
    "vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
    "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
)
def resumed_requests_take_the_schedulers_tokens() -> None:
    """reset_prefix_cache(reset_running_requests=True), which a pause may ask for, preempts requests and resumes them in
    the next step. With async scheduling 0.32.0 then reads the placeholder of the token that is not yet replaced, and
    replaces it later, where the scheduler may have dropped it: wrong tokens, or an error that ends the engine. As in
    vLLM, a resumed request has the scheduler's tokens, and nothing of the step before.
    """
    from tpu_inference.runner.tpu_runner import TPUModelRunner

    original = TPUModelRunner._execute_model

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        cached = scheduler_output.scheduled_cached_reqs
        for request_id in cached.resumed_req_ids:
            state = self.requests[request_id]
            state.output_token_ids[:] = cached.all_token_ids[request_id][state.num_prompt_tokens :]
        previous = self._pre_async_results
        if previous is not None and cached.resumed_req_ids:
            previous.request_seq_lens = [
                entry for entry in previous.request_seq_lens if entry[1].req_id not in cached.resumed_req_ids
            ]
            for request_id in cached.resumed_req_ids:
                previous.placeholder_req_id_to_index.pop(request_id, None)
        return original(self, scheduler_output, *args, **kwargs)

    TPUModelRunner._execute_model = execute_model


@_override(
    _WORKER,
    "tpu_inference.runner.tpu_runner:TPUModelRunner._execute_model",
    "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
)
def empty_steps_are_no_fault() -> None:
    """With async scheduling vLLM's engine asks for an empty step where the last token of each request is under way.
    0.32.0 answers it as vLLM's own workers do, but warns of it: for nearly every request that is alone.
    """
    from tpu_inference.runner import tpu_runner

    warning = "Should not schedule a request that does nothing!"
    tpu_runner.logger.addFilter(lambda record: record.msg != warning)


@_override(
    _WORKER,
    "tpu_inference.layers.jax.sample.rejection_sampler:_compute_probs",
    "tpu_inference.layers.jax.sample.rejection_sampler:_get_segment_info",
    "tpu_inference.layers.jax.sample.rejection_sampler:_random_rejection_sample_with_segment",
    "tpu_inference.layers.jax.sample.rejection_sampler:_sample_recovered_tokens",
    "tpu_inference.layers.jax.sample.sampling:_apply_sampling_transforms",
    "tpu_inference.layers.jax.sample.sampling_metadata:TPUSupportedSamplingMetadata",
)
def speculated_tokens_have_the_distribution_of_others() -> None:
    """Where one request of a batch samples, 0.32.0 draws drafted tokens of the greedy ones, too, at their temperature
    of -1. It narrows drafted tokens by top-k and top-p before the temperature, and the token behind them after, as
    vLLM does. A token that is left out is still accepted where the random number is 0.
    """
    import dataclasses

    import jax
    import jax.numpy as jnp
    from tpu_inference.layers.jax.sample import rejection_sampler, sampling

    from flashxla_vllm.narrowing import MASKED
    from flashxla_vllm.sampling_program import GREEDY_BELOW

    transform = sampling._apply_sampling_transforms
    accept = rejection_sampler._random_rejection_sample_with_segment

    def transforms(logits: Any, metadata: Any) -> Any:
        if not metadata.do_sampling:
            return logits
        greedy = metadata.temperature < GREEDY_BELOW
        drawn = dataclasses.replace(metadata, temperature=jnp.where(greedy, 1.0, metadata.temperature))
        likeliest = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.bool)
        return jnp.where(greedy[:, None], jnp.where(likeliest, 0.0, MASKED), transform(logits, drawn))

    def probabilities(logits: Any, num_draft_tokens: Any, metadata: Any) -> Any:
        request, _ = rejection_sampler._get_segment_info(num_draft_tokens, logits.shape[0])
        each = {name: getattr(metadata, name)[request] for name in ("temperature", "top_k", "top_p")}
        of_tokens = dataclasses.replace(metadata, **each)
        return jax.nn.softmax(transforms(logits.astype(jnp.float32), of_tokens), axis=-1)

    def accept_what_is_possible(drafts: Any, draft_probs: Any, target_probs: Any, *args: Any) -> Any:
        return accept(drafts, draft_probs, jnp.where(target_probs > 0, target_probs, -1.0), *args)

    _replace(sampling.__name__, "_apply_sampling_transforms", transforms)
    _replace(rejection_sampler.__name__, "_compute_probs", probabilities)
    _replace(rejection_sampler.__name__, "_random_rejection_sample_with_segment", accept_what_is_possible)


@_override(
    _WORKER,
    "tpu_inference.layers.jax.sample.sampling:sample",
    "tpu_inference.runner.input_batch:InputBatch",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._execute_model",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._sample_from_logits",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._modify_prev_results",
    "tpu_inference.runner.compilation_manager:CompilationManager._precompile_sampling",
)
def sampling_by_more_parameters() -> None:
    """tpu-inference samples by temperature, top-k and top-p, and ignores penalties, min-p, seeds and masks of tokens.
    Its program has conditions, at which the host waits for a GPU, and copies logits that were widened to float32 though
    nobody reads them. sampling.py takes the place of `sample`, except where tokens are speculated.
    """
    from tpu_inference.runner import tpu_runner
    from tpu_inference.runner.compilation_manager import CompilationManager
    from tpu_inference.runner.tpu_runner import TPUModelRunner as Runner

    from flashxla_vllm import sampling

    execute, sample_from_logits = Runner._execute_model, Runner._sample_from_logits
    precompile, sample = CompilationManager._precompile_sampling, tpu_runner.sample
    # Of the step that is being sampled: the runner, the rows of its requests, and the logits as the model gave them.
    asked: list[Any] = []

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        sampling.batch_of(self).update(scheduler_output)
        return execute(self, scheduler_output, *args, **kwargs)

    def sample_or_more(rng: Any, mesh: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not asked:
            return sample(rng, mesh, logits, *args, **kwargs)
        runner, selector, given = asked
        tokens, kept = sampling.batch_of(runner).sample(rng, given, runner.input_batch, selector)
        return tokens, logits if kept is None else kept

    def sample_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.speculative_config:  # refusals.py has let in no request that asks for more
            return sample_from_logits(self, *args, **kwargs)
        more = sampling.batch_of(self).asks_for_more(self.input_batch)
        # With async scheduling the previous step's tokens may still be placeholders. The original waits for them after
        # it has sampled; the device is at work on this step's logits either way.
        if more and self._pre_async_results is not None:
            self._modify_prev_results()
            self._pre_async_results = None
        metadata, logits, selector = args[2], args[5], args[9]
        asked[:] = self, selector, logits
        if not metadata.logprobs:
            args = (*args[:5], sampling.Unwidened(), *args[6:])
        try:
            return sample_from_logits(self, *args, **kwargs)
        finally:
            asked.clear()

    def precompile_sampling(self: Any) -> None:
        if self.runner.speculative_config:
            return precompile(self)
        sampling.precompile(self)
        self._sampling_precompiled = True

    Runner._execute_model, Runner._sample_from_logits = execute_model, sample_step
    CompilationManager._precompile_sampling = precompile_sampling
    tpu_runner.sample = sample_or_more


@_override(
    _WORKER,
    "tpu_inference.worker.tpu_worker:TPUWorker.initialize_from_config",
    "tpu_inference.runner.compilation_manager:CompilationManager.capture_model",
    "tpu_inference.runner.compilation_manager:CompilationManager._flush_compilations",
    "tpu_inference.runner.compilation_manager:CompilationManager._run_compilation",
    "tpu_inference.runner.compilation_manager:CompilationManager._precompile_compute_logits",
    "tpu_inference.runner.compilation_manager:CompilationManager._precompile_backbone_helper",
    "tpu_inference.runner.compilation_manager:CompilationManager._precompile_gather_logprobs",
    "tpu_inference.runner.kv_cache_manager:KVCacheManager.reinitialize_kv_cache",
)
def programs_compiled_without_the_cache() -> None:
    """tpu-inference compiles program after program beside the KV cache. XlaWorker compiles them together while the
    cache's memory is free: what it has asked for is not compiled again, and it is called before the first one runs.
    Until then their arguments wait on the host: the smallest array in the cache's place would keep a layer out.
    """
    from tpu_inference.runner.compilation_manager import CompilationManager

    from flashxla_vllm import waiting

    compute_logits, flush, run = (
        CompilationManager._precompile_compute_logits,
        CompilationManager._flush_compilations,
        CompilationManager._run_compilation,
    )

    def compute_logits_once(self: Any) -> None:
        if not self.__dict__.setdefault("_compute_logits_precompiled", False):
            self._compute_logits_precompiled = True
            compute_logits(self)

    def run_compilation(self: Any, *args: Any, **kwargs: Any) -> None:
        tasks = len(self._warmup_tasks)
        run(self, *args, **kwargs)
        if (lasting := getattr(self, "lasting_arrays", None)) is not None:
            self._warmup_tasks[tasks:] = waiting.to_host(self.runner, self._warmup_tasks[tasks:], lasting)

    def flush_with_cache(self: Any) -> None:
        before_warm_up = self.__dict__.pop("before_warm_up", None)
        # the original raises what a future holds
        if before_warm_up is not None and not any(f.exception() for f in self._compile_futures):
            before_warm_up([f.result() for f in self._compile_futures])
        if self.__dict__.pop("lasting_arrays", None) is not None:
            self._warmup_tasks = waiting.to_device(self._warmup_tasks)
        flush(self)

    CompilationManager._precompile_compute_logits = compute_logits_once
    CompilationManager._flush_compilations = flush_with_cache
    CompilationManager._run_compilation = run_compilation


@_override(_WORKER, "tpu_inference.runner.compilation_manager:CompilationManager._create_dummy_tensor")
def arguments_of_programs_are_no_programs() -> None:
    """Where programs are compiled, their arguments are made by jnp.ones: for each shape a program of its own, which is
    traced, compiled or found, and loaded, to run once. They were a fifth of the programs of a start. Large ones stay:
    the host is slower to fill them than the device.
    """
    import math

    import numpy as np
    from tpu_inference import utils
    from tpu_inference.runner.compilation_manager import CompilationManager

    from flashxla_vllm import weights

    def create(self: Any, shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
        if math.prod(shape) >= weights.LARGE:
            return create_by_program(self, shape, dtype, sharding)
        ones = np.ones(shape, utils.to_jax_dtype(dtype))
        return utils.device_array(self.runner.mesh, ones, sharding=sharding)

    create_by_program = CompilationManager._create_dummy_tensor
    CompilationManager._create_dummy_tensor = create


@_override(
    _WORKER,
    "tpu_inference.runner.structured_decoding_manager:StructuredDecodingManager",
    "vllm.v1.core.sched.output:GrammarOutput",
)
def grammars_of_their_own_requests() -> None:
    """vLLM's masks of allowed tokens come in the order of structured_output_request_ids. 0.32.0 reads them in the order
    of the names, so that requests get each other's.
    """
    import numpy as np
    from tpu_inference import utils
    from tpu_inference.runner.structured_decoding_manager import StructuredDecodingManager

    def prepare(self: Any, logits: Any, grammar_output: Any) -> Any:
        runner = self.runner
        masks = np.zeros((logits.shape[0], runner.grammar_bitmask_cpu.shape[1]), np.int32)
        required = np.zeros((logits.shape[0], 1), np.bool_)
        for request_id, mask in zip(
            grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask, strict=True
        ):
            row = runner.input_batch.req_id_to_index.get(request_id)
            if row is not None:
                masks[row], required[row] = mask, True
        return utils.device_array(runner.mesh, (required, masks, runner.structured_decode_arange))

    StructuredDecodingManager.prepare_structured_decoding_input = prepare


@_override(
    _WORKER,
    "tpu_inference.runner.input_batch:InputBatch.max_num_logprobs",
    "tpu_inference.layers.jax.sample.sampling_metadata:TPUSupportedSamplingMetadata.from_input_batch",
)
def logprobs_of_the_sampled_token_alone() -> None:
    """logprobs=0 asks for the sampled token's, as chat's logprobs=true does; 0.32.0 takes it for none, and -1 too."""
    from tpu_inference.runner.input_batch import InputBatch

    InputBatch.max_num_logprobs = property(lambda self: 1 if self.num_logprobs else None)


@_override(
    _WORKER,
    "tpu_inference.runner.input_batch:CachedRequestState",
    "tpu_inference.runner.input_batch:InputBatch.add_request",
    "tpu_inference.runner.persistent_batch_manager:PersistentBatchManager.update_states",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._get_prompt_logprobs_dict",
    "tpu_inference.layers.jax.sample.sampling:compute_prompt_logprobs",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
)
def prompt_logprobs_once() -> None:
    """In 0.32.0 a request that was preempted asks for its prompt's log probabilities again when it comes back. vLLM's
    scheduler has had them with the first token; chunks of a prompt without a new token may not bring any, so it ends.
    """
    from tpu_inference.runner.input_batch import InputBatch

    original = InputBatch.add_request

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        begun = request.in_progress_prompt_logprobs_cpu
        result = original(self, request, *args, **kwargs)
        has_tokens = bool(request.output_token_ids)
        if has_tokens:
            self.num_prompt_logprobs.pop(request.req_id, None)
        if has_tokens or begun is not None:  # a step that is under way may still fill in what was begun
            request.in_progress_prompt_logprobs_cpu = begun
        return result

    InputBatch.add_request = add_request


@_override(
    _WORKER,
    "tpu_inference.runner.tpu_runner:TPUModelRunner.load_model",
    "tpu_inference.runner.tpu_runner:TPUModelRunner._execute_model",
    "tpu_inference.models.common.model_loader:get_flax_model",
    "tpu_inference.models.vllm.vllm_model_wrapper:VllmModelWrapper.build_pooler_func",
)
def embeddings_of_finished_prompts() -> None:
    """vLLM 0.33 takes a list of results, None for a prompt of which chunks are missing; 0.32.0 hands it the pooler's
    tensor, and the pooler the lengths of a buffer that it has cleared.
    """
    from tpu_inference.runner.tpu_runner import TPUModelRunner

    original = TPUModelRunner.load_model

    def load_model(self: Any) -> None:
        original(self)
        pool = self.pooler_fn

        def pooled(hidden_states: Any, metadata: Any, seq_lens: Any, scheduled: Any) -> list[Any]:
            del seq_lens
            done = self.input_batch.num_computed_tokens_cpu[: len(scheduled)] + scheduled
            results = pool(hidden_states, metadata, done, scheduled)
            finished = (done == metadata.prompt_lens.numpy()).tolist()
            return [result if end else None for result, end in zip(results, finished, strict=True)]

        if self.is_pooling_model:
            self.pooler_fn = pooled

    TPUModelRunner.load_model = load_model


@_override(
    _WORKER,
    "vllm.v1.engine.llm_engine:LLMEngine._get_driver_model_for_cleanup",
    "vllm.v1.engine.llm_engine:LLMEngine._cleanup_instance_caches",
)
def nothing_of_torch_compile_to_clean_up() -> None:
    """When an engine in this process ends, vLLM asks its model for PyTorch modules that torch.compile has wrapped; a
    JAX model has no modules(), and there are no such wrappers.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    LLMEngine._get_driver_model_for_cleanup = lambda self: None


@_override(_WORKER, "torchax.tensor:Environment.dispatch")
def promote_types_outside_torchax() -> None:
    """torchax sends torch.promote_types (vLLM's LayerNorm) to JAX, which has no aten::promote_types."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    original = torch.promote_types

    def promote_types(type1: torch.dtype, type2: torch.dtype) -> torch.dtype:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return original(type1, type2)

    torch.promote_types = promote_types


# --- one model on several machines --------------------------------------------------------------------------------


@_override(
    _MACHINES,
    "tpu_inference.layers.common.utils:general_device_put",
    "tpu_inference.models.jax.utils.weight_utils:load_hf_weights",
)
def weights_for_devices_of_other_machines() -> None:
    """Only for the backend "ray" does tpu_inference put arrays on devices that other processes own, and load weights in
    the same order everywhere. To its platform "ray" means executors of TPUs, so these two modules alone see it.
    """
    from tpu_inference import envs
    from tpu_inference.layers.common import utils
    from tpu_inference.models.jax.utils import weight_utils

    class Envs:
        TPU_MULTIHOST_BACKEND = "ray"

        def __getattr__(self, name: str) -> Any:
            return getattr(envs, name)

    utils.envs = weight_utils.envs = Envs()


@_override(
    _MACHINES,
    "tpu_inference.layers.common.utils:cpu_mesh",
    "tpu_inference.models.jax.utils.weight_utils:model_weights_single_file_generator",
)
def cpu_of_this_machine() -> None:
    """tpu_inference loads weights on jax.devices("cpu")[0]. Beside TPUs that is this process's; elsewhere JAX joins the
    CPUs too, and it is the first machine's.
    """
    import jax

    original = jax.devices

    def devices(backend: Any = None) -> list[Any]:
        return jax.local_devices(backend="cpu") if backend == "cpu" else original(backend)

    jax.devices = devices


@_override(_HEADLESS, "vllm.entrypoints.cli.serve:run_headless")
def headless_machines_follow_the_first() -> None:
    """vLLM starts a MultiprocExecutor there, whose workers are joined by torch.distributed; JAX joins these."""
    from vllm.entrypoints.cli import serve

    from flashxla_vllm.machines import OtherMachine

    serve.MultiprocExecutor = OtherMachine
