"""The package's version: pyproject.toml and `xlnet_kernels.__version__` both read it here."""

__version__ = "0.1.0"
