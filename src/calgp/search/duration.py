"""About how long a run takes: good for sums and bars, not for promises."""

from calgp.data.sources import open_source
from calgp.run import Run

IMAGES = {"digits": 5000, "mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}
TEST_IMAGES = {"digits": 1000, "letters": 1000, "notmnist": 18_724}  # 10,000 for the others


def seconds(run: Run, samples: int, tests: int) -> float:
    """About how long a run takes on one core of a 2020s server; good for sums and bars, not for promises."""
    ms = _milliseconds(run)  # a forward pass of one image
    trained = run.total_steps(count_of_training_images(run)) * run.batch_size * 3 * ms
    passes = samples if run.method.draws_masks else 1
    return 5 + (trained + tests * ms * passes) / 1000


def count_of_training_images(run: Run) -> int:
    """With the hold-out; a guess where only the files can tell."""
    return IMAGES.get(run.source, 10_000) if run.train_size is None else run.train_size


def count_of_test_images(source: str) -> int:
    return TEST_IMAGES.get(source, 10_000)


def _milliseconds(run: Run) -> float:
    """Multiplications of the convolutions on 32 × 32 images at 60 · 10⁹ a second, and what the head adds.

    Measured on one core with training steps of 100 images: 0.3 ms for LeNet, 0.6 for LeNet-CIFAR, 0.4 for ResNet(1).
    """
    method, backbone, channels = run.method, run.backbone, open_source(run.source).channels or 3
    if not method.uses_network:
        return 1.2 if channels == 1 else 1.8
    return method.relative_cost(wide=not backbone.few_features) * backbone.multiplications(channels) / 60e6
