"""Predict image files with a model that `calgp export` wrote: with NumPy, Pillow and ONNX Runtime or torch, no calgp.

python model_predict.py model.onnx photo.jpg …
"""

import json
import sys

import numpy as np
from PIL import Image, ImageOps


def prepare(file, shape):
    """An image file as float32 [1, C, H, W] in [0, 1], exactly as `calgp predict` prepares it.

    Upright (EXIF), on white where it is transparent, 16-bit grey scaled to 8 bits, grey or RGB, stretched to the size.
    `shape` is that of the model's input: [N, channels, height, width].
    """
    _, channels, height, width = shape
    with Image.open(file) as opened:
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):  # 16-bit grey: 0 … 65535 to 0 … 255
            wide = np.clip(np.array(image, np.int64), 0, 65535)
            image = Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
        elif image.mode == "F":
            raise ValueError(f"{file}: its pixels are floats, whose range is not known")
        elif image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        image = image.convert("L" if channels == 1 else "RGB")
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.array(image, np.uint8).reshape(height, width, channels)
    return pixels.transpose(2, 0, 1)[None].astype(np.float32) / np.float32(255)


def open_model(path):
    """What the file tells of itself, and a function from images to its outputs by name: those of `about["outputs"]`."""
    if path.endswith(".pt2"):
        import torch

        extra = {"calgp.json": ""}
        module = torch.export.load(path, extra_files=extra).module()
        about = json.loads(extra["calgp.json"])

        def run(x):
            return dict(zip(about["outputs"], (each.numpy() for each in module(torch.from_numpy(x))), strict=True))

        return about, run
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    about = json.loads(session.get_modelmeta().custom_metadata_map["calgp"])
    names = list(about["outputs"])
    return about, lambda x: dict(zip(names, map(np.asarray, session.run(names, {"images": x})), strict=True))


def main():
    about, run = open_model(sys.argv[1])
    threshold = about.get("outlier_threshold")
    for file in sys.argv[2:]:
        found = run(prepare(file, about["input"]["shape"]))
        best = found["probabilities"][0].argmax()
        numbers = [found["probabilities"][0, best], found["entropy"][0], found["mutual_information"][0]]
        outlier = found.get("outlier_score", [])[:1]
        flag = ["outlier"] if threshold and len(outlier) and outlier[0] > threshold["threshold"] else []
        print(file, about["classes"][best], *(f"{number:.4f}" for number in [*numbers, *outlier]), *flag)


if __name__ == "__main__":
    main()
