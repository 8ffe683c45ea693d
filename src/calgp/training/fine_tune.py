"""Fine-tuning of a pretrained network: its run, and the first stage, the head on features of the frozen network."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from calgp.data import Images
from calgp.data.images import to_unit_interval
from calgp.errors import CalgpError
from calgp.gp import Bound, Model, evaluating
from calgp.json_values import Json
from calgp.nets import Pretrained, Task, program_features
from calgp.nets.pretrained import find_network
from calgp.nets.pretrained_backbone import ProgramFeatures
from calgp.run import Run, default_name
from calgp.runs.description import from_json
from calgp.runs.training_data import class_weights
from calgp.training.loop import Step, order, training_noise

EPOCHS, BATCH = 5, 50  # of a run that names no budget; images in a step
HEAD_BATCH, HEAD_STEPS = 100, (300, 3000)  # of the first stage: images in a step; fewest and most steps
FEATURE_BATCH = 50


def fine_tuning_run(options: Mapping[str, Any], network: str, weights: str | None = None) -> Run:
    """The run of plain options with a pretrained network: image size and colour are the network's own.

    Args:
        options: of a `Run`, as for `from_json`; those of `Pretrained` are in the table `backbone`.
        network, weights: as for `find_network`.
    """
    own = options.get("backbone", default_name("backbone"))
    own = {"name": own} if isinstance(own, str) else dict(own) if isinstance(own, Mapping) else {}
    if own.pop("name", None) != default_name("backbone"):
        raise CalgpError("Invalid --network with --backbone: both name the network; give one of them.")
    if options.get("normalise", "none") != "none":
        raise CalgpError("Invalid --normalise: a pretrained network normalises images as it was trained.")
    extractor = find_network(network, weights, features=own.get("features"), size=options.get("size"))
    taken = extractor.preprocessing
    defaults: dict[str, Json] = {"size": taken.size, "colour": taken.colour, "batch_size": BATCH}
    if not {"epochs", "steps", "minutes"} & set(options):
        defaults["epochs"] = float(EPOCHS)
    own |= {"kind": Pretrained.__name__, "network": network, "weights": weights}
    run = from_json({**defaults, **options, "backbone": own})
    if not run.method.uses_network:
        raise CalgpError(f"Invalid --network: {run.label} has no network; choose another method, such as cnn-gp-sorf.")
    task = Task(taken.channels, taken.size, taken.size, classes=2)
    return replace(run, backbone=run.backbone.follow(extractor, task))  # pyright: ignore[reportAttributeAccessIssue]


def train_head(run: Run, model: Model, train: Images, watch: Callable[[Step], None]) -> None:
    """Stage one: everything but the network, on features that are computed once; nothing for other networks."""
    for network in program_features(model):
        if not network.spec.head_epochs:
            continue
        c = _features(network, train, watch)
        own = {id(each) for each in network.parameters()}
        trained = [each for each in model.parameters() if each.requires_grad and id(each) not in own]
        optimiser = torch.optim.Adam(trained, lr=run.learning_rate)
        bound = Bound(model, len(train), class_weights(run, train)).to(c.device)
        epochs, (fewest, most) = network.spec.head_epochs, HEAD_STEPS
        steps = min(max(math.ceil(epochs * len(train) / HEAD_BATCH), fewest), most)
        for step in range(steps):
            index = order(len(train), HEAD_BATCH, step, run.seed)
            rate = run.learning_rate_at(step, steps)
            for group in optimiser.param_groups:
                group["lr"] = rate
            noise = training_noise(run, step, train.rows[index].to(c.device))
            nll, kl = bound(c[index.to(c.device)], train.y[index].to(c.device), noise)
            optimiser.zero_grad(set_to_none=True)
            (nll + run.kl_weight * kl).backward()
            optimiser.step()
            watch(Step(step + 1, steps, nll.detach(), kl.detach(), rate, stage="head"))
        optimiser.zero_grad(set_to_none=True)


@torch.no_grad()
def _features(network: ProgramFeatures, train: Images, watch: Callable[[Step], None]) -> Tensor:
    """c of all images as they are, [N, d], where the network is."""
    like, found, done = next(network.parameters()), [], 0
    unknown = torch.full((), math.nan)
    with evaluating(network):
        for _, x in train.read(train.parts(FEATURE_BATCH)):
            found.append(network.view(to_unit_interval(x).to(like)))
            done += len(x)
            watch(Step(done, len(train), unknown, unknown, 0.0, stage="features"))
    return torch.cat(found)
