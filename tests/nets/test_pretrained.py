"""Pretrained networks by name: features, weights and preprocessing are those of the libraries themselves."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from architectures import ARCHITECTURES, ZOO, library
from calgp.errors import CalgpError
from calgp.nets.preprocessing import Preprocessing
from calgp.nets.pretrained import find_network

OWN = """
import torch
from torch import nn

def make():
    torch.manual_seed(1)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    network.preprocessing = {"size": 16, "mean": [0.5] * 3, "std": [0.25] * 3}
    return network

def plain():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

def grey():
    network = nn.Sequential(nn.Conv2d(1, 5, 3), nn.Flatten(), nn.Linear(5 * 36, 4))
    network.preprocessing = {"size": 8, "mean": [0.0], "std": [1.0]}
    return network

def wrong():
    network = plain()
    network.preprocessing = {"sizes": 3}
    return network

def no_module():
    return 3

def failing():
    raise OSError("no such weights")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(OWN)
    return tmp_path


def zoo(name):
    try:
        return library(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name} is not here: {error}")


def images(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]


def test_a_function_of_a_file_gives_what_enters_its_last_layer(own):
    extractor = find_network("nets.py:make")
    torch.manual_seed(1)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    found = extractor(images((3, 16, 16), (1, 16, 16)))
    x = torch.stack([each.expand(3, -1, -1) for each in images((3, 16, 16), (1, 16, 16))]) / 255
    assert found.shape == (2, 8) and extractor.width == 8
    torch.testing.assert_close(found, network[:4]((x - 0.5) / 0.25))
    assert not any(each.requires_grad for each in extractor.network.parameters())


def test_the_same_weights_have_the_same_digest_and_others_another(own):
    assert find_network("nets.py:make").weights == find_network("nets.py:make").weights
    assert find_network("nets.py:plain").weights == find_network("nets.py:plain").weights  # drawn from a fixed seed
    own_weights = find_network("nets.py:make").network.network.state_dict()
    save_file({name: (each + 1).contiguous() for name, each in own_weights.items()}, "other.safetensors")
    other = find_network("nets.py:make", "other.safetensors")
    assert other.weights != find_network("nets.py:make").weights
    network = other.network.network
    assert torch.equal(network[0].bias, find_network("nets.py:make").network.network[0].bias + 1)


def test_grey_networks_get_grey_images(own):
    extractor = find_network("nets.py:grey")
    assert extractor.preprocessing.channels == 1
    assert extractor(images((3, 20, 9), (1, 8, 8))).shape == (2, 180)


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("resnet18", None, "there is none called 'resnet18'"),
        ("timm:", None, "there is none called 'timm:'"),
        ("nothing.py:make", None, "nothing.py cannot be imported (FileNotFoundError"),
        ("nets.py:nothing", None, "nets.py has no function 'nothing'"),
        ("nets.py:wrong", None, "must be a table with some of fit, interpolation, mean"),
        ("nets.py:no_module", None, "must return an nn.Module, not int"),
        ("nets.py:failing", None, "the function has failed (OSError: no such weights)"),
        ("nets.py:make", "nowhere.pt", "There is no file of weights nowhere.pt"),
        ("nets.py:make", "nets.py", "nets.py cannot be read as weights"),
        ("nets.py:make", "list.pt", "holds no table of tensors"),
        ("nets.py:make", "few.safetensors", "has no weights for 1 of the 2 tensors of this network, such as '0.bias'"),
        ("nets.py:make", "shape.safetensors", "has '0.bias' of shape [3], the network [8]"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(own, name, weights, message):
    weight = find_network("nets.py:make").network.network[0].weight.detach().contiguous()
    save_file({"0.weight": weight}, "few.safetensors")
    save_file({"0.weight": weight, "0.bias": torch.zeros(3)}, "shape.safetensors")
    torch.save([torch.zeros(1)], "list.pt")
    with pytest.raises(CalgpError) as refusal:
        find_network(name, weights)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_weights_that_would_run_code_are_refused(own):
    class Attack:
        def __reduce__(self):
            return (print, ("attacked",))

    torch.save({"0.weight": Attack()}, "attack.pt")
    with pytest.raises(CalgpError, match="cannot be read as weights"):
        find_network("nets.py:make", "attack.pt")


@pytest.mark.parametrize("name", ["timm", "torchvision", "transformers"])
def test_a_library_that_is_missing_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # Python's way to say that there is none
    with pytest.raises(CalgpError, match=rf"need the package {name}.*pip install 'calgp\[networks\]'"):
        find_network(f"{name}:resnet18", "random")


@pytest.mark.parametrize("value", [{"size": 0}, {"size": 32, "resize": 16}, {"std": (0.0,) * 3}, {"mean": (0.0,)},
                                   {"interpolation": "lanczos"}, {"fit": "pad"}])  # fmt: skip
def test_preprocessing_that_cannot_be_is_refused(value):
    with pytest.raises(CalgpError, match="must be"):
        Preprocessing(**value)


def test_thin_images_take_no_more_memory_than_others():
    thin = torch.full((3, 1, 20_000), 7, dtype=torch.uint8)
    assert Preprocessing(resize=256).resized(thin).unique().tolist() == [7]
    assert Preprocessing(resize=256, fit="stretch").resized(thin).shape == (3, 224, 224)


@pytest.mark.parametrize("shape", [(3, 300, 400), (3, 40, 31), (3, 256, 256), (3, 257, 700)])
def test_torchvision_preprocesses_alike(shape):
    zoo("torchvision")
    import torchvision

    weights = torchvision.models.get_model_weights("resnet18").DEFAULT
    own = find_network("torchvision:resnet18", "random").preprocessing
    (image,) = images(shape)
    assert own.interpolation == "bilinear" and (own.size, own.resize) == (224, 256)
    found = own.normalised(own.resized(image)[None])[0]
    # one rounding of a pixel: torchvision may take another way to the same filter
    torch.testing.assert_close(found, weights.transforms()(image), atol=1.01 / 255 / 0.224, rtol=0)


def test_torchvision_features_are_those_of_its_own_layers(tmp_path):
    zoo("torchvision")
    import torchvision

    network = torchvision.models.resnet18(num_classes=7).eval()
    torch.save({"state_dict": network.state_dict()}, tmp_path / "weights.pth")
    extractor = find_network("torchvision:resnet18", tmp_path / "weights.pth")
    batch = extractor.resized(images((3, 224, 224)))
    with torch.no_grad():
        expected = nn.Sequential(*list(network.children())[:-1])(extractor.preprocessing.normalised(batch)).flatten(1)
    torch.testing.assert_close(extractor.features(batch), expected, atol=1e-4, rtol=1e-4)  # another memory layout


def test_timm_features_and_preprocessing_are_its_own(tmp_path):
    timm = zoo("timm")
    torch.manual_seed(3)
    network = timm.create_model("resnet18", num_classes=5).eval()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    extractor = find_network("timm:resnet18", tmp_path / "weights.safetensors")
    (image,) = images((3, 260, 340))
    smooth = torch.nn.functional.avg_pool2d(image.float()[None], 9, 1, 4)[0].byte()  # noise shows every rounding
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network), is_training=False)
    expected = transform(Image.fromarray(np.ascontiguousarray(smooth.permute(1, 2, 0).numpy())))
    batch = extractor.resized([smooth])
    found = extractor.preprocessing.normalised(batch)[0]
    torch.testing.assert_close(found, expected, atol=2.01 / 255 / 0.224, rtol=0)  # Pillow rounds between its two passes
    with torch.no_grad():
        pooled = network.forward_head(network.forward_features(found[None]), pre_logits=True)
    torch.testing.assert_close(extractor.features(batch), pooled, atol=1e-4, rtol=1e-4)


