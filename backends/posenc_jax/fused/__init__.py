"""Attention in one Pallas kernel, on GPUs from Hopper on and on TPUs, with any scheme's bias.

``plan`` says what a kernel computes from, ``gradients`` how three kernels are differentiated,
``mosaic_gpu`` and ``tpu`` are the kernels, ``implementation`` chooses among them.
"""
