"""The package's version, read by pyproject.toml and `xlnet_kernels.__version__`."""

__version__ = "0.1.0"
