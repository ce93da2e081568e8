"""The ranks stage: a group of ranks exchanges tensors, serves the model, and loses a rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...checkpoint.configs import load_config
from ...compiler.options import CompileOptions
from ...llm import LLM
from ...runtime.parallel.launch import Ranks
from ...runtime.parallel.messages import Message
from ...runtime.processors import threads_per_rank
from ...runtime.requests.sampling_params import SamplingParams
from ...runtime.restart_limit import RestartLimit
from ...shipping import on_devices
from .collectives import COMMAND, cases, exchange
from .device import Device
from .graphs import made, why_wrong
from .model import Asked, load, open_device
from .numbers import plain
from .passes import with_rounding
from .rank_items import BROKEN, KINDS, WAYS
from .worker import Items, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from ...runtime.parallel.device_group import Backend

__all__ = ["EXCHANGE_SECONDS", "stage"]

_PROMPTS, _PROMPT, _DECODED = 4, 100, 32
_STEPS = 8
"""Until a rank is killed."""
EXCHANGE_SECONDS = 300.0
"""Within which all ranks end an exchange."""
_LOAD_SECONDS = 600.0


def stage(**asked: Any) -> Items:
    """The items of the stage; see ``Asked``.

    Raises:
        ValueError: there are fewer devices than ranks.
    """
    given = Asked(**asked)
    device = open_device(given)
    size = given.tensor_parallel_size
    if device.torch_device.type == "npu" and (found := torch.npu.device_count()) < size:  # type: ignore[attr-defined]
        raise ValueError(f"tensor_parallel_size={size} needs as many devices, and this machine has {found}; lower it")
    greedy = _Greedy(given)
    ways = {name: options for name, options in WAYS.items() if _can_run(options, device)}
    return {
        **{kind: partial(_exchanges, kind, given, device) for kind in KINDS},
        **{name: partial(_served, options, given, device, greedy) for name, options in ways.items()},
        BROKEN: partial(_broken, given, device),
    }


def _can_run(options: Mapping[str, Any], device: Device) -> bool:
    """Whether there is what runs the graphs; a stand-in for a device may run operators alone."""
    try:
        CompileOptions.from_dict({"target": "npu", "soc": device.soc, **options}).for_device(device.torch_device.type)
    except ValueError:
        return False
    return True


# Exchanges


def _exchanges(kind: str, asked: Asked, device: Device, progress: Progress) -> dict[str, Any]:
    """All sizes of one kind of exchange."""
    _, config = load_config(asked.model, asked.trust_remote_code)
    rows = tuple(sorted({1, asked.max_num_seqs, asked.max_num_batched_tokens}))
    planned = cases(kind, config.get_text_config().hidden_size, rows)
    backend: Backend = "hccl" if device.torch_device.type == "npu" else "gloo"
    size = asked.tensor_parallel_size
    progress({"doing": f"starting {size} ranks"})
    began = time.perf_counter()
    ranks = Ranks(
        size,
        threads=threads_per_rank(size),
        load_timeout=_LOAD_SECONDS,
        restarts=RestartLimit(0),
        **{**on_devices(backend, size), "command": (*COMMAND, backend)},
    )
    found: list[dict[str, Any]] = []
    try:
        torch.set_num_threads(threads_per_rank(size))
        ranks.load(Message("load", {"cases": [asdict(case) for case in planned]}))
        started = round(time.perf_counter() - began, 2)
        for case in planned:
            progress({"doing": str(case), "exchanges": found})
            with ranks.task(str(case), EXCHANGE_SECONDS):
                found.append(exchange(case, ranks.group, device.torch_device))
    finally:
        ranks.close()
    wrong = next((f"{case}: {each['wrong']}" for case, each in zip(planned, found, strict=True) if each["wrong"]), "")
    return {"wrong": wrong, "exchanges": found, "seconds_to_start": started}


# Serving


@dataclass
class _Expected:
    """What transformers continues prompts with on the CPU.

    Attributes:
        prompts: of random tokens.
        tokens: behind each, the likeliest ones.
        logits: that chose them, ``[tokens, vocabulary]`` for each prompt.
        limit: by how many standard deviations logits may differ.
        share: of the sequences that must be within it.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[torch.Tensor]
    limit: float
    share: float


