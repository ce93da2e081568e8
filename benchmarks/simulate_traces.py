"""Requests for a simulation: when they arrive, how long they are, whose they are and what they share.

Everything follows from one seed. Requests are made as they are asked for, so that a million of them need no memory,
and their contents depend neither on the rate at which they arrive nor on who serves them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

ARRIVALS = ("poisson", "gamma", "bursty")
URGENT, ORDINARY = 0, 1
"""The two priorities; the lower comes first."""

_CHUNK = 1024  # requests that are drawn together
_VOCABULARY = 32_000
_GAMMA_CV = 3.0  # coefficient of variation of the gaps between gamma arrivals; 1 is a Poisson process
_BURST_SHARE = 0.2  # of the time
_BURST_RATE = 3.0  # times the mean rate
_BURST_SECONDS = 10.0  # mean length


@dataclasses.dataclass(eq=False, slots=True)
class SimulatedRequest(Request):
    """A request that is known to end after ``num_outputs`` tokens, which the batcher does not know.

    Attributes:
        num_outputs: at which the simulated model samples its end of sequence.
        most_computed: leading tokens that were computed at any time; what is below is computed again.
    """

    num_outputs: int = 1
    most_computed: int = 0


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the requests are like. Lengths are log-normal, in tokens; shares of prompts and clients follow Zipf's law.

    Attributes:
        arrivals: "poisson"; "gamma": gaps with a coefficient of variation of 3; "bursty": a Poisson process whose
            rate switches between three times and half the mean, 10 seconds in bursts and 40 between them on average.
        prompt_median: of the part of the prompt that is a request's own.
        prompt_sigma: standard deviation of its logarithm.
        output_median: of what is generated.
        output_sigma: standard deviation of its logarithm.
        max_tokens: that each request asks for; None: the power of two that its output does not exceed.
        system_share: of the requests begin with one of the system prompts.
        num_system_prompts: that there are.
        system_median: of their lengths.
        system_sigma: standard deviation of their logarithm.
        num_clients: that send requests.
        zipf: exponent of how popular prompts and clients are: the n-th is n to this power rarer than the first.
        urgent_share: of the requests have priority 0, the others 1.
        max_model_len: prompt and output together are cut to it.
        timeout: seconds after which a request ends that has not ended before; None: never.
        seed: of everything.
    """

    arrivals: str = "poisson"
    prompt_median: float = 128.0
    prompt_sigma: float = 1.0
    output_median: float = 64.0
    output_sigma: float = 0.8
    max_tokens: int | None = None
    system_share: float = 0.5
    num_system_prompts: int = 64
    system_median: float = 256.0
    system_sigma: float = 0.5
    num_clients: int = 32
    zipf: float = 1.0
    urgent_share: float = 0.1
    max_model_len: int = 4096
    timeout: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise ValueError(f"arrivals={self.arrivals!r} is not known; use one of {', '.join(ARRIVALS)}")
        if self.max_model_len < 4:
            raise ValueError(
                f"max_model_len={self.max_model_len} leaves no room for prompt and output; use 4 or more"
            )


def arrival_times(workload: Workload, rate: float) -> Iterator[float]:
    """Seconds at which requests arrive, ``rate`` per second on average, without end."""
    rng = _generator(workload, 0)
    now = 0.0
    in_burst = False
    quiet_rate = (1 - _BURST_SHARE * _BURST_RATE) / (1 - _BURST_SHARE)
    quiet_seconds = _BURST_SECONDS * (1 - _BURST_SHARE) / _BURST_SHARE
    shape = 1 / _GAMMA_CV**2
    while True:
        if workload.arrivals == "bursty":
            length = rng.exponential(_BURST_SECONDS if in_burst else quiet_seconds)
            count = rng.poisson(length * rate * (_BURST_RATE if in_burst else quiet_rate))
            times = now + np.sort(rng.random(count)) * length
            now += length
            in_burst = not in_burst
        else:
            if workload.arrivals == "gamma":
                gaps = rng.gamma(shape, 1 / (shape * rate), _CHUNK)
            else:
                gaps = rng.exponential(1 / rate, _CHUNK)
            times = now + np.cumsum(gaps)
            now = float(times[-1])
        yield from times.tolist()


def requests_of(workload: Workload, rate: float = math.inf) -> Iterator[SimulatedRequest]:
    """Requests in the order of their arrival, without end; all arrive at 0 where the rate is infinite."""
    times = itertools.repeat(0.0) if math.isinf(rate) else arrival_times(workload, rate)
    params: dict[int, SamplingParams] = {}
    systems = _system_prompts(workload)
    shapes, ids = _generator(workload, 2), _generator(workload, 3)
    clients = [f"client{i}" for i in range(workload.num_clients)]
    client_shares = _zipf(workload.num_clients, workload.zipf)
    system_shares = _zipf(workload.num_system_prompts, workload.zipf)
    most = workload.max_model_len
    for first in itertools.count(0, _CHUNK):
        # Each property takes the same number of draws, whatever the others turn out to be.
        prompts = _lengths(shapes, workload.prompt_median, workload.prompt_sigma, _CHUNK, most // 2)
        outputs = _lengths(shapes, workload.output_median, workload.output_sigma, _CHUNK, most // 4)
        system = shapes.choice(workload.num_system_prompts, _CHUNK, p=system_shares)
        system[shapes.random(_CHUNK) >= workload.system_share] = -1
        client = shapes.choice(workload.num_clients, _CHUNK, p=client_shares)
        urgent = shapes.random(_CHUNK) < workload.urgent_share
        tokens = ids.integers(0, _VOCABULARY, int(prompts.sum()), dtype=np.int32)
        ends = np.cumsum(prompts)
        for i in range(_CHUNK):
            own = tokens[ends[i] - prompts[i] : ends[i]]
            # Either is a copy: a view would keep the tokens of all requests of the chunk.
            prompt = own.copy() if system[i] < 0 else np.concatenate((systems[system[i]], own))
            num_outputs = int(outputs[i])
            asked = workload.max_tokens or 1 << (num_outputs - 1).bit_length()
            asked = min(asked, most - len(prompt))
            if asked not in params:
                params[asked] = SamplingParams(max_tokens=asked)
            now = next(times)
            yield SimulatedRequest(
                f"r{first + i}",
                prompt,
                params[asked],
                priority=URGENT if urgent[i] else ORDINARY,
                client=clients[client[i]],
                deadline=None if workload.timeout is None else now + workload.timeout,
                arrival_time=now,
                num_outputs=min(num_outputs, asked),
            )


def _system_prompts(workload: Workload) -> list[npt.NDArray[np.int32]]:
    rng = _generator(workload, 1)
    lengths = _lengths(
        rng, workload.system_median, workload.system_sigma, workload.num_system_prompts, workload.max_model_len // 4
    )
    return [rng.integers(0, _VOCABULARY, length, dtype=np.int32) for length in lengths]


def _generator(workload: Workload, stream: int) -> np.random.Generator:
    return np.random.default_rng([workload.seed, stream])


def _lengths(rng: np.random.Generator, median: float, sigma: float, count: int, most: int) -> npt.NDArray[np.int64]:
    return np.clip(np.rint(rng.lognormal(math.log(median), sigma, count)), 1, most).astype(np.int64)


def _zipf(count: int, exponent: float) -> npt.NDArray[np.float64]:
    weights: npt.NDArray[np.float64] = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    weights /= weights.sum()
    return weights
