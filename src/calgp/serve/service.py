"""What the routes share: uploads become jobs, jobs become responses."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from calgp.runs import Classifier
from calgp.serve.batching import Job, Progress, Worker
from calgp.serve.limits import Limits
from calgp.serve.metrics import Metrics
from calgp.serve.middleware import problem_response
from calgp.serve.model import ServedModel
from calgp.serve.problems import HTTPProblem
from calgp.serve.schemas import PredictionResponse, PredictQuery, StreamLine, StreamQuery
from calgp.serve.uploads import Uploads

Reports = asyncio.Queue[Progress | Exception]


class Service:
    """A run that is served: its model, the thread that computes, the processes that decode. Arguments: `create_app`."""

    def __init__(
        self, classifier: Classifier, limits: Limits, threads: int | None, on_death: Callable[[], None]
    ) -> None:
        self.limits, self.metrics, self.model = limits, Metrics(), ServedModel(classifier)
        self._threads, self._on_death = threads, on_death
        self._uploads = Uploads(self.model.size, self.model.colour, limits)
        self._worker: Worker | None = None

    @property
    def healthy(self) -> bool:
        """Whether the process does what it is for, or will once it has started."""
        return self._worker is None or self._worker.healthy

    @property
    def ready(self) -> bool:
        return self._worker is not None and self._worker.ready

    async def start(self) -> None:
        await self._uploads.decoders.start()
        observe, on_death = self.metrics.observe_turn, self._on_death
        self._worker = Worker(self.model, self.limits, observe=observe, on_death=on_death, threads=self._threads)
        self.metrics.queue.set_function(lambda: 0 if self._worker is None else self._worker.queued)

    async def stop(self) -> None:
        if self._worker is not None:
            await asyncio.to_thread(self._worker.close)
        await self._uploads.decoders.stop()

    def check(self) -> None:
        """Refuse a request, before anything of it is read, if not even one more image can be accepted."""
        self._running.check()

    async def predict(self, request: Request, asked: PredictQuery) -> Response:
        """One answer, when all samples are there."""
        reports: Reports = asyncio.Queue()
        job = await self._submit(request, reports, asked)
        try:
            last = await _unless_gone(request, self._next(job, reports))
        finally:
            self._running.cancel(job)
        self.metrics.observe_answers(last.answers)
        found = PredictionResponse.model_construct(
            classes=self.model.classes, seed=asked.seed, predictions=last.answers
        )
        return Response(found.model_dump_json(), media_type="application/json")

    async def stream(self, request: Request, asked: StreamQuery) -> Response:
        """Lines of JSON while samples arrive."""
        reports: Reports = asyncio.Queue()
        step = asked.every or max(asked.samples // 25, 1)
        job = await self._submit(request, reports, asked, step=step, draws=asked.draws)
        return _JobResponse(self._lines(job, reports), lambda: self._running.cancel(job))

    async def _submit(
        self, request: Request, reports: Reports, asked: PredictQuery, *, step: int | None = None, draws: bool = False
    ) -> Job:
        """Read a request's images and queue them; what becomes of them arrives in `reports`."""
        if asked.samples > self.limits.samples:
            raise HTTPProblem(422, f"Invalid samples: must be at most {self.limits.samples}.")
        deadline, loop = time.monotonic() + self.limits.seconds, asyncio.get_running_loop()
        images = await self._uploads.read(request)
        numbers = len(images) * asked.samples * len(self.model.classes)
        if draws and self.model.random and numbers > self.limits.draws:
            most = self.limits.draws
            raise HTTPProblem(
                422, f"Invalid draws=true: images × samples × classes must be at most {most}, not {numbers}."
            )

        def send(report: Progress | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it all who waited
                loop.call_soon_threadsafe(reports.put_nowait, report)

        job = Job(images, asked.samples, asked.seed, deadline, send, asked.error, step, draws)
        self._running.submit(job)
        return job

    async def _next(self, job: Job, reports: Reports) -> Progress:
        """The next report on a job, or the problem that it has become."""
        report: Progress | Exception = TimeoutError()
        with anyio.move_on_after(job.deadline - time.monotonic()):
            report = await reports.get()
        if isinstance(report, Progress):
            return report
        if isinstance(report, TimeoutError):
            late = f"The answer was not ready within {self.limits.seconds:g} seconds."
            raise HTTPProblem.busy(late, self._running.backlog)
        if isinstance(report, HTTPProblem):
            raise report
        raise HTTPProblem(500, "The server has failed; its log says more.")

    async def _lines(self, job: Job, reports: Reports) -> AsyncIterator[str]:
        """The reports on a job; if it fails on the way, the last line is the problem."""
        done = False
        while not done:
            try:
                report = await self._next(job, reports)
            except HTTPProblem as problem:
                yield bytes(problem_response(problem.status, problem.detail).body).decode() + "\n"
                return
            done = report.done
            if done:
                self.metrics.observe_answers(report.answers)
            draws = report.draws and [each.double().round(decimals=7).tolist() for each in report.draws]  # as float32
            line = StreamLine.model_construct(
                done=done, samples=report.samples, total=job.samples, classes=self.model.classes, seed=job.seed,
                predictions=report.answers, draws=draws,
            )  # fmt: skip
            yield line.model_dump_json() + "\n"
            job.taken += 1

    @property
    def _running(self) -> Worker:
        if self._worker is None:
            raise HTTPProblem.busy("The server is starting.", 1)
        return self._worker


class _JobResponse(StreamingResponse):
    """A stream that ends its job when it ends, however it does."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: AsyncIterator[str], cancel: Callable[[], None]) -> None:
        super().__init__(lines)
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


async def _unless_gone(request: Request, waiting: Coroutine[Any, Any, Progress]) -> Progress:
    """What is waited for, unless the client leaves before: then nobody does."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = asyncio.create_task(waiting), asyncio.create_task(leave())
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()
