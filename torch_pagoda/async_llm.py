"""The engine for asyncio: one thread runs its steps for the requests of many tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from .llm import LLM
from .options import LLMOptions, signature_with_options
from .runtime.engine.submission import one_line
from .runtime.requests.outputs import RequestOutput
from .runtime.requests.prompt_forms import Prompt
from .runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Result = TypeVar("Result")


class AsyncLLM:
    """Serves one causal LM to the tasks of one or several event loops.

    Only a background thread calls the engine; calls of tasks go through a queue, so none waits for a step. Until this
    is shut down, do not use the underlying :class:`LLM`. The constructor loads and compiles the model; within a
    running loop use ``await asyncio.to_thread(AsyncLLM, ...)``.

    Args:
        model: an :class:`LLM`, which stays open when this is shut down; or an argument of ``LLM``, whose engine then
            belongs to this object.
        tokenizer: as for ``LLM``; not with an ``LLM``.
        options: as for ``LLM``; not with an ``LLM``.

    Attributes:
        llm: the engine; its options, tokenizer and report may be read at any time.

    Raises:
        TypeError, ValueError: as ``LLM``.
    """

    def __init__(
        self,
        model: LLM | str | os.PathLike[str] | PreTrainedModel,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        if isinstance(model, LLM):
            if tokenizer is not None or options:
                given = ", ".join([*(["tokenizer"] if tokenizer is not None else []), *options])
                raise TypeError(f"model is already an LLM; pass {given} to that LLM")
            self.llm = model
        else:
            self.llm = LLM(model, tokenizer, **options)
        self._stepper = _Stepper(self.llm, owns_llm=self.llm is not model)
        # Also when this is forgotten, and before the interpreter goes down under a thread that computes.
        self._finalizer = weakref.finalize(self, self._stepper.stop)

    __signature__ = signature_with_options(__init__)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one prompt; yields the output so far whenever there is more, the last time with ``finished`` set.

        A slow consumer gets the newest output and misses those between. Cancelling the awaiting task, or closing the
        iterator, cancels the request.

        Args:
            prompt, sampling_params: as for :meth:`LLM.submit`.
            request_id: an id for :meth:`abort`; by default a new one.
            priority, client, deadline, cache_salt: as for :meth:`LLM.generate`.

        Raises:
            TypeError, ValueError: the prompt, the parameters or the id is invalid.
            QueueFull: ``max_queue`` prompts wait already.
            RuntimeError: the engine failed, or was shut down before the request was accepted.
        """
        consumer, stepper = _Consumer(asyncio.get_running_loop()), self._stepper

        submit = partial(
            self.llm.submit,
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            client=client,
            deadline=deadline,
            cache_salt=cache_salt,
        )
        stepper.send(lambda: stepper.admit(consumer, submit))
        finished = False
        try:
            while not finished:
                output = await consumer.next()
                finished = output.finished
                yield output
        finally:
            if not finished:
                stepper.send(lambda: stepper.drop(consumer), if_open=True)

    async def abort(self, request_id: str) -> bool:
        """Cancel a request; its consumer gets a last output with ``finish_reason="cancelled"``.

        Returns:
            Whether an unfinished request has that id.
        """
        return await self._call(lambda: self.llm.cancel(request_id))

    async def stats(self) -> dict[str, int | float]:
        """Statistics of the queue, the KV cache and the steps; see :meth:`LLM.stats`."""
        return await self._call(self.llm.stats)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in use; see :meth:`LLM.get_tokenizer`."""
        return self.llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests without any."""
        return self.llm.get_default_sampling_params()

    def shutdown(self) -> None:
        """Cancel unfinished requests, stop the thread, and shut down an engine that belongs to this object.

        Waits for the running step; ``async with`` does so without blocking the loop. Later requests raise
        ``RuntimeError``.
        """
        self._finalizer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _call(self, function: Callable[[], Result]) -> Result:
        """Run a function between two steps."""
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        stepper = self._stepper
        stepper.send(lambda: stepper.answer(future, function))
        return await asyncio.wrap_future(future)


