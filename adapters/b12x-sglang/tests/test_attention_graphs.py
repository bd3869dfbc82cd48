"""Graphs of the attention backend, recorded on a CPU and replayed with other requests, lengths and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_world import CONTEXT, DIM, HEADS, KV_HEADS, WINDOW, Recording, World, chain, hybrid_pool, layer, pool
from attention_world import attend as run_layer
from b12x_core import UnsupportedError
from b12x_sglang.attention.draft import B12xMultiStepDraftBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc

CLOSE = {"rtol": 0.02, "atol": 0.02}
MAX_REQUESTS = 4


def world(page: int, hybrid: bool = False) -> World:
    return World(hybrid_pool(page) if hybrid else pool(page), [layer(0), layer(1, window=WINDOW)])


class Graph:
    """A graph of MAX_REQUESTS requests over buffers that keep their addresses, as SGLang's graph runners make it.

    Args:
        here: the requests.
        backend: under test, or one that stands for the steps of a draft.
        mode: of the batches.
        tokens: of each request.
    """

    def __init__(self, here: World, backend: Any, mode: ForwardMode, tokens: int) -> None:
        self.here, self.backend, self.mode, self.tokens = here, backend, mode, tokens
        rows = MAX_REQUESTS * tokens
        fill = backend.get_cuda_graph_seq_len_fill_value()
        self.batch = ForwardBatch(
            forward_mode=mode,
            batch_size=MAX_REQUESTS,
            input_ids=torch.zeros(rows, dtype=torch.int64),
            req_pool_indices=torch.zeros(MAX_REQUESTS, dtype=torch.int64),
            seq_lens=torch.full((MAX_REQUESTS,), fill),
            seq_lens_sum=MAX_REQUESTS * fill,
            seq_lens_cpu=torch.full((MAX_REQUESTS,), fill),
            out_cache_loc=torch.zeros(rows, dtype=torch.int64),
            positions=torch.zeros(rows, dtype=torch.int64),
            spec_info=None if mode.is_decode() else chain(tokens),
        )
        self.q = torch.zeros(rows, HEADS * DIM).bfloat16()
        self.k, self.v = (torch.zeros(rows, KV_HEADS, DIM).bfloat16() for _ in range(2))
        backend.init_cuda_graph_state(MAX_REQUESTS, rows)
        backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.run()  # SGLang warms up before it captures
        with Recording() as self.recording:
            self.out = self.run()

    def run(self) -> list[torch.Tensor]:
        """What SGLang records: the metadata, then the layers."""
        self.backend.init_forward_metadata_in_graph(self.batch)
        return [run_layer(self.backend, one, self.q, self.k, self.v, self.batch) for one in self.here.layers]

    def replay(self, requests: Sequence[int], behind: int) -> None:
        """Append tokens to requests, replay with them, and compare the outputs of both layers."""
        here, batch, counts = self.here, self.batch, [self.tokens] * len(requests)
        slots = torch.cat([here.append(request, self.tokens) for request in requests])
        rows = len(slots)
        for buffer in (batch.req_pool_indices, batch.out_cache_loc):
            buffer.zero_()
        batch.seq_lens.fill_(self.backend.get_cuda_graph_seq_len_fill_value())
        batch.seq_lens[: len(requests)] = torch.tensor([len(here.keys[request]) - behind for request in requests])
        batch.req_pool_indices[: len(requests)] = torch.tensor(requests) + 1
        batch.out_cache_loc[:rows] = slots
        self.q.normal_()
        for buffer, tokens in zip((self.k, self.v), here.new(requests, counts), strict=True):
            buffer.normal_()
            buffer[:rows] = tokens
        self.backend.init_forward_metadata_out_graph(batch)
        self.recording.replay()
        for out, window in zip(self.out, (None, WINDOW), strict=True):
            expected = here.expected(self.q[:rows], requests, counts, window)
            torch.testing.assert_close(out[:rows].float(), expected, **CLOSE)
            assert out.isfinite().all()


MODES = [(ForwardMode.DECODE, 1, 0), (ForwardMode.TARGET_VERIFY, 3, 3), (ForwardMode.DRAFT_EXTEND_V2, 3, 0)]


@pytest.mark.parametrize(("page", "hybrid"), [(1, False), (16, False), (4, True)])
@pytest.mark.parametrize(("mode", "tokens", "behind"), MODES, ids=lambda value: getattr(value, "name", None))
def test_replays_read_what_the_buffers_hold(
    page: int, hybrid: bool, mode: ForwardMode, tokens: int, behind: int
) -> None:
    here = world(page, hybrid)
    backend = here.create()
    here.store(backend, [0, 1, 2], [5, 40, 16])
    graph = Graph(here, backend, mode, tokens)
    width = backend.forward_metadata.block_table.shape[1]
    assert width == CONTEXT // page  # whatever length the capture saw
    graph.replay([1, 0, 2], behind)
    graph.replay([0, 2], behind)  # padded to the graph's size
    # Between replays other batches run without the graph.
    here.store(backend, [3], [50])
    graph.replay([3, 1, 0, 2], behind)
    graph.replay([2], behind)


def test_graphs_of_several_sizes_share_their_buffers_and_survive_larger_ones() -> None:
    here = world(16)
    backend = here.create()
    here.store(backend, [0, 1], [5, 40])
    decode = Graph(here, backend, ForwardMode.DECODE, 1)
    verify = Graph(here, backend, ForwardMode.TARGET_VERIFY, 2)
    assert len(backend._buffers) == 1
    backend.init_cuda_graph_state(2 * MAX_REQUESTS, 8 * MAX_REQUESTS)
    assert len(backend._buffers) == 2
    for _ in range(2):
        decode.replay([1, 0], 0)
        verify.replay([0, 1], 2)


def test_recording_notices_a_value_read_on_the_host() -> None:
    lengths = torch.tensor([3])
    with Recording(), pytest.raises(AssertionError, match="read on the host"):
        int(lengths.max())


def test_an_extension_has_no_graph() -> None:
    here = world(16)
    backend = here.create()
    slots = here.append(0, 3)
    backend.init_cuda_graph_state(1, 3)
    with pytest.raises(UnsupportedError, match=r"no graph for a EXTEND batch; .* breakable"):
        backend.init_forward_metadata_out_graph(here.batch(ForwardMode.EXTEND, [0], [3], slots), in_capture=True)


@pytest.mark.parametrize(("page", "hybrid"), [(1, False), (16, False), (4, True)])
@pytest.mark.parametrize("graph", [False, True])
def test_steps_of_a_draft_each_see_the_tokens_before(page: int, hybrid: bool, graph: bool) -> None:
    here, steps, requests = world(page, hybrid), 4, [1, 0]
    count = len(requests)
    target = here.create()
    here.store(target, [0, 1], [5, 40])
    backend = here.create(lambda runner: B12xMultiStepDraftBackend(runner, 1, steps))
    assert len(backend.attn_backends) == steps - 1
    q, k, v = ([torch.zeros(count, *shape).bfloat16() for _ in range(steps - 1)] for shape in (
        (HEADS * DIM,), (KV_HEADS, DIM), (KV_HEADS, DIM),
    ))  # fmt: skip
    batch = here.batch(ForwardMode.DECODE, requests, [1, 1], torch.zeros(count * steps, dtype=torch.int64))
    batch.spec_info = chain(1)

    def run() -> list[list[torch.Tensor]]:
        """As SGLang's worker: each step with the slots of its own and the backend of its own."""
        every, outs = batch.out_cache_loc, []
        for step, slots in enumerate(per_step_draft_out_cache_loc(every, count, 1, steps)[: steps - 1]):
            batch.out_cache_loc = slots
            child = backend.attn_backends[step]
            outs.append([run_layer(child, one, q[step], k[step], v[step], batch) for one in here.layers])
        batch.out_cache_loc = every
        return outs

    if graph:
        backend.init_cuda_graph_state(count, count)
        tables = {child._buffers[-1].block_table.data_ptr() for child in backend.attn_backends}
        assert len(tables) == 1
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        with Recording() as recording:
            backend.init_forward_metadata_in_graph(batch)
            outs = run()
    for _ in range(2):
        lengths = torch.tensor([len(here.keys[request]) for request in requests])
        slots = torch.stack([here.append(request, steps) for request in requests])
        batch.seq_lens.copy_(lengths)
        batch.out_cache_loc.copy_(slots.flatten())
        for step in range(steps - 1):
            q[step].normal_()
            positions = list(zip(requests, (lengths + step).tolist(), strict=True))
            k[step].copy_(torch.stack([here.keys[request][position] for request, position in positions]))
            v[step].copy_(torch.stack([here.values[request][position] for request, position in positions]))
        if graph:
            backend.init_forward_metadata_out_graph(batch)
            recording.replay()
        else:
            backend.init_forward_metadata(batch)
            outs = run()
        whole = list(here.keys), list(here.values)
        for step, layers in enumerate(outs):
            for request, length in zip(requests, lengths.tolist(), strict=True):
                here.keys[request] = whole[0][request][: length + step + 1]
                here.values[request] = whole[1][request][: length + step + 1]
            for out, window in zip(layers, (None, WINDOW), strict=True):
                expected = here.expected(q[step], requests, [1, 1], window)
                torch.testing.assert_close(out.float(), expected, **CLOSE)
        # All proposed tokens were right; the last one's key comes with the verification.
        here.keys, here.values = whole
        for request in requests:
            here.keys[request] = here.keys[request][:-1]
            here.values[request] = here.values[request][:-1]
