from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_pagoda.runtime.batching.waiting import WaitingQueue
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams


def make_request(rank: float, arrival: int) -> Request:
    request = Request(f"r{arrival}", [1], SamplingParams())
    request.rank, request.arrival = (rank, arrival), arrival
    return request


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.integers(0, 5)),
            st.tuples(st.just("remove"), st.integers(0, 99)),
            st.tuples(st.just("leading"), st.integers(0, 6)),
            st.tuples(st.just("again"), st.integers(0, 99)),
        ),
        max_size=60,
    )
)
def test_the_queue_agrees_with_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    queue, model = WaitingQueue(), []
    for count, (operation, value) in enumerate(operations):
        if operation == "push":
            model.append(make_request(value, count))
            queue.push(model[-1])
        elif operation == "leading":
            assert queue.leading(value) == model[:value]
        elif model:
            request = model.pop(value % len(model))
            queue.remove(request)
            assert request not in queue
            if operation == "again":  # as when it is admitted and preempted
                queue.push(request)
                model.append(request)
        model.sort(key=lambda request: request.rank)
        assert list(queue) == model and len(queue) == len(model)
        assert queue.first() is (model[0] if model else None)
        assert all(request in queue for request in model)
    queue.clear()
    assert queue.first() is None and len(queue) == 0 and queue.leading(3) == []


def test_what_is_removed_from_the_middle_does_not_pile_up() -> None:
    queue = WaitingQueue()
    first = make_request(0, 0)
    queue.push(first)
    for i in range(1, 5000):
        request = make_request(i, i)
        queue.push(request)
        queue.remove(request)
        assert len(queue._heap) <= 2 * len(queue) + 66
    assert queue.first() is first
