"""PyTorch's distributed checkpoint (DCP) on savestream; :mod:`savestream.integrations.torch` is its front."""

__all__: list[str] = []
