"""The tables of results/notes/own-network.md: architectures of transformers, timm and torchvision, wrapped and tried.

python tools/own_networks.py
"""

import platform
import sys
from pathlib import Path

import torch
import transformers

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from architectures import ARCHITECTURES, ZOO, follow_remedies
from calgp import METHODS, Bound, wrap
from calgp.data import load
from calgp.gp import Noise
from calgp.nets import Task

STEPS = 12


def main() -> None:
    digits = load("digits", "train").balanced(40, 0)
    print("| network | layers | masked = fired | features | stem, run once | bound before → after 12 steps |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, architecture in ARCHITECTURES.items():
        spec = wrap(architecture.make(), name=name)
        model = METHODS["cnn-gp-sorf"].build(Task(1, 28, 28, 10), spec, generator=torch.Generator().manual_seed(0))
        spec.start(model, digits, generator=torch.Generator().manual_seed(0))
        before, after = bounds(model, digits)
        features = model.features
        print(
            f"| {name} | {len(features.layers)} | {len(features.sites)} = {fired(model, digits)} | "
            f"{features.out_features} | `{features.stem_module}` | {before:.2f} → {after:.2f} |"
        )
    print(
        "\n| network | images | features | masked layers | what its refusal asks for |\n| --- | --- | --- | --- | --- |"
    )
    for entry in ZOO:
        found = follow_remedies(entry, Task(3, entry.size, entry.size, 10))
        asked = ["`num_classes=0`"] * ("num_classes=0" in found.remedies)
        asked += [f"`{option}={value!r}`" for option, value in found.options.items()]
        print(
            f"| {entry.library} {entry.name} | {entry.size} | {found.features.out_features} | "
            f"{len(found.features.sites)} | {', '.join(asked) or '–'} |"
        )
    print(f"\ntorch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}")


def fired(model, digits) -> int:
    """How many masked layers drew a mask in a prediction."""
    layers = set()
    for key, mask in model.sites().items():
        if key.startswith("features."):
            mask.register_forward_hook(lambda *_, layer=key.partition(".calgp_masks")[0]: layers.add(layer))
    with torch.no_grad():
        model.eval()(digits.pixels()[:2], Noise(0, torch.arange(2), torch.arange(2)))
    return len(layers)


def bounds(model, digits) -> tuple[float, float]:
    """The bound on 40 digits (the KL as for 4,000), before and after some steps."""
    x, y, rows = digits.pixels(), digits.y, torch.arange(len(digits))
    bound, optimiser = Bound(model, n=4000), torch.optim.Adam(model.parameters(), lr=1e-2)

    def estimate() -> float:
        with torch.no_grad():
            return sum(bound(x, y, Noise(10**6, torch.arange(4), rows))).item()

    before = estimate()
    for step in range(STEPS):
        optimiser.zero_grad()
        sum(bound(x, y, Noise(step, torch.arange(1), rows))).backward()
        optimiser.step()
    return before, estimate()


if __name__ == "__main__":
    main()
