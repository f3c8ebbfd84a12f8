"""FlexAttention's GPU kernels for posenc, compiled and interpreted on a machine without a GPU.

``cases`` has the schemes and calls, ``fake_cuda`` makes torch believe in an H200, ``inductor``
captures and compiles the kernels, ``interpreter`` runs them on a CPU, ``command`` is the command
line.
"""
