"""The version of Quarterdeck, as pyproject.toml and CHANGELOG.md say it; a test compares them."""

VERSION = "0.1.0"
