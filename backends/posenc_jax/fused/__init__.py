"""Attention in one Pallas kernel, with any scheme's bias: for GPUs from Hopper on, and TPUs.

``plan`` is what a kernel computes from. ``mosaic_gpu`` and ``tpu`` hold the kernels, ``gradients``
differentiates them. ``implementation`` chooses between them and picks the form of the bias.
"""
