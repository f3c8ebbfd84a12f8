"""Adapters of PyTorch libraries for ``posenc audit``, one file each."""
