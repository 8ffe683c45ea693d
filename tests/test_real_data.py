"""The whole way on the real image sets: from published files to a classifier that is uncertain where it cannot know."""

import pytest
import torch
from lightning_fabric import Fabric

from calgp.data import load
from calgp.runs import RunFolder, TrainingData, from_json
from calgp.training import train_run
from folders import evaluate

pytestmark = [pytest.mark.data, pytest.mark.slow]


@pytest.fixture(scope="module")
def mnist_run(data_dir, tmp_path_factory) -> RunFolder:
    run = from_json(
        {
            "method": "cnn-gp-sorf-paper",
            "backbone": "lenet",
            "source": "mnist",
            "train_size": 2000,
            "steps": 150,
            "augment": ["none"],
            "learning_rate": 6e-3,
            "schedule": "one-cycle",
        }
    )
    folder = RunFolder(tmp_path_factory.mktemp("real") / "mnist")
    train_run(run, folder, Fabric(accelerator="cpu", devices=1), directory=data_dir)
    return folder


def test_two_thousand_mnist_images_teach_digits_and_leave_letters_uncertain(mnist_run, data_dir):
    images = {name: load(name, "test", directory=data_dir) for name in ("mnist", "notmnist")}
    assert [len(each) for each in images.values()] == [10_000, 18_724]
    inside, outside = (
        evaluate(mnist_run, source=name, images=each.balanced(3000, 0), passes=3) for name, each in images.items()
    )
    # a network that has learned nothing has an error of 0.9 and an AUROC of 0.5
    assert inside.n == 3000 and inside.own.scores.err < 0.08
    assert outside.n == 3000 and outside.outside
    assert outside.ood["entropy"].auroc.value > 0.8
    assert outside.mean_entropy > 2 * inside.mean_entropy


def test_cifar_images_train_a_resnet(data_dir, tmp_path):
    run = from_json(
        {
            "method": "cnn-gp-sorf",
            "backbone": {"name": "resnet", "n": 1, "widths": [8, 16, 32]},
            "source": "cifar10",
            "train_size": 500,
            "steps": 40,
            "batch_size": 50,
            "learning_rate": 5e-3,
        }
    )
    folder = RunFolder(tmp_path / "cifar")
    model = train_run(run, folder, data=TrainingData.of(run, data_dir)).model
    log = [record for record in folder.log() if record.kind == "train"]
    assert log[-1].nll < log[0].nll < 3
    assert all(value.isfinite().all() for value in model.state_dict().values() if torch.is_floating_point(value))
