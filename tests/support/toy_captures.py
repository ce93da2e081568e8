"""A model of ATen operators alone behind the route of captured graphs, on a CUDA device.

CUDA graphs stand for those that npugraph_ex captures; everything else is the product's. Lengths are tensors, since a
CUDA graph would freeze lists. Each step begins by letting the device sleep, so that the host runs ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_pagoda.compiler.link.linkage import Linkage
from torch_pagoda.compiler.link.linker import LinkedProgram
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.route import Run
from torch_pagoda.passes import TracedGraph
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.program import CacheSpec
from torch_pagoda.runtime.step_metadata import StepMetadata

VOCAB, WIDTH, BLOCK_SIZE, POSITIONS = 97, 16, 4, 64
CYCLES = 40_000_000
"""About 20 ms, in which the host launches several steps."""
Spoil = Callable[[Tensor, Sequence[Tensor]], Tensor]
_FIELDS = ("slot_mapping", "block_table", "query_start_loc", "seq_lens", "logits_rows")


def toy_step(
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    starts: Tensor,
    lens: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    embedding: Tensor,
    places: Tensor,
    qkv: Tensor,
    head: Tensor,
) -> Tensor:
    """Logits ``[R, VOCAB]`` of one attention layer over the paged cache.

    It reads no number on the host, and no wrong id lies outside the vocabulary: a CUDA device that reads outside a
    tensor computes nothing from then on.
    """
    tokens, context = ids.shape[1], table.shape[1] * keys.shape[1]
    x = embedding[ids[0] % VOCAB] + places[positions[0]]
    query, key, value = (x @ qkv).split(WIDTH, 1)
    keys.view(-1, WIDTH).index_copy_(0, slots, key)
    values.view(-1, WIDTH).index_copy_(0, slots, value)
    sequence = (torch.arange(tokens, device=ids.device)[:, None] >= starts[1:]).sum(1)  # [T]
    at = torch.arange(context, device=ids.device)
    unseen = (at > positions[0][:, None]) | (at >= lens[sequence][:, None])  # [T, context]
    blocks = table[sequence]
    scores = (keys[blocks].flatten(1, 3) @ query[:, :, None])[..., 0]
    read = values[blocks].flatten(1, 3).masked_fill(unseen[..., None], 0.0)
    shares = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return (x + (shares[:, None] @ read)[:, 0])[rows] @ head


def toy_graph(device: torch.device) -> TracedGraph:
    """A lowered graph whose one node is ``toy_step``, its weights on the device."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = fx.Graph()
    traced = TracedGraph(fx.GraphModule(nn.Module(), graph), mode, {}, "input_ids", "position_ids")
    for name in (traced.input_ids, traced.position_ids):
        graph.placeholder(name).meta["example_value"] = mode.from_tensor(torch.zeros(1, 7, dtype=torch.int64))
    output = graph.output(())
    step = [*traced.placeholders, *map(traced.step_input, _FIELDS)]
    step += traced.add_cache(CacheSpec(1, WIDTH, WIDTH, torch.float32, by_token=True))
    generator = torch.Generator().manual_seed(0)
    for name, shape in {
        "embedding": (VOCAB, WIDTH),
        "places": (POSITIONS, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "head": (WIDTH, VOCAB),
    }.items():
        weight = torch.randn(shape, generator=generator) / shape[0] ** (0.5 if name in ("qkv", "head") else 0)
        step.append(traced.add_constant(name, weight))
        traced.constants[name] = weight.to(device)
    with graph.inserting_before(output):
        logits = traced.call(toy_step, *step)
    output.args = ((logits,),)
    traced.recompile()
    with mode:  # from which the program and its route read their device
        step[0].meta["example_value"] = torch.empty(1, 7, dtype=torch.int64, device=device)
    traced.npu, traced.max_positions = NpuTarget(block_size=BLOCK_SIZE, graph_mode="aclgraph"), POSITIONS
    return traced


class ToyCaptures(AclGraphs):
    """Captures ``toy_step`` by CUDA graphs, which share their memory, results included.

    Args:
        device: that it runs on.
        budget: most sizes that are captured.

    Attributes:
        spoilt: tokens of a step → what is called with its logits and the caches while it is captured, and returns
            other logits.
        graphs: all that were captured, or begun; the memory that they share lasts as long as one of them.
    """

    def __init__(self, device: torch.device, budget: int) -> None:
        traced = toy_graph(device)

        def eager(*args: Any) -> Any:
            torch.get_device_module(device)._sleep(CYCLES)
            return (traced.module(*args),)

        super().__init__(traced, eager, budget)
        self.refusal = ""  # that lengths are no lists
        self.spoilt: dict[int, Spoil] = {}
        self.graphs: list[Any] = []

    def _compile(self, scheduled: bool) -> Run:
        module: Any = torch.get_device_module(self.device)
        pool = module.graph_pool_handle()
        results = torch.empty(self._max_num_batched_tokens + BLOCK_SIZE, VOCAB, device=self.device)
        captured: dict[tuple[torch.Size, ...], Any] = {}

        def run(*fixed: Any) -> Any:
            sizes = tuple(fixed[i].shape for i in self.changing)
            rows = results[: fixed[self._rows_at].shape[0]]
            if sizes not in captured:
                self.eager(*fixed)  # what libraries allocate when they first run is in no graph
                self.graphs.append(graph := module.CUDAGraph())
                with module.graph(graph, pool=pool):
                    ((logits,),) = self.eager(*fixed)
                    spoil = self.spoilt.get(fixed[self._ids_at].shape[1])
                    rows.copy_(logits if spoil is None else spoil(logits, self._caches))
                captured[sizes] = graph
            captured[sizes].replay()
            return ((rows,),)

        return run


class SleepingProgram(LinkedProgram):
    """A program in front of whose steps the device sleeps.

    Attributes:
        was_behind: for each step but the first, whether it was launched before the device had ended the last one.
    """

    def __init__(self, route: ToyCaptures) -> None:
        super().__init__(Linkage.of(route.traced), route.traced.constants, route)
        self.was_behind: list[bool] = []
        self._last: Any = None

    def __call__(self, input_ids: Tensor, position_ids: Tensor, step: StepMetadata) -> Tensor:
        module: Any = torch.get_device_module(self.device)
        module._sleep(CYCLES)
        logits = super().__call__(input_ids, position_ids, step)
        if self._last is not None:
            self.was_behind.append(not self._last.query())
        self._last = module.Event()
        self._last.record()
        return logits
