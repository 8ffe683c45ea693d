"""What an operator watches: counters and histograms in Prometheus's words. Labels are few and fixed."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as MEDIA

from calgp.serve.schemas import Prediction

__all__ = ["MEDIA", "Metrics"]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NATS = (0.01, 0.03, 0.1, 0.3, 1, 3)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = kept = CollectorRegistry()
        self.requests = Counter("calgp_requests", "Requests answered.", ["path", "status"], registry=kept)
        self.seconds = Histogram("calgp_request_seconds", "Until the answer.", ["path"], buckets=SECONDS, registry=kept)
        self.images = Counter("calgp_images", "Images predicted.", registry=kept)
        self.samples = Counter("calgp_samples", "Samples drawn, over all images.", registry=kept)
        self.batch = Histogram("calgp_batch_images", "Images of a turn.", buckets=POWERS, registry=kept)
        self.turn = Histogram("calgp_turn_seconds", "Turns of the model.", buckets=SECONDS, registry=kept)
        self.drawn = Histogram("calgp_image_samples", "Samples an image took.", buckets=POWERS, registry=kept)
        drift = "Entropy of the predictions: watch it drift."
        self.entropy = Histogram("calgp_entropy_nats", drift, buckets=NATS, registry=kept)
        self.abstained = Counter("calgp_abstained", "Images for which the run abstained.", registry=kept)
        self.queue = Gauge("calgp_queue_images", "Images accepted and not yet answered.", registry=kept)
        self.open = Gauge("calgp_open_requests", "Requests being read, waiting or computed.", registry=kept)

    def observe_turn(self, images: int, samples: int, seconds: float) -> None:
        """A turn of the model."""
        self.samples.inc(images * samples)
        self.batch.observe(images)
        self.turn.observe(seconds)

    def observe_answers(self, answers: list[Prediction]) -> None:
        self.images.inc(len(answers))
        for answer in answers:
            self.drawn.observe(answer.samples)
            self.entropy.observe(answer.entropy)
            self.abstained.inc(bool(answer.abstain))

    def exposition(self) -> bytes:
        """All of them in Prometheus's text format."""
        return generate_latest(self.registry)
