"""Adapters of JAX libraries for ``posenc audit``, one file each."""
