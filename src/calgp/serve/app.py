"""The application: routes, and nothing else. What they share is in `service`, what surrounds them in `middleware`."""

import hmac
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from calgp._version import __version__
from calgp.runs import Classifier
from calgp.serve.limits import Limits
from calgp.serve.metrics import MEDIA
from calgp.serve.middleware import LOOPBACK, RequestMiddleware, problem_response
from calgp.serve.model_info import GalleryResponse, ModelResponse, gallery_response, model_response
from calgp.serve.openapi import PROBLEMS, STREAM, TAKES, complete
from calgp.serve.problems import HTTPProblem
from calgp.serve.schemas import Health, PredictionResponse, PredictQuery, StreamQuery, validation_sentence
from calgp.serve.service import Service

STATIC = Path(__file__).parent / "static"


def create_app(
    classifier: Classifier,
    *,
    limits: Limits = Limits(),
    token: str | None = None,
    hosts: Iterable[str] | None = LOOPBACK,
    threads: int | None = None,
    on_death: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The server of a run, as an ASGI application.

    Args:
        classifier: the run.
        limits: what is accepted at most.
        token: what clients must know; None asks for nothing.
        hosts: names that a request's Host may have; None takes any.
        threads: of torch, for the model.
        on_death: is called when the model's thread has died: the process should end.
    """
    service = Service(classifier, limits, threads, on_death)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    middleware = Middleware(RequestMiddleware, hosts=hosts, limits=limits, metrics=service.metrics)  # type: ignore[arg-type]
    app = FastAPI(
        title="calgp", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, middleware=[middleware],
        description="An image classifier with its uncertainty. Images in, probabilities and their uncertainty out.",
    )  # fmt: skip
    private = [] if token is None else [Depends(_token_check(token))]
    app.include_router(_predictions(service), dependencies=private, responses=PROBLEMS)
    app.include_router(_run(classifier, service), dependencies=private, responses=PROBLEMS)
    app.include_router(_probes(service), responses=PROBLEMS)
    _add_page(app)
    _add_problems(app)
    complete(app, limits)
    return app


def _predictions(service: Service) -> APIRouter:
    async def admit() -> None:
        service.check()

    router = APIRouter(tags=["predict"], dependencies=[Depends(admit)])

    @router.post("/v1/predict", response_model=PredictionResponse, openapi_extra=TAKES)
    async def predict(request: Request, asked: Annotated[PredictQuery, Query()]) -> Response:
        """What images show, and how certain that is."""
        return await service.predict(request, asked)

    @router.post("/v1/predict/stream", response_class=StreamingResponse, responses=STREAM, openapi_extra=TAKES)
    async def stream(request: Request, asked: Annotated[StreamQuery, Query()]) -> Response:
        """The same as lines of JSON, one as often as some samples have come; the last has `done`: true."""
        return await service.stream(request, asked)

    return router


def _run(classifier: Classifier, service: Service) -> APIRouter:
    model = model_response(classifier, service.model, service.limits).model_dump_json()
    gallery = gallery_response(classifier).model_dump_json()
    router = APIRouter()

    @router.get("/v1/model", tags=["model"], response_model=ModelResponse)
    async def get_model() -> Response:
        """The run: method, classes, scores, reliability, and the server's limits."""
        return Response(model, media_type="application/json")

    @router.get("/v1/gallery", tags=["model"], response_model=GalleryResponse)
    async def get_gallery() -> Response:
        """The most and the least certain test images, and the confidently wrong ones."""
        return Response(gallery, media_type="application/json")

    @router.get("/metrics", tags=["operation"], responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus's text format."""
        return Response(service.metrics.exposition(), headers={"Content-Type": MEDIA})

    return router


def _probes(service: Service) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get("/healthz", response_model=Health)
    async def healthz() -> Health:
        """The process lives, and so does the thread of its model."""
        if not service.healthy:
            raise HTTPProblem.busy("The model does not answer.", 5)
        return Health(status="ok")

    @router.get("/readyz", response_model=Health)
    async def readyz() -> Health:
        """The model is loaded and requests are accepted."""
        if not service.ready:
            raise HTTPProblem.busy("The server is starting or shutting down.", 1)
        return Health(status="ok")

    return router


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    mimetypes.add_type("text/javascript", ".js")  # some systems know it by another name
    app.mount("/static", StaticFiles(directory=STATIC))


def _add_problems(app: FastAPI) -> None:
    """Whatever goes wrong is a problem; what nobody expects is one by the middleware."""

    @app.exception_handler(HTTPProblem)
    async def on_problem(_: Request, error: HTTPProblem) -> Response:
        return problem_response(error.status, error.detail, error.headers)

    @app.exception_handler(HTTPException)
    async def on_http(_: Request, error: HTTPException) -> Response:
        detail = f"{error.detail}: /openapi.json describes what there is."
        return problem_response(error.status_code, detail, error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        return problem_response(422, validation_sentence(error.errors()))


_BEARER = HTTPBearer(scheme_name="token", auto_error=False)


def _token_check(token: str) -> Callable[..., Awaitable[None]]:
    """A dependency that lets through who sends the token."""

    async def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        if given is None or not hmac.compare_digest(given.credentials.strip().encode(), token.encode()):
            wanted = {"WWW-Authenticate": "Bearer"}
            raise HTTPProblem(401, "A token is needed: send it as Authorization: Bearer TOKEN.", wanted)

    return check
