"""The places of a model where keyed noise is drawn."""

from abc import ABC, abstractmethod

from torch import nn

from calgp.gp.noise import Noise, site_key


class Site(nn.Module, ABC):
    """A module that draws noise. The first active one that a batch meets turns its N rows into S · N, sample by sample.

    `site` stands for its name in the model (`name_sites`) and is part of the key of its noise.
    """

    site: int | None = None

    @property
    @abstractmethod
    def active(self) -> bool:
        """Whether it draws anything."""

    def key(self, noise: Noise | None) -> int:
        """The site's part of the key; without keyed noise none is needed."""
        if noise is not None and self.site is None:
            raise RuntimeError("This site has no name yet: call calgp.gp.name_sites(model) before using keyed noise.")
        return self.site or 0


def name_sites(module: nn.Module) -> dict[str, Site]:
    """Every place where noise is drawn, by its name in the module; gives each the key of its noise."""
    sites = {name: m for name, m in module.named_modules() if isinstance(m, Site) and m.active}
    for name, site in sites.items():
        if site.site != (key := site_key(name)):  # threads that predict write nothing
            site.site = key
    return sites
