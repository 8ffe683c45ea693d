"""The thread that owns the model: a batch changes no answer, the queue is bounded, nothing accepted is lost."""

import ctypes
import queue
import threading
import time

import pytest
import torch

from calgp.serve import batching
from calgp.serve.batching import CHECK_EVERY, MOST_UNREAD, Job, Progress, Worker
from calgp.serve.limits import Limits
from calgp.serve.model import ServedModel
from calgp.serve.problems import HTTPProblem

from .conftest import NEVER, sampled

ROUNDING = 1e-5  # what may differ with the size of a batch: float32 sums in another order


@pytest.fixture(scope="module")
def model():
    return ServedModel(sampled())


@pytest.fixture
def work(model):
    """Makes workers, whose turns are noted, and closes them."""
    workers = []

    def make(turns: list | None = None, on_death=lambda: None, **limits) -> Worker:
        def observe(*turn):
            if turns is not None:
                turns.append(turn)

        workers.append(Worker(model, Limits(**limits), observe=observe, on_death=on_death))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def make_job(digits, *, samples=4, seed=0, seconds=30.0, **options) -> tuple[Job, queue.Queue]:
    """A job and the queue in which its reports arrive."""
    reports: queue.Queue = queue.Queue()
    images = torch.from_numpy(digits[:, None])
    return Job(images, samples, seed, time.monotonic() + seconds, reports.put, **options), reports


def submit(worker: Worker, *jobs: Job) -> None:
    """Queue all of them before the thread, which needs the same lock, sees the first."""
    with worker._changed:
        for job in jobs:
            worker.submit(job)


def probs(reports: queue.Queue) -> torch.Tensor:
    report = reports.get(timeout=NEVER)
    assert isinstance(report, Progress), report
    return torch.tensor([answer.probabilities for answer in report.answers])


def test_a_batch_changes_no_answer_and_jobs_of_one_seed_share_turns(work, digits):
    turns: list = []
    worker = work(turns, wait=0, batch=12)
    classifier = sampled()
    asking = [(digits[row : row + 1 + row % 3], 3 + row % 4, row % 2) for row in range(12)]
    jobs = [make_job(part, samples=samples, seed=seed) for part, samples, seed in asking]
    submit(worker, *(job for job, _ in jobs))
    for (part, samples, seed), (_, reports) in zip(asking, jobs, strict=True):
        x = torch.from_numpy(part[:, None]).float() / 255
        wanted = classifier.predict(x, passes=samples, seed=seed).probs
        torch.testing.assert_close(probs(reports), wanted, rtol=0, atol=ROUNDING)
    worker.close()
    assert sum(images * samples for images, samples, _ in turns) == sum(len(p) * s for p, s, _ in asking)
    assert max(images for images, _, _ in turns) > 6
    assert worker.queued == 0 and worker.backlog == 0


def test_a_batch_is_no_larger_than_its_samples_allow(work, digits):
    turns: list = []
    worker = work(turns, wait=0)
    worker.fit = 20
    jobs = [make_job(digits[:1], samples=8) for _ in range(6)]
    submit(worker, *(job for job, _ in jobs))
    for _, reports in jobs:
        probs(reports)
    worker.close()
    assert [(images, samples) for images, samples, _ in turns] == [(2, 8)] * 3


def test_a_long_job_does_not_keep_others_waiting(work, digits):
    worker = work(wait=0)
    worker.fit = 8
    long, long_reports = make_job(digits[:1], samples=400)
    worker.submit(long)
    for _ in range(3):
        job, reports = make_job(digits[:1], samples=2)
        worker.submit(job)
        probs(reports)
    assert long_reports.empty()
    assert probs(long_reports).shape == (1, 10)


def test_labels_are_checked_at_fixed_samples_whatever_else_is_in_the_batch(work, digits):
    worker = work(wait=0)
    adaptive, reports = make_job(digits[:4], samples=100, error=0.01)
    other, other_reports = make_job(digits[:1], samples=13)
    submit(worker, adaptive, other)
    first = reports.get(timeout=NEVER).answers
    other_reports.get(timeout=NEVER)
    assert all(answer.samples % CHECK_EVERY == 0 for answer in first if answer.label_is_decided)
    alone, alone_reports = make_job(digits[:4], samples=100, error=0.01)
    worker.submit(alone)
    again = alone_reports.get(timeout=NEVER).answers
    assert [answer.samples for answer in again] == [answer.samples for answer in first]


def test_what_is_too_much_is_refused_at_once(work, digits):
    worker = work(queue=3, wait=0)
    accepted = [make_job(digits[:1]) for _ in range(3)]
    with pytest.raises(HTTPProblem, match="waiting"):
        submit(worker, *(job for job, _ in accepted), make_job(digits[:1])[0])
    for _, reports in accepted:
        probs(reports)
    job, reports = make_job(digits[:5])  # larger than the queue, but alone
    worker.submit(job)
    assert probs(reports).shape == (5, 10)


