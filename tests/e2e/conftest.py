"""The embedded model, shared with the model tests."""

from tests.engine.model.conftest import embedded_model

__all__ = ["embedded_model"]
