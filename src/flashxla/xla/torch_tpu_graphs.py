"""torch.compile(backend="tpu"): the compiled programs donate the caches that flashxla's operations update.

Without this a program has new memory for every cache, at every step. TorchTPU's compiler can donate inputs, but offers
that to its own callers alone; `install` adds it to the compiler of one graph, StaticCompiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch_tpu._internal.compile import compiler
from torch_tpu._internal.compile.torch_tpu_compiled_executable import CompiledArtifact

from flashxla.xla.torch_tpu_memory import own


def _of_artifact(name: str) -> property:
    return property(lambda self: getattr(self.artifact, name))


class DonatingArtifact(CompiledArtifact):
    """A compiled graph, and the positions of its inputs that are donated."""

    def __init__(self, artifact: CompiledArtifact, donated: Sequence[int]) -> None:
        super().__init__()
        self.artifact, self.donated = artifact, donated

    def __call__(self, *args: Any) -> Any:
        """Run the graph, on one list of its inputs or on the inputs."""
        boxed = len(args) == 1 and isinstance(args[0], (list, tuple))
        inputs = args[0] if boxed else args
        own([inputs[i] for i in self.donated])
        return self.artifact(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return DonatingArtifact, (self.artifact, self.donated)

    resolve = _of_artifact("resolve")
    is_resolved = _of_artifact("is_resolved")
    updates_default_generator_state = _of_artifact("updates_default_generator_state")
    mlir_texts = _of_artifact("mlir_texts")
    graph_module_debug_strs = _of_artifact("graph_module_debug_strs")
    compiled_executables = _of_artifact("compiled_executables")
    fingerprint = _of_artifact("fingerprint")
    prepare_for_serialization = _of_artifact("prepare_for_serialization")
    post_compile = _of_artifact("post_compile")


class CountingBackend:
    """torch.compile's backend "tpu", which counts the graphs that it compiles."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        """Compile a graph."""
        self.graphs += 1
        return torch._dynamo.lookup_backend("tpu")(graph, inputs, **options)


@functools.cache
def install() -> None:
    """Let TorchTPU's compiler donate the caches."""
    compile_graph = compiler.StaticCompiler.__call__

    @functools.wraps(compile_graph)
    def call(
        self: Any,
        graph_module: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> CompiledArtifact:
        updated = sorted({i for i in _updated_inputs(graph_module.graph) if example_inputs[i].numel()})
        if not updated:
            return compile_graph(self, graph_module, example_inputs, *args, **kwargs)
        is_tensor = [isinstance(x, torch.Tensor) for x in example_inputs]
        kwargs["donated_inputs"] = [
            *(kwargs.get("donated_inputs") or ()),
            *(sum(is_tensor[:i]) for i in updated),
        ]
        return DonatingArtifact(compile_graph(self, graph_module, example_inputs, *args, **kwargs), updated)

    compiler.StaticCompiler.__call__ = call


def _updated_inputs(graph: torch.fx.Graph) -> Iterator[int]:
    """The positions of a graph's inputs that operations of flashxla update."""
    inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2):
        if node.args[0].namespace == "flashxla":
            yield from (inputs[base] for base in node.kwargs["_all_bases"] if base in inputs)
