"""A GPU on the host: executes PTX as Triton and nvcc emit it, checks every access and counts."""
