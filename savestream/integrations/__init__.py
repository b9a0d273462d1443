"""Bridges to frameworks; each module imports its framework only when it is used."""

__all__: list[str] = []
