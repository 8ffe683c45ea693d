"""One thread owns the model. Requests wait in a queue; those that go together are computed together."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from calgp.gp import Model, Predictive, Sampling, evaluating, sample_cost, settled
from calgp.gp.inference import MEMORY
from calgp.runs.evaluation import Predictor, on_cpu
from calgp.serve.limits import Limits

LOOK = 8  # samples between two looks at whether the label is settled: fixed, so that company changes no answer
LOG = logging.getLogger("calgp.serve")


class Refused(Exception):
    """A job cannot be taken on; `retry` is when to try again, in seconds."""

    def __init__(self, reason: str, retry: float) -> None:
        super().__init__(reason)
        self.reason, self.retry = reason, retry


@dataclass(frozen=True)
class Answer:
    """What is known of one image so far: plain numbers."""

    index: int  # of the most probable class
    probabilities: list[float]
    spread: list[float]
    monte_carlo_error: list[float]
    entropy: float
    aleatoric: float
    epistemic: float
    samples: int
    settled: bool | None  # whether sampling stopped because the label was; None if that was not asked for
    conformal_set: list[int] | None
    abstain: bool | None


@dataclass(frozen=True)
class Progress:
    """What a job hears: at the end, and if it has a `step` at every step before."""

    answers: list[Answer]
    draws: list[list[list[float]]] | None  # of each image, the probabilities by each sample since the last step
    samples: int  # drawn so far, of the images that are not settled yet
    done: bool


@dataclass(eq=False)
class Job:
    """Images of one request. Row i of the images has the masks of row i, as files have in `calgp predict`."""

    pictures: Tensor  # uint8 [N, C, H, W]
    samples: int
    seed: int
    deadline: float  # of time.monotonic
    tell: Callable[[Progress | Exception], None]  # called by the thread that owns the model
    error: float | None = None  # stop when the label is settled but for this probability
    step: int | None = None  # samples between two reports
    cancelled: bool = False
    answers: list[Any] = field(default_factory=list)  # of each image, the latest
    reported: int = 0  # samples at the last report

    def __len__(self) -> int:
        return len(self.pictures)


def model_cost(model: Model, shape: tuple[int, int, int]) -> tuple[int, bool]:
    """Bytes that a sample of an image [C, H, W] takes, and whether samples differ; it warms the model up, too."""
    with evaluating(model), torch.inference_mode():
        return sample_cost(model, model.stem(next(model.parameters()).new_zeros(1, *shape)))


class Worker:
    """The thread that owns the model, and its queue.

    Jobs of one seed are computed together, as many as fit: images × samples bounded by memory, so that a turn is short.
    A job that needs several turns takes them in alternation with new ones: nobody waits for the longest.

    Args:
        predictor: the model, its calibrator and its decisions.
        cost: of its samples (`model_cost`).
        limits: `queue`, `batch` and `wait` are used here.
        observe: hears (images, samples, seconds) of every turn.
        threads: of torch, for this thread; None leaves them.
    """

    def __init__(
        self,
        predictor: Predictor,
        cost: tuple[int, bool],
        limits: Limits,
        *,
        observe: Callable[[int, int, float], None] = lambda images, samples, seconds: None,
        threads: int | None = None,
    ) -> None:
        self._predictor, self._limits, self._observe = predictor, limits, observe
        self._model = predictor.model.eval()
        self._like = next(self._model.parameters())
        self._waiting: deque[Job] = deque()
        self._running: deque[_Batch] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._open_images = 0  # accepted and not yet answered
        self._open_work = 0  # their samples
        self._pace = 0.0  # seconds a sample of an image, smoothed
        one, self.random = cost
        self.fit = max(MEMORY[self._like.device.type == "cpu"] // one, 1)  # samples of images that a turn may draw
        self._thread = threading.Thread(target=self._work, args=(threads,), name="calgp-model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether jobs are taken."""
        return self._thread.is_alive() and not self._closing

    @property
    def queued(self) -> int:
        """Images accepted and not yet answered."""
        return self._open_images

    @property
    def backlog(self) -> float:
        """Seconds that what is accepted will take, about."""
        return self._open_work * self._pace

    def check(self, images: int = 1) -> None:
        """Refuse `images` more that would wait in vain."""
        if self._closing:
            raise Refused("The server is shutting down.", 5)
        if self._open_images + images > self._limits.queue and self._open_images:
            raise Refused(f"{self._open_images} images are waiting, more than can be taken on.", self.backlog)
        if self.backlog > self._limits.seconds:
            raise Refused("What is waiting already takes longer than a request may.", self.backlog)

    def submit(self, job: Job) -> None:
        """Queue a job, or refuse it at once."""
        job.samples = job.samples if self.random else 1
        job.answers = [None] * len(job)
        with self._changed:
            self.check(len(job))
            self._open_images += len(job)
            self._open_work += len(job) * job.samples
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Take nothing more, finish what was accepted, end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)  # of this thread: OpenMP has a number for each
        while (jobs := self._next()) is not None:
            if jobs:
                self._turn(_Batch(jobs))
            if self._running:
                self._turn(self._running.popleft())

    def _next(self) -> list[Job] | None:
        """Waiting jobs that go together; none if there are only running ones; None at the end."""
        with self._changed:
            while not self._waiting and not self._running and not self._closing:
                self._changed.wait()
            if not self._waiting:
                return [] if self._running else None
            if not self._running and not self._closing and self._limits.wait and self._room(self._waiting) > 0:
                self._changed.wait_for(lambda: self._closing or self._room(self._waiting) <= 0, self._limits.wait)
            first = self._waiting.popleft()
            jobs, rest = [first], deque[Job]()
            images, most = len(first), first.samples
            for job in self._waiting:
                more, longest = images + len(job), max(most, job.samples)
                if job.seed == first.seed and more <= min(self._limits.batch, self.fit // longest):
                    images, most = more, longest
                    jobs.append(job)
                else:
                    rest.append(job)
            self._waiting = rest
            return jobs

    def _room(self, jobs: deque[Job] | list[Job]) -> int:
        """How many images could join these: less than none if they are too many already."""
        images = sum(len(job) for job in jobs)
        fitting = self.fit // max((job.samples for job in jobs), default=1)
        return min(self._limits.batch, fitting) - images

    def _turn(self, batch: _Batch) -> None:
        """Some more samples of a batch; what is not finished then waits for its next turn."""
        try:
            batch.expire()
            if batch.owners:
                start = time.perf_counter()
                images, samples = len(batch.owners), batch.draw(self._model, self._like, self.fit)
                batch.report(self._answers)
                seconds = time.perf_counter() - start
                pace = seconds / (images * samples)
                self._pace = 0.9 * self._pace + 0.1 * pace if self._pace else pace
                self._observe(images, samples, seconds)
        except Exception as error:  # the jobs hear of it; the thread lives on
            LOG.exception("A batch failed")
            batch.fail(error)
        left, batch.left = batch.left, []
        with self._changed:
            self._open_images -= sum(len(job) for job, _ in left)
            self._open_work -= sum(len(job) * job.samples for job, _ in left)
        for job, last in left:  # when their places are free, so that who hears may ask again
            job.tell(last)
        if batch.owners:
            self._running.append(batch)

    def _answers(self, part: Predictive, pictures: Tensor, sure: list[bool | None], samples: int) -> list[Answer]:
        """The predictive as plain numbers, calibrated and decided upon as the run says."""
        part = on_cpu(part)
        if self._predictor.calibrator is not None:
            part = part.calibrated(self._predictor.calibrator.apply(part.log_probs))
        decided, none = self._predictor.decided(part, pictures), [None] * len(sure)
        sets = [row.nonzero().flatten().tolist() for row in decided["sets"]] if "sets" in decided else none
        abstains = decided["abstained"].tolist() if "abstained" in decided else none
        columns = (
            part.labels, part.probs, part.spread, part.monte_carlo_error, part.entropy, part.expected_entropy,
            part.mutual_information,
        )  # fmt: skip
        counts = [samples] * len(sure)
        rows = zip(*(column.tolist() for column in columns), counts, sure, sets, abstains, strict=True)
        return [Answer(*row) for row in rows]


class _Batch:
    """Jobs of one seed that have had the same samples so far; rows leave it when they are finished."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.owners = [(job, row) for job in jobs for row in range(len(job))]
        self.left: list[tuple[Job, Progress | Exception]] = []  # jobs that are over, and what they are to hear
        self._pictures = torch.cat([job.pictures for job in jobs])
        self._sampling: Sampling | None = None
        self._keeps = any(job.error is not None or job.step is not None for job in jobs)
        self._drawn: Tensor | None = None  # probabilities by the samples so far, if somebody wants them

    def draw(self, model: Model, like: Tensor, fit: int) -> int:
        """As many samples as fit, but none beyond where a job ends, looks or reports; says how many."""
        if self._sampling is None:
            x = (self._pictures.float() / 255).to(like)
            rows = torch.tensor([row for _, row in self.owners], device=like.device)
            self._sampling = Sampling(model, x, rows, seed=self.jobs[0].seed)
        drawn = self._sampling.drawn
        ends = [drawn + max(fit // len(self.owners), 1)]
        for job in self.jobs:
            steps = [job.samples, LOOK if job.error is not None else None, job.step]
            ends += [drawn - drawn % step + step for step in steps if step is not None]
        count = min(ends) - drawn
        probs = self._sampling.draw(count)
        if self._keeps:
            self._drawn = probs.cpu() if self._drawn is None else torch.cat([self._drawn, probs.cpu()])
        return count

    def report(self, answers: Callable[[Predictive, Tensor, list[bool | None], int], list[Answer]]) -> None:
        """Answer the rows that are finished, tell the jobs that wait for it, go on with the rest."""
        assert self._sampling is not None  # noqa: S101 (for the type checker)
        drawn = self._sampling.drawn
        sure = self._settled(drawn)
        finished = [bool(now) or drawn >= job.samples for (job, _), now in zip(self.owners, sure, strict=True)]
        reporting = {job for job in self.jobs if job.step is not None and drawn % job.step == 0}
        if not any(finished) and not reporting:
            return
        told = answers(self._sampling.predictive(), self._pictures, sure, drawn)
        for (job, row), answer in zip(self.owners, told, strict=True):
            job.answers[row] = answer
        open_jobs = {job for (job, _), done in zip(self.owners, finished, strict=True) if not done}
        for job in list(self.jobs):
            if job not in open_jobs:
                self._leave(job, Progress(job.answers, self._draws(job), drawn, True))
            elif job in reporting:
                job.tell(Progress(list(job.answers), self._draws(job), drawn, False))
                job.reported = drawn
        self._keep([place for place, done in enumerate(finished) if not done])

    def expire(self) -> None:
        """Let go of jobs that nobody waits for any more."""
        now = time.monotonic()
        for job in [job for job in self.jobs if job.cancelled or now > job.deadline]:
            self._leave(job, TimeoutError())
        alive = set(self.jobs)
        self._keep([place for place, (job, _) in enumerate(self.owners) if job in alive])

    def fail(self, error: Exception) -> None:
        for job in list(self.jobs):
            self._leave(job, error)
        self.owners = []

    def _settled(self, drawn: int) -> list[bool | None]:
        """Of each row whether its label is settled; None where that was not asked for."""
        looking = {job for job in self.jobs if drawn % LOOK == 0 or drawn >= job.samples}
        errors = {job.error for job in looking if job.error is not None}
        found = {error: self._is_settled(error) for error in errors}
        return [
            None if job.error is None else job in looking and found[job.error][place]
            for place, (job, _) in enumerate(self.owners)
        ]

    def _is_settled(self, error: float) -> list[bool]:
        assert self._drawn is not None  # noqa: S101 (for the type checker)
        return settled(self._drawn, error).tolist()

    def _draws(self, job: Job) -> list[list[list[float]]] | None:
        """What the samples since the last report gave for each image of a job; nothing for one finished before."""
        if job.step is None or self._drawn is None:
            return None
        draws: list[list[list[float]]] = [[] for _ in range(len(job))]
        for place, (owner, row) in enumerate(self.owners):
            if owner is job:
                draws[row] = self._drawn[job.reported :, place].tolist()
        return draws

    def _leave(self, job: Job, last: Progress | Exception) -> None:
        self.jobs.remove(job)
        self.left.append((job, last))

    def _keep(self, places: list[int]) -> None:
        if len(places) == len(self.owners):
            return
        index = torch.tensor(places, dtype=torch.int64)
        self.owners = [self.owners[place] for place in places]
        self._pictures = self._pictures[index]
        self._drawn = None if self._drawn is None else self._drawn[:, index]
        if self._sampling is not None:
            self._sampling.keep(index.to(self._sampling.rows.device))
