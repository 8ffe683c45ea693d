"""Where a run runs, by the names that users give."""

from lightning_fabric import Fabric

from calgp.errors import CalgpError


def open_device(device: str, precision: str = "32-true") -> Fabric:
    """Fabric on `device` (auto, cpu, cuda, cuda:1, mps …) in a floating type; what it refuses is the user's error."""
    accelerator, _, index = device.partition(":")
    try:
        fabric = Fabric(accelerator=accelerator, devices=[int(index)] if index else 1, precision=precision)  # type: ignore[arg-type]
        fabric.launch()
    except Exception as error:  # no such accelerator, no such precision
        raise CalgpError(f"Cannot run on device {device!r} with precision {precision!r}: {error}") from None
    return fabric
