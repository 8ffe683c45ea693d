"""The application: routes, and nothing else. What a request brings is read here, computed in `batching`."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from lightning_fabric import Fabric
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response, StreamingResponse
from torch import Tensor

from calgp._version import __version__
from calgp.errors import CalgpError
from calgp.gp import mixes_rows
from calgp.runs import RunFolder
from calgp.runs.evaluation import Predictor, colour_of, one_device
from calgp.serve.batching import Answer, Job, Progress, Refused, Worker, model_cost
from calgp.serve.document import PROBLEMS, STREAM, TAKES, complete
from calgp.serve.guard import LOOPBACK, Guard
from calgp.serve.limits import Limits
from calgp.serve.meters import MEDIA, Meters
from calgp.serve.pictures import read_pictures, validation_sentence
from calgp.serve.problems import Trouble, problem
from calgp.serve.schemas import Answered, GalleryTold, Health, ModelTold, Prediction, Step
from calgp.serve.site import static_files
from calgp.serve.told import gallery_of, model_of

SAMPLES = 50  # unless asked for otherwise, as in `calgp predict`


# what a request may ask for; `limits.samples` is checked in `accept` and told by `document`
Samples = Annotated[int, Query(ge=1, description="S: draws of the masks to average over.")]
Seed = Annotated[int, Query(ge=0, lt=2**63, description="Of the masks: the same seed gives the same answer.")]
Error = Annotated[
    float | None, Query(gt=0, lt=1, description="Stop as soon as the label is settled but for this probability.")
]
Every = Annotated[int | None, Query(ge=1, description="Samples between two lines; samples / 25 unless given.")]
Draws = Annotated[bool, Query(description="Also the probabilities by each single sample.")]


def create_app(
    folder: RunFolder,
    fabric: Fabric | None = None,
    *,
    limits: Limits = Limits(),
    token: str | None = None,
    hosts: Iterable[str] | None = LOOPBACK,
    threads: int | None = None,
) -> FastAPI:
    """The server of a run, as an ASGI application.

    Args:
        folder: the run.
        fabric: where it is computed.
        limits: what is taken on at most.
        token: what clients must know; None asks for nothing.
        hosts: names that a request's Host may have; None takes any.
        threads: of torch, for the model.
    """
    server = _Server(folder, one_device(fabric), limits, threads)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.start()
        try:
            yield
        finally:
            await asyncio.to_thread(server.stop)

    guard = Middleware(Guard, hosts=hosts, token=token, limits=limits, meters=server.meters, admit=server.check)  # type: ignore[arg-type]
    app = FastAPI(
        title="calgp", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, middleware=[guard],
        description="An image classifier with its doubts. Pictures in, probabilities and their uncertainty out.",
    )  # fmt: skip

    @app.post("/v1/predict", response_model=Answered, responses=PROBLEMS, openapi_extra=TAKES, tags=["predict"])
    async def predict(request: Request, samples: Samples = SAMPLES, seed: Seed = 0, error: Error = None) -> Response:
        """What pictures show, and how sure that is. Picture i of a request has the masks of row i."""
        done: asyncio.Future[Progress] = asyncio.get_running_loop().create_future()

        def settle(told: Progress | Exception) -> None:
            if not done.done():
                done.set_exception(told) if isinstance(told, Exception) else done.set_result(told)

        job = await server.accept(request, samples, seed, error, None, settle)
        answers = (await server.in_time(done, job)).answers
        server.meters.answered(answers)
        told = Answered.model_construct(classes=server.classes, seed=seed, predictions=server.predictions(answers))
        return Response(told.model_dump_json(), media_type="application/json")

    @app.post("/v1/predict/stream", response_class=StreamingResponse, responses=PROBLEMS | STREAM, openapi_extra=TAKES,
              tags=["predict"])  # fmt: skip
    async def stream(
        request: Request, samples: Samples = SAMPLES, seed: Seed = 0, error: Error = None, every: Every = None,
        draws: Draws = False,
    ) -> Response:  # fmt: skip
        """The same as lines of JSON, one as often as some samples have come; the last has `done`: true."""
        heard: asyncio.Queue[Progress | Exception] = asyncio.Queue()
        job = await server.accept(request, samples, seed, error, every or max(samples // 25, 1), heard.put_nowait)
        return StreamingResponse(server.lines(job, heard, seed, draws), media_type="application/x-ndjson")

    @app.get("/v1/model", response_model=ModelTold, responses=PROBLEMS, tags=["model"])
    async def model() -> Response:
        """The run: method, classes, scores, reliability, and what the server takes."""
        return Response(server.model_told, media_type="application/json")

    @app.get("/v1/gallery", response_model=GalleryTold, responses=PROBLEMS, tags=["model"])
    async def gallery() -> Response:
        """The most and the least certain test images, and the confidently wrong ones."""
        return Response(server.gallery_told, media_type="application/json")

    @app.get("/healthz", response_model=Health, responses=PROBLEMS, tags=["operation"])
    async def healthz() -> Health:
        """The process lives."""
        return Health(status="ok")

    @app.get("/readyz", response_model=Health, responses=PROBLEMS, tags=["operation"])
    async def readyz() -> Health:
        """The model is loaded and takes requests."""
        if not server.ready:
            raise Trouble.busy("The server is starting or shutting down.", 1)
        return Health(status="ok")

    @app.get("/metrics", responses=PROBLEMS | {200: {"content": {"text/plain": {}}}}, tags=["operation"])
    async def metrics() -> Response:
        """Prometheus's text format."""
        return Response(server.meters.told(), headers={"Content-Type": MEDIA})

    for path, file in static_files().items():
        app.add_api_route(path, _giving(file), methods=["GET"], include_in_schema=False)

    @app.exception_handler(Trouble)
    async def on_trouble(_: Request, error: Trouble) -> Response:
        return problem(error.status, error.detail, error.headers)

    @app.exception_handler(HTTPException)
    async def on_http(_: Request, error: HTTPException) -> Response:
        return problem(error.status_code, f"{error.detail}: see /openapi.json for what there is.", error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        return problem(422, validation_sentence(error.errors()))

    @app.exception_handler(Exception)
    async def on_error(_: Request, error: Exception) -> Response:
        return problem(500, "The server has failed; its log says more.")

    complete(app, limits, secured=token is not None)
    return app


class _Server:
    """What the routes share: the worker, the meters, and a thread that decodes pictures."""

    def __init__(self, folder: RunFolder, fabric: Fabric, limits: Limits, threads: int | None) -> None:
        card = folder.card()
        self.limits, self.threads = limits, threads
        self.classes = list(card.classes)
        self._form = (card.task.height, card.task.width), colour_of(card.task)
        self.meters = Meters()
        self._predictor = Predictor.of(folder, fabric, folder.calibration())
        if mixes_rows(self._predictor.model):
            raise CalgpError(
                f"{folder.path} normalises by the moments of the batch (batch_moments): its prediction of an image "
                "depends on the images of other requests. Train it with backbone.batch_moments=false to serve it."
            )
        self._model_cost = model_cost(self._predictor.model, (card.task.channels, card.task.height, card.task.width))
        told = model_of(folder, self._predictor, limits, random=self._model_cost[1], samples=SAMPLES)
        self.model_told = told.model_dump_json()
        self.gallery_told = gallery_of(folder).model_dump_json()
        self._worker: Worker | None = None
        self._decoder: ThreadPoolExecutor | None = None

    @property
    def ready(self) -> bool:
        return self._worker is not None and self._worker.alive

    def start(self) -> None:
        self._worker = Worker(
            self._predictor,
            self._model_cost,
            self.limits,
            observe=self.meters.turned,
            threads=self.threads,
        )
        # one thread: a large picture is decoded after another, so that a few of them do not fill the memory
        self._decoder = ThreadPoolExecutor(1, "calgp-pictures")
        self.meters.watch_queue(lambda: 0 if self._worker is None else self._worker.queued)

    def stop(self) -> None:
        if self._worker is not None and self._decoder is not None:
            self._decoder.shutdown()
            self._worker.close()

    async def accept(
        self, request: Request, samples: int, seed: int, error: float | None, step: int | None, hear: Any
    ) -> Job:
        """Read a request's pictures and queue them; `hear` is called in the event loop with what becomes of them."""
        if self._worker is None or self._decoder is None:
            raise Trouble.busy("The server is starting.", 1)
        if samples > self.limits.samples:
            raise Trouble(422, f"samples may be {self.limits.samples:,} at most, not {samples:,}.")
        deadline = time.monotonic() + self.limits.seconds
        loop = asyncio.get_running_loop()
        try:
            with anyio.fail_after(self.limits.seconds):
                body = await _body(request, self.limits.body)
                kind = request.headers.get("content-type", "")
                pictures = await loop.run_in_executor(self._decoder, self._read, body, kind)
            job = Job(pictures, samples, seed, deadline, lambda told: _call(loop, hear, told), error=error, step=step)
            self._worker.submit(job)
        except Refused as refused:
            raise Trouble.busy(refused.reason, refused.retry) from None
        except TimeoutError:
            raise self.late() from None
        return job

    def _read(self, body: bytes, kind: str) -> Tensor:
        size, colour = self._form
        return read_pictures(body, kind, size=size, colour=colour, limits=self.limits)

    def check(self) -> None:
        """Whether one more image can be taken on: asked before anything of a request is read."""
        try:
            if self._worker is not None:
                self._worker.check()
        except Refused as refused:
            raise Trouble.busy(refused.reason, refused.retry) from None

    async def in_time(self, done: asyncio.Future[Progress], job: Job) -> Progress:
        try:
            return await done
        except TimeoutError:
            raise self.late() from None
        finally:
            job.cancelled = True

    async def lines(
        self, job: Job, heard: asyncio.Queue[Progress | Exception], seed: int, draws: bool
    ) -> AsyncIterator[str]:
        """What a job hears, as lines of JSON; if it fails on the way, the last line is the problem."""
        try:
            done = False
            while not done:
                told = await heard.get()
                if isinstance(told, Exception):
                    trouble = self.late() if isinstance(told, TimeoutError) else Trouble(500, "The server has failed.")
                    yield bytes(problem(trouble.status, trouble.detail).body).decode() + "\n"
                    return
                done = told.done
                if done:
                    self.meters.answered(told.answers)
                step = Step.model_construct(
                    done=done, samples=told.samples, total=job.samples, classes=self.classes, seed=seed,
                    predictions=self.predictions(told.answers), draws=told.draws if draws else None,
                )  # fmt: skip
                yield step.model_dump_json() + "\n"
        finally:
            job.cancelled = True

    def predictions(self, answers: list[Answer]) -> list[Prediction]:
        return [self._prediction(answer) for answer in answers]

    def _prediction(self, answer: Answer) -> Prediction:
        told = dict(vars(answer), label=self.classes[answer.index], confidence=answer.probabilities[answer.index])
        if answer.conformal_set is not None:
            told["conformal_set"] = [self.classes[q] for q in answer.conformal_set]
        return Prediction.model_construct(**told)

    def late(self) -> Trouble:
        backlog = 1.0 if self._worker is None else self._worker.backlog
        return Trouble.busy(f"The answer was not ready within {self.limits.seconds:g} seconds.", backlog)


def _call(loop: asyncio.AbstractEventLoop, hear: Any, told: Progress | Exception) -> None:
    """From the model's thread into the event loop, if it still runs."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(hear, told)


async def _body(request: Request, most: int) -> bytes:
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > most:
            raise Trouble(413, f"A request may have {most:,} bytes.", {"Connection": "close"})
    return bytes(found)


def _giving(file: tuple[bytes, str]) -> Any:
    content, media = file

    async def give() -> Response:
        return Response(content, media_type=media, headers={"Cache-Control": "no-cache"})

    return give
