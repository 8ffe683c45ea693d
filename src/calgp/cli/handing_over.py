"""Trained runs for others: a page, a file, a tracker, a server."""

import json
from pathlib import Path
from typing import Annotated

import typer

from calgp.cli.shared import (
    DataOption,
    DeviceOption,
    JsonOption,
    RunArgument,
    SamplesOption,
    ThreadsOption,
    UncalibratedOption,
    check_sampling,
    open_fabric,
    open_folder,
    out,
    writable,
)
from calgp.errors import CalgpError


def report(
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or `shipped`.")],
    file: Annotated[Path | None, typer.Option("--out", help="The HTML file; report.html in the first run.")] = None,
    data: DataOption = None,
) -> None:
    """One HTML page about one or more runs: scores, reliability, doubt inside and outside, pictures, training.

    Example: calgp report runs/mnist --out mnist.html
    """
    from calgp.report import write_report

    folders = [open_folder(name) for name in run]
    target = file if file is not None else writable(folders[0]).path / "report.html"
    path = write_report(folders, target, directory=data)
    out.print(f"Report: {path}", soft_wrap=True)


def export(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="onnx or torch-export.")] = "onnx",
    file: Annotated[Path | None, typer.Option("--out", help="The file; model.onnx or .pt2 in the run.")] = None,
    samples: SamplesOption = 50,
    seed: Annotated[int, typer.Option(help="Of the masks.")] = 0,
    uncalibrated: UncalibratedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run as one file that needs no calgp, with its uncertainty: probabilities, entropy, mutual information.

    The file holds the draws of --samples samples, those of `calgp predict` for its first image; all images of a batch
    share them. It is run after writing, by ONNX Runtime with default optimisations or by torch, and kept only if it
    agrees with calgp to 1e-5. What the file needs and tells: docs/guides/deployment.md.

    Example: calgp export runs/mnist --to onnx --out mnist.onnx
    """
    from calgp import runs, show

    check_sampling(samples, seed)
    folder = open_folder(run)
    target = writable(folder) if file is None else folder
    done = runs.export(target, file, to=to, samples=samples, seed=seed, calibrated=not uncalibrated)  # type: ignore[arg-type]
    if as_json:
        return print(json.dumps(show.export_row(done)))
    out.print(show.export_lines(done), soft_wrap=True)


def track(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="mlflow or tensorboard.")],
    where: Annotated[
        str | None, typer.Option("--where", help="A directory, or an address that MLflow takes; mlruns or events.")
    ] = None,
    model: Annotated[bool, typer.Option("--model", help="Copy the weights too (MLflow).")] = False,
) -> None:
    """Copy a run into an experiment tracker: its options as parameters, its log and scores as metrics.

    Example: calgp track runs/mnist --to mlflow && calgp track runs/mnist --to tensorboard --where events
    """
    from calgp import trackers

    default = "mlruns" if to == "mlflow" else "events"
    out.print(trackers.track(open_folder(run), to, where or default, model=model), soft_wrap=True)


def serve(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="A run folder, or `shipped`.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Serve the run that comes with the package.")] = False,
    host: Annotated[str, typer.Option(help="The address to listen on; this machine alone unless given.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token that clients must send; else $CALGP_TOKEN, else none.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name by which clients may call the server, such as that of a proxy.")
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A limit, such as samples=200; see docs/serve.md.")
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Serve a run over HTTP: a page at / and an API (/openapi.json). Ctrl-C or SIGTERM finishes what was accepted.

    Limits and their defaults: body=4194304 bytes, side=8192 and pixels=25000000 of pictures, images=32 a request,
    samples=1000 an image, queue=256 images, requests=128, connections=512, seconds=30 a request, wait=0.002 seconds for
    company, batch=64 images.

    Example: calgp serve --demo --port 8000
    """
    try:
        from calgp.serve import Limits, read_token
        from calgp.serve import serve as serve_run
    except ModuleNotFoundError as error:
        raise CalgpError(f"`calgp serve` needs {error.name}: pip install 'calgp[serve]' brings it.") from None

    if demo == (run is not None):
        raise CalgpError("Name one run to serve, such as runs/mnist, or give --demo for the one in the package.")
    limits, token = Limits.parse(limit or []), read_token(token_file)
    folder, fabric = open_folder(run or "shipped"), open_fabric(device, "32-true", threads)
    out.print(f"Serving {folder.card().label} on http://{host}:{port} (Ctrl-C stops it).", soft_wrap=True)
    serve_run(folder, fabric, host=host, port=port, limits=limits, token=token, hosts=allow_host or (), threads=threads)
