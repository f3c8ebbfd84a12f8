"""The fused JAX kernels of posenc, compiled on a machine without a GPU or a TPU.

``compile`` compiles them, ``loops`` counts instructions in compiled loops, ``roofline`` predicts
times from these counts, ``command`` is the command line.
"""
