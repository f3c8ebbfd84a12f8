"""Attention in one Pallas kernel, with any scheme's bias: for GPUs from Hopper on, and TPUs.

``plan`` is what a kernel computes from, ``gradients`` differentiates the kernels, ``mosaic_gpu``
and ``tpu`` hold them, ``implementation`` chooses between them and picks the form of the bias.
"""
