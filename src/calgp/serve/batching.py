"""One thread owns the model. Requests wait in a queue; images of several requests are computed together."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from calgp.gp import Sampling, label_is_decided
from calgp.runs.prediction import OneShot
from calgp.serve.limits import Limits
from calgp.serve.model import ServedModel
from calgp.serve.problems import HTTPProblem
from calgp.serve.schemas import Prediction

CHECK_EVERY = 8  # samples between two checks of whether a label is decided: fixed, whatever else is in the batch
MOST_UNREAD = 4  # reports that a client has not taken yet; until it does, it gets no more
KEPT = 2**24  # numbers of single samples that open jobs may keep, all together: 64 MB
JOIN = 5.0  # seconds that a closing server waits for the thread, once its jobs are over
LOG = logging.getLogger("calgp.serve")


@dataclass(frozen=True)
class Progress:
    """What a job is sent: at its end, and if it has a `step`, at every step before."""

    answers: list[Prediction]
    draws: list[Tensor] | None  # for each image the probabilities of each sample since the last report, [S, Q]
    samples: int  # drawn so far, for the images that are not finished yet
    done: bool


@dataclass(eq=False)
class Job:
    """Images of one request."""

    images: Tensor  # uint8 [N, C, H, W]
    samples: int
    seed: int
    deadline: float  # of time.monotonic
    send: Callable[[Progress | Exception], None]  # called by the thread that owns the model
    error: float | None = None  # stop when the label is decided but for this probability
    step: int | None = None  # samples between two reports
    draws: bool = False  # whether reports have the probabilities of single samples
    cancelled: bool = False
    answers: list[Any] = field(default_factory=list)  # of each image, the latest
    reported: int = 0  # samples at the last report
    sent: int = 0  # reports; written by the model's thread only
    taken: int = 0  # of them, by the client; written by the event loop only

    def __len__(self) -> int:
        return len(self.images)

    @property
    def keeps(self) -> bool:
        """Whether single samples are needed again."""
        return self.draws or self.error is not None


class Worker:
    """The thread that owns the model, and its queue.

    Jobs of one seed are computed together, as many as fit: images × samples are bounded by memory, so that a turn is
    short. A job that needs several turns takes them in alternation with new ones, so that nobody waits for the longest.

    Args:
        model: what predicts.
        limits: `queue`, `batch`, `seconds` and `wait` are used here.
        observe: is called with (images, samples, seconds) of every turn.
        on_death: is called, in the thread, when it ends by anything but `close`.
        threads: of torch, for this thread; None leaves them.
    """

    def __init__(
        self,
        model: ServedModel,
        limits: Limits,
        *,
        observe: Callable[[int, int, float], None],
        on_death: Callable[[], None],
        threads: int | None = None,
    ) -> None:
        self._model, self._limits, self._observe, self._on_death = model, limits, observe, on_death
        self.fit = model.fit
        self._waiting: deque[Job] = deque()
        self._running: deque[_Batch] = deque()
        self._open: set[Job] = set()  # accepted and not yet answered
        self._changed = threading.Condition()
        self._closing = self._dead = False
        self._turn_began: float | None = None
        self._open_images = self._open_work = self._open_kept = 0  # of `_open`: images, samples, numbers kept
        self._pace = 0.0  # seconds a sample of an image, smoothed
        self._thread = threading.Thread(target=self._run, args=(threads,), name="calgp-model", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether jobs are accepted."""
        return self.healthy and not self._closing

    @property
    def healthy(self) -> bool:
        """Whether the thread lives, and its turn has not taken longer than a request may."""
        began = self._turn_began
        return not self._dead and (began is None or time.monotonic() - began < self._limits.seconds)

    @property
    def queued(self) -> int:
        """Images accepted and not yet answered."""
        return self._open_images

    @property
    def backlog(self) -> float:
        """Seconds that what is accepted will take, about."""
        return self._open_work * self._pace

    def check(self, images: int = 1, kept: int = 0) -> None:
        """Refuse (503) `images` more that would wait in vain, or `kept` more numbers than memory is for."""
        if self._dead:
            raise HTTPProblem.busy("The model has failed, and the server is ending.", 5)
        if self._closing:
            raise HTTPProblem.busy("The server is shutting down.", 5)
        if self._open_images and self._open_images + images > self._limits.queue:
            raise HTTPProblem.busy(f"{self._open_images} images are waiting, as many as are accepted.", self.backlog)
        if kept and self._open_kept and self._open_kept + kept > KEPT:
            raise HTTPProblem.busy("Other requests keep as many samples as there is memory for.", self.backlog)
        if self.backlog > self._limits.seconds:
            raise HTTPProblem.busy("What is waiting already takes longer than a request may.", self.backlog)

    def submit(self, job: Job) -> None:
        """Queue a job, or refuse it at once."""
        if not self._model.random:
            job.samples, job.error = 1, None
        job.answers = [None] * len(job)
        with self._changed:
            self.check(len(job), self._kept(job))
            self._open.add(job)
            self._count(job, 1)
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nobody waits for this job any more: its place is free at once, its memory after the turn at hand."""
        job.cancelled = True
        with self._changed:
            self._release(job)
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self) -> None:
        """Accept nothing more, finish what was accepted within its deadlines, end the thread."""
        with self._changed:
            self._closing = True
            last = max((job.deadline for job in self._open), default=0.0)
            self._changed.notify()
        self._thread.join(max(last - time.monotonic(), 0) + JOIN)
        if self._thread.is_alive():
            LOG.critical("The model's thread does not end; it is left to itself")

    def _count(self, job: Job, sign: int) -> None:
        self._open_images += sign * len(job)
        self._open_work += sign * len(job) * job.samples
        self._open_kept += sign * self._kept(job)

    def _kept(self, job: Job) -> int:
        return len(job) * job.samples * len(self._model.classes) if job.keeps else 0

    def _release(self, job: Job) -> None:
        """Free a job's place; called with the lock held."""
        if job in self._open:
            self._open.remove(job)
            self._count(job, -1)

    def _run(self, threads: int | None) -> None:
        try:
            if threads is not None:
                torch.set_num_threads(threads)  # of this thread: OpenMP has a number for each
            while (jobs := self._next()) is not None:
                if jobs:
                    self._turn(_Batch(jobs, self._model))
                if self._running:
                    self._turn(self._running.popleft())
        except BaseException:  # whatever it was: nobody may wait for a thread that is gone
            LOG.critical("The model's thread died; the server cannot go on", exc_info=True)
            self._die()

    def _die(self) -> None:
        with self._changed:
            self._dead, jobs = True, list(self._open)
            for job in jobs:
                self._release(job)
        for job in jobs:
            job.send(HTTPProblem.busy("The model has failed, and the server is ending.", 5))
        self._on_death()

    def _next(self) -> list[Job] | None:
        """Waiting jobs that go together; none if there are only running ones; None at the end."""
        with self._changed:
            while not self._waiting and not self._running and not self._closing:
                self._changed.wait()
            if not self._waiting:
                return [] if self._running else None
            if not self._running and not self._closing and self._limits.wait and self._room() > 0:
                self._changed.wait_for(lambda: self._closing or self._room() <= 0, self._limits.wait)
            if not self._waiting:  # they have been cancelled meanwhile
                return []
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

    def _room(self) -> int:
        """How many images could join those that wait: less than none if they are too many already."""
        images = sum(len(job) for job in self._waiting)
        fitting = self.fit // max((job.samples for job in self._waiting), default=1)
        return min(self._limits.batch, fitting) - images

    def _turn(self, batch: "_Batch") -> None:
        """Some more samples of a batch; what is not finished then waits for its next turn."""
        self._turn_began = start = time.monotonic()
        try:
            batch.expire()
            if batch.owners:
                images, samples = len(batch.owners), batch.draw(self.fit)
                batch.report()
                seconds = time.monotonic() - start
                pace = seconds / (images * samples)
                self._pace = 0.9 * self._pace + 0.1 * pace if self._pace else pace
                self._observe(images, samples, seconds)
        except Exception as error:  # these jobs fail; the thread lives on
            LOG.exception("A batch failed")
            batch.fail(error)
        self._turn_began = None
        finished, batch.finished = batch.finished, []
        with self._changed:
            for job, _ in finished:
                self._release(job)
        for job, last in finished:  # when their places are free, so that clients may ask again
            job.send(last)
        if batch.owners:
            self._running.append(batch)