def test_what_nobody_waits_for_is_dropped(work, digits):
    worker = work(wait=0)
    late, late_reports = make_job(digits[:1], seconds=-1.0)
    gone, gone_reports = make_job(digits[:1])
    gone.cancelled = True
    for job in (late, gone):
        worker.submit(job)
    assert isinstance(late_reports.get(timeout=NEVER), TimeoutError)
    assert isinstance(gone_reports.get(timeout=NEVER), TimeoutError)
    worker.close()
    assert worker.queued == 0


def test_a_batch_that_fails_takes_nobody_with_it(work, digits, caplog):
    worker = work(wait=0)
    bad, bad_reports = make_job(digits[:1])
    bad.images = torch.zeros(1, 3, 28, 28, dtype=torch.uint8)  # the model takes one channel
    worker.submit(bad)
    assert isinstance(bad_reports.get(timeout=NEVER), Exception)
    good, good_reports = make_job(digits[:1])
    worker.submit(good)
    assert probs(good_reports).shape == (1, 10)


def test_closing_finishes_what_was_accepted(work, digits):
    worker = work(wait=5.0)
    jobs = [make_job(digits[:1], samples=20, seed=seed) for seed in range(5)]
    for job, _ in jobs:
        worker.submit(job)
    closing = threading.Thread(target=worker.close)
    closing.start()
    assert all(probs(reports).shape == (1, 10) for _, reports in jobs)
    closing.join(NEVER)
    with pytest.raises(HTTPProblem, match="shutting down"):
        worker.submit(make_job(digits[:1])[0])
    assert not worker.ready


def test_a_cancelled_job_frees_its_place_at_once(work, digits):
    worker = work(wait=5.0, queue=2)
    waiting, _ = make_job(digits[:2])
    worker.submit(waiting)
    worker.cancel(waiting)
    assert worker.queued == 0 and worker.backlog == 0
    running, _ = make_job(digits[:1], samples=100_000, step=1)
    worker.submit(running)
    while not running.sent:
        time.sleep(0.01)
    worker.cancel(running)
    assert worker.queued == 0
    job, reports = make_job(digits[:2])
    worker.submit(job)
    assert probs(reports).shape == (2, 10)


def test_a_client_that_takes_no_reports_gets_no_more(work, digits):
    worker = work(wait=0)
    job, reports = make_job(digits[:1], samples=60, step=2, draws=True)
    worker.submit(job)
    while (report := reports.get(timeout=NEVER)) and not report.done:
        pass
    assert job.sent == MOST_UNREAD and job.taken == 0
    drawn = report.draws[0]  # all since the last report: no sample is lost
    assert drawn.shape == (60 - 2 * MOST_UNREAD, 10)
    whole, other = make_job(digits[:1], samples=60)
    worker.submit(whole)
    torch.testing.assert_close(probs(other)[0].double(), torch.tensor(report.answers[0].probabilities).double())


def test_the_memory_of_single_samples_is_bounded(work, digits, monkeypatch):
    monkeypatch.setattr(batching, "KEPT", 1000)
    worker = work(wait=0)
    first, reports = make_job(digits[:1], samples=200, error=0.01)  # alone it may have more: 2,000
    with pytest.raises(HTTPProblem, match="memory"):
        submit(worker, first, make_job(digits[:1], samples=8, error=0.01)[0])
    other, others = make_job(digits[:1])  # one that keeps nothing is welcome
    worker.submit(other)
    assert probs(reports).shape == probs(others).shape == (1, 10)


def kill(thread: threading.Thread) -> None:
    """End a thread by an exception that is no Exception, at whatever it does."""
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    assert raised == 1


def test_the_thread_does_not_die_silently(work, digits, caplog):
    died = threading.Event()
    worker = work(on_death=died.set, wait=0)
    jobs = [make_job(digits[:1], samples=100_000, seed=seed, step=1) for seed in range(3)]
    for job, _ in jobs:
        worker.submit(job)
    while not jobs[0][0].sent:
        time.sleep(0.01)
    assert worker.healthy and worker.ready
    kill(worker._thread)
    assert died.wait(NEVER)
    assert not worker.healthy and not worker.ready and worker.queued == 0
    for _, reports in jobs:
        while isinstance(report := reports.get(timeout=NEVER), Progress):
            pass
        assert isinstance(report, HTTPProblem) and "failed" in report.detail
    with pytest.raises(HTTPProblem, match="failed"):
        worker.submit(make_job(digits[:1])[0])
    assert "The model's thread died" in caplog.text


def test_a_turn_that_never_ends_is_no_good_health(work, digits):
    worker = work(wait=0, seconds=0.05)
    worker._turn_began = time.monotonic() - 1
    assert not worker.healthy and not worker.ready