def test_timm_tells_the_nearest_name():
    zoo("timm")
    with pytest.raises(CalgpError, match="did you mean 'resnet18'"):
        find_network("timm:resnet18x", "random")


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_without_a_connection_the_error_says_what_to_do(name, tmp_path, monkeypatch):
    zoo(name.partition(":")[0])
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CalgpError, match=r"cannot be downloaded .*; give a file with --weights"):
        find_network(name)


def test_a_folder_of_transformers(tmp_path):
    network = ARCHITECTURES["resnet"].make()
    network.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"size": {"height": 28, "width": 28}, "image_mean": [0.5], "image_std": [0.5], "resample": 3}'
    )
    extractor = find_network(f"transformers:{tmp_path}")
    assert extractor.preprocessing == Preprocessing(28, 28, (0.5,), (0.5,), "bicubic", "stretch")
    batch = extractor.resized(images((1, 28, 28), (3, 50, 30)))
    with torch.no_grad():
        expected = network.resnet(extractor.preprocessing.normalised(batch)).pooler_output.flatten(1)
    torch.testing.assert_close(extractor.features(batch), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(CalgpError, match="must be a folder with config"):
        find_network(f"transformers:{tmp_path / 'nowhere'}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "torchvision:mobilenet_v3_small", "torchvision:swin_t", "timm:vit_tiny_patch16_224", "timm:levit_128s",
        "timm:deit_tiny_distilled_patch16_224", "timm:convnextv2_atto", "timm:mobilevit_xxs", "timm:nfnet_l0",
    ],
)  # fmt: skip
def test_many_architectures_give_features_at_their_own_size(name):
    kind, _, network = name.partition(":")
    zoo(kind)
    (entry,) = [each for each in ZOO if (each.library, each.name) == (kind, network)]
    extractor = find_network(name, "random")
    found = extractor(images((3, 100, 130), (1, 300, 200)))
    assert found.shape == (2, entry.width) and found.isfinite().all() and found.std() > 0


def test_features_that_are_not_found_are_named():
    zoo("torchvision")
    with pytest.raises(CalgpError, match=r"features='classifier\.0'"):
        find_network("torchvision:squeezenet1_1", "random")
    extractor = find_network("torchvision:squeezenet1_1", "random", features="classifier.0")
    assert extractor(images((3, 224, 224))).shape == (1, 512)