class _Consumer:
    """The mailbox of one ``generate`` call: the engine's thread puts, the event loop takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._ready = asyncio.Event()
        self._newest: RequestOutput | BaseException | None = None

    def put(self, news: RequestOutput | BaseException) -> bool:
        """Deliver an output, replacing an unread one; returns False if nobody can read it any more."""
        with self._lock:
            is_announced, self._newest = self._newest is not None, news
        if is_announced:
            return not self._loop.is_closed()
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop is closed
            return False
        return True

    async def next(self) -> RequestOutput:
        """Wait for an output; raises it if it is an exception."""
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            news, self._newest = self._newest, None
        assert news is not None  # it was announced, and only this takes it
        if isinstance(news, BaseException):
            raise news
        return news


class _Stepper:
    """The thread that runs the engine. It holds no reference to the ``AsyncLLM``, so that one can be collected."""

    def __init__(self, llm: LLM, owns_llm: bool) -> None:
        self._llm = llm
        self._owns_llm = owns_llm
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing is put into the inbox after it was emptied for the last time
        self._is_closed = False
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._consumers: dict[str, _Consumer] = {}
        self._ids_in_use = False  # cancelled requests have theirs until a step has given their last output
        self._thread = threading.Thread(target=self._run, name="pagoda-engine", daemon=True)
        self._thread.start()

    def send(self, command: Callable[[], None], *, if_open: bool = False) -> None:
        """Have the thread call ``command`` before its next step.

        Raises:
            RuntimeError: the thread has ended, unless ``if_open``.
        """
        with self._lock:
            if not self._is_closed:
                self._inbox.put(command)
                return
        if not if_open:
            raise self._error()

    def stop(self) -> None:
        """End the thread and wait for its end."""
        self.send(self._begin_to_stop, if_open=True)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def admit(self, consumer: _Consumer, submit: Callable[[], str]) -> None:
        """Submit a request with outputs to ``consumer``; like all methods below, call it in the thread."""
        if self._is_stopping:
            consumer.put(self._error())
            return
        if self._ids_in_use:
            try:
                self._step()
            except Exception as error:
                consumer.put(_failure(error))
                return
        try:
            self._consumers[submit()] = consumer
        except Exception as error:
            consumer.put(error)

    def drop(self, consumer: _Consumer) -> None:
        """Cancel the request of a consumer that no longer reads."""
        for request_id, known in list(self._consumers.items()):
            if known is consumer:
                del self._consumers[request_id]
                self._cancel(request_id)

    def answer(self, future: concurrent.futures.Future[Any], function: Callable[[], Any]) -> None:
        """Call a function for a task that awaits its result."""
        if not future.set_running_or_notify_cancel():
            return
        if self._is_stopping:
            future.set_exception(self._error())
            return
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    def _begin_to_stop(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                try:
                    command = self._inbox.get(block=not self._consumers and not self._llm.has_unfinished())
                except queue.Empty:
                    self._step()
                else:
                    command()
                    del command  # it may be the last that knows the AsyncLLM
            self._cancel_all()
        except BaseException as error:
            self._failure = error
        finally:
            self._close()

    def _step(self) -> None:
        """One step. An exception fails all requests and calls; without any, it ends the thread."""
        self._ids_in_use = False
        try:
            outputs = self._llm.step()
            if self._consumers and not outputs and not self._llm.has_unfinished():
                raise RuntimeError("requests disappeared; do not use the LLM of an AsyncLLM elsewhere")
        except Exception as error:
            if not self._consumers:
                raise
            failed, self._consumers = self._consumers, {}
            for consumer in failed.values():
                consumer.put(_failure(error))
            for request_id in failed:
                self._cancel(request_id)
            return
        self._hand_out(outputs)

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            consumer = self._consumers.get(output.request_id)
            if consumer is None:
                continue
            is_heard = consumer.put(output)
            if output.finished:
                del self._consumers[output.request_id]
            elif not is_heard:
                self.drop(consumer)

    def _cancel(self, request_id: str) -> None:
        self._llm.cancel(request_id)
        self._ids_in_use = True

    def _cancel_all(self) -> None:
        if self._owns_llm:
            self._hand_out(self._llm.shutdown())
            return
        for request_id in self._consumers:
            self._cancel(request_id)
        while self._consumers:
            self._step()

    def _close(self) -> None:
        """Fail all waiting consumers, whatever ended the thread."""
        self._is_stopping = True
        with self._lock:
            self._is_closed = True
        for consumer in self._consumers.values():
            consumer.put(self._error())
        self._consumers = {}
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _error(self) -> RuntimeError:
        if self._failure is not None:
            return _failure(self._failure)
        return RuntimeError("AsyncLLM is shut down; create a new one")


def _failure(cause: BaseException) -> RuntimeError:
    """A separate exception for each receiver: raising an exception extends its traceback."""
    error = RuntimeError(f"the engine failed: {one_line(cause)}")
    error.__cause__ = cause
    return error