class _Greedy:
    """Makes what is expected when it is first needed, without keeping the model."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._made: _Expected | None = None

    def __call__(self) -> _Expected:
        if self._made is None:
            self._made = _expected(load(self._asked, torch.device("cpu")), self._asked)
        return self._made


def _expected(model: PreTrainedModel, asked: Asked) -> _Expected:
    from transformers import GenerationConfig

    reference = with_rounding(model)
    prompts = _prompts(reference.logits[0].shape[1], asked)
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=_DECODED + 1, eos_token_id=None, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    tokens, logits = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            found: Any = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)  # type: ignore[operator]
        tokens.append(found.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(found.logits).float())
    return _Expected(prompts, tokens, logits, reference.tolerance, reference.share)


def _prompts(vocab_size: int, asked: Asked) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    count = min(_PROMPTS, asked.max_num_seqs)
    prompts: list[list[int]] = torch.randint(0, vocab_size, (count, _PROMPT), generator=generator).tolist()
    return prompts


@contextmanager
def _engine(asked: Asked, device: Device, options: Mapping[str, Any]) -> Iterator[LLM]:
    """The engine of all ranks, as users start it."""
    where: dict[str, Any] = {"device": "npu"}
    if device.torch_device.type != "npu":
        where = {"device": "cpu", "target": "npu"}
    blocks = asked.max_num_seqs * -(-(_PROMPT + _DECODED + 1) // asked.block_size) + 1
    given: dict[str, Any] = {
        **{name: value for name, value in asked.options.items() if value},
        **where,
        "dtype": asked.dtype,
        "trust_remote_code": asked.trust_remote_code,
        "block_size": asked.block_size,
        "num_blocks": blocks,
        "max_num_seqs": asked.max_num_seqs,
        "max_num_batched_tokens": asked.max_num_batched_tokens,
        "enable_prefix_caching": False,
        "tensor_parallel_size": asked.tensor_parallel_size,
        **options,
    }
    llm = LLM(asked.model, **given)
    try:
        yield llm
    finally:
        llm.shutdown()


def _served(
    options: Mapping[str, Any], asked: Asked, device: Device, greedy: _Greedy, progress: Progress
) -> dict[str, Any]:
    """Serve prompts by all ranks; the tokens are compared with those of transformers."""
    progress({"doing": "transformers continues the prompts on the CPU"})
    expected = greedy()
    progress({"doing": "starting the ranks"})
    with _engine(asked, device, options) as llm:
        said = made(llm.compile_report)
        wrong = why_wrong(llm.compile_report, options["codegen"])
        progress({"doing": "serving", **said})
        seconds = []
        for tokens in (1, 1 + _DECODED):
            began = time.perf_counter()
            found = _generated(llm, expected.prompts, tokens)
            seconds.append(time.perf_counter() - began)
        steps = llm.stats()
    of_tokens, same = _compared(found, expected)
    is_rounded = asked.quantization is not None or asked.kv_cache_dtype != "auto"
    return {
        "wrong": wrong or ("" if is_rounded else of_tokens),
        **said,
        "milliseconds": round(1e3 * (seconds[1] - seconds[0]) / _DECODED, 3),
        "same_tokens": same,
        "sequences": len(found),
        "steps_ahead": int(steps.get("steps_ahead", 0)),
        "operator_steps": int(steps.get("operator_steps", 0)),
    }


def _generated(llm: LLM, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens.

    Raises:
        RuntimeError: a request ended with an error.
    """
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate([list(prompt) for prompt in prompts], params)]
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
    return [list(output.token_ids) for output in outputs]


def _compared(found: Sequence[Sequence[int]], expected: _Expected) -> tuple[str, int]:
    """Why the tokens are wrong, or "", and how many sequences are those of transformers.

    Where a sequence first differs, the tokens before are the same, so that transformers' logits say by how much the
    token is less likely: it is right if roundings of both can make it the likeliest.
    """
    gaps = []
    for tokens, wanted, logits in zip(found, expected.tokens, expected.logits, strict=True):
        at = next((i for i, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]), None)
        gap = 0.0 if at is None else float((logits[at].max() - logits[at, tokens[at]]) / logits[at].std())
        gaps.append((gap, at))
    limit = 2 * expected.limit
    beyond = [(gap, at) for gap, at in gaps if gap > limit]
    same = sum(at is None for _, at in gaps)
    if len(beyond) <= (1 - expected.share) * len(gaps):
        return "", same
    gap, at = beyond[0]
    said = (
        f"token {at} of a sequence is another than transformers', {plain(gap):.3g} standard deviations less likely "
        f"(limit {limit:.3g})"
    )
    return said, same


# Failure


def _broken(asked: Asked, device: Device, progress: Progress) -> dict[str, Any]:
    """Kill a rank while requests run: they end with an error that names it."""
    progress({"doing": "starting the ranks"})
    _, config = load_config(asked.model, asked.trust_remote_code)
    prompts = _prompts(config.get_text_config().vocab_size, asked)
    with _engine(asked, device, {"codegen": "none"}) as llm:
        killed: list[float] = []
        over = threading.Event()
        pid = llm.program.pids[-1]  # type: ignore[attr-defined]

        def kill() -> None:
            while llm.stats()["steps"] < _STEPS:
                if over.wait(0.002):
                    return
            killed.append(time.perf_counter())
            os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        progress({"doing": f"serving, until rank {asked.tensor_parallel_size - 1} is killed"})
        try:
            params = SamplingParams(temperature=0, max_tokens=_DECODED, ignore_eos=True)
            outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        finally:
            ended = time.perf_counter()
            over.set()
            thread.join()
    errors = [str(output.error) for output in outputs if output.error is not None]
    named = f"rank {asked.tensor_parallel_size - 1} (pid {pid}) died with signal 9"
    wrong = ""
    if not killed or not errors:
        wrong = "the requests ended before the rank did"
    elif not all(named in error for error in errors):
        wrong = f"the error does not name the rank that died: {next(e for e in errors if named not in e)}"
    return {
        "wrong": wrong,
        "error": errors[0].replace(f"pid {pid}", "pid …") if errors else "",
        "seconds_until_error": round(ended - killed[0], 3) if killed else None,
    }