class _Batch:
    """Jobs of one seed that have had the same samples so far; rows leave it when they are finished."""

    def __init__(self, jobs: list[Job], model: ServedModel) -> None:
        self.jobs, self._model = jobs, model
        self.owners = [(job, row) for job in jobs for row in range(len(job))]
        self.finished: list[tuple[Job, Progress | Exception]] = []  # and what they are to be sent
        self._images: Tensor | None = None  # of `owners`, once sampling has begun
        self._sampling: Sampling | OneShot | None = None
        self._drawn: Tensor | None = None  # probabilities of single samples, if a job keeps them

    def draw(self, fit: int) -> int:
        """As many samples as fit, but none beyond where a job ends, checks or reports; returns how many."""
        if self._sampling is None:
            self._images = torch.stack([job.images[row] for job, row in self.owners])
            self._sampling = self._model.sampling(self._images, self.jobs[0].seed)
        drawn = self._sampling.drawn
        ends = [drawn + max(fit // len(self.owners), 1)]
        for job in self.jobs:
            steps = [job.samples, CHECK_EVERY if job.error is not None else None, job.step]
            ends += [drawn - drawn % step + step for step in steps if step is not None]
        count = min(ends) - drawn
        probs = self._sampling.draw(count)
        if any(job.keeps for job in self.jobs):
            self._drawn = probs.cpu() if self._drawn is None else torch.cat([self._drawn, probs.cpu()])
        return count

    def report(self) -> None:
        """Answer the rows that are finished, report to the jobs that are due, go on with the rest."""
        assert self._sampling is not None and self._images is not None  # noqa: S101 (for the type checker)
        drawn = self._sampling.drawn
        decided = self._decided(drawn)
        finished = [bool(now) or drawn >= job.samples for (job, _), now in zip(self.owners, decided, strict=True)]
        due = {job for job in self.jobs if job.step and drawn % job.step == 0 and job.sent - job.taken < MOST_UNREAD}
        if not any(finished) and not due:
            return
        answers = self._model.answers(self._sampling.predictive(), self._images, decided, drawn)
        for (job, row), answer in zip(self.owners, answers, strict=True):
            job.answers[row] = answer
        unfinished = {job for (job, _), done in zip(self.owners, finished, strict=True) if not done}
        for job in list(self.jobs):
            if job not in unfinished:
                self._finish(job, Progress(job.answers, self._draws(job), drawn, True))
            elif job in due:
                job.send(Progress(list(job.answers), self._draws(job), drawn, False))
                job.reported, job.sent = drawn, job.sent + 1
        self._keep([place for place, done in enumerate(finished) if not done])

    def expire(self) -> None:
        """Drop the jobs that nobody waits for any more."""
        now = time.monotonic()
        for job in [job for job in self.jobs if job.cancelled or now > job.deadline]:
            self._finish(job, TimeoutError())
        alive = set(self.jobs)
        self._keep([place for place, (job, _) in enumerate(self.owners) if job in alive])

    def fail(self, error: Exception) -> None:
        for job in list(self.jobs):
            self._finish(job, error)
        self.owners = []

    def _decided(self, drawn: int) -> list[bool | None]:
        """For each row whether its label is decided; None where that was not asked for."""
        checking = {job for job in self.jobs if drawn % CHECK_EVERY == 0 or drawn >= job.samples}
        errors = {job.error for job in checking if job.error is not None}
        found = {error: label_is_decided(self._drawn, error).tolist() for error in errors if self._drawn is not None}
        return [
            None if job.error is None else job in checking and found[job.error][place]
            for place, (job, _) in enumerate(self.owners)
        ]

    def _draws(self, job: Job) -> list[Tensor] | None:
        """The samples since the last report, for each image of a job; none for one finished before."""
        if not job.draws or self._drawn is None:
            return None
        draws = [self._drawn.new_empty(0, self._drawn.shape[-1])] * len(job)
        for place, (owner, row) in enumerate(self.owners):
            if owner is job:
                draws[row] = self._drawn[job.reported :, place].clone()
        return draws

    def _finish(self, job: Job, last: Progress | Exception) -> None:
        self.jobs.remove(job)
        self.finished.append((job, last))

    def _keep(self, places: list[int]) -> None:
        if len(places) == len(self.owners):
            return
        index = torch.tensor(places, dtype=torch.int64)
        self.owners = [self.owners[place] for place in places]
        self._images = None if self._images is None else self._images[index]
        self._drawn = None if self._drawn is None else self._drawn[:, index]
        if self._sampling is not None:
            self._sampling.keep(index.to(self._sampling.rows.device))
