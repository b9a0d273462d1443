"""The pipeline joins planners and storage: options, engine, staging queue, writer, reader, commit."""

__all__: list[str] = []
