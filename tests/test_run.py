import dataclasses
import json

import pytest

from calgp.errors import CalgpError
from calgp.methods import METHODS, CnnGp
from calgp.nets import BACKBONES, LeNet
from calgp.runs import Run, from_json, to_json


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_method_and_backbone_survives_json(method, backbone):
    run = Run(METHODS[method], BACKBONES[backbone], source="mnist", train_size=1000, seed=3, steps=7)
    assert from_json(json.loads(json.dumps(to_json(run)))) == run


def test_a_name_with_options_is_a_variant_of_the_ready_value():
    run = from_json({"method": {"name": "cnn-gp-sorf", "depth": 3}, "backbone": {"name": "lenet", "channels": [8, 8]}})
    assert run.method == dataclasses.replace(METHODS["cnn-gp-sorf"], depth=3)
    assert run.backbone == LeNet(channels=(8, 8))


def test_the_label_names_what_differs():
    assert Run(METHODS["cnn-gp-sorf"], BACKBONES["lenet"]).label == "cnn-gp-sorf"
    assert Run(CnnGp(frequencies="sorf", depth=3, keep_filters=0.9), BACKBONES["lenet"]).label == "cnn-gp-sorf depth=3"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "gp"}, "There is no method 'gp'"),
        ({"method": {"kind": "os.system"}}, "no kind of method"),
        ({"method": 3}, "must be a name"),
        ({"method": {"name": "cnn-gp-sorf", "dept": 3}}, "no option 'dept'"),
        ({"method": {"name": "cnn-gp-sorf", "depth": 0}}, "depth=0"),
        ({"method": {"name": "cnn-gp-sorf", "depth": "three"}}, "depth='three'"),
        ({"method": {"name": "cnn-gp-sorf", "keep": 0}}, "keep"),
        ({"method": {"name": "cnn-gp-sorf", "kernel": "arc-cosine-0"}}, "no gradient"),
        ({"method": {"name": "cnn-gp-rf", "per_output": True}}, "per_output"),
        ({"backbone": "vgg"}, "There is no backbone 'vgg'"),
        ({"learning": 1}, "no option 'learning'"),
        ({"schedule": "step"}, "schedule='step'"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"epochs": -1}, "epochs=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": 0}, "learning_rate=0"),
        ({"train_size": -5}, "train_size=-5"),
        ({"holdout": 1}, "holdout=1"),
        ({"kl_weight": -1}, "kl_weight=-1"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, says):
    with pytest.raises(CalgpError, match=says.replace("(", r"\(")):
        from_json(options)


def test_steps_go_before_epochs_and_the_last_batch_counts():
    run = from_json({"epochs": 3, "batch_size": 100})
    assert run.total_steps(250) == 9
    assert dataclasses.replace(run, steps=5).total_steps(250) == 5
    assert dataclasses.replace(run, epochs=0.5).total_steps(250) == 2


def test_schedules_start_and_end_where_they_should():
    constant, cosine, cycle = (
        from_json({"schedule": name, "learning_rate": 1.0}) for name in ("constant", "cosine", "one-cycle")
    )
    assert {constant.learning_rate_at(step, 100) for step in range(100)} == {1.0}
    assert cosine.learning_rate_at(0, 100) == 1.0
    assert cosine.learning_rate_at(50, 100) == pytest.approx(0.5)
    assert cosine.learning_rate_at(99, 100) < 0.001
    assert cycle.learning_rate_at(0, 100) == pytest.approx(0.04)
    assert cycle.learning_rate_at(25, 100) == pytest.approx(1.0)
    assert cycle.learning_rate_at(99, 100) < 0.001
