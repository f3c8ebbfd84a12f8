"""Other libraries' positions beside posenc's: checked to be equal, then timed in alternating calls.

``side.py`` says what a peer is, ``ours.py`` is posenc's side of any scheme. ``torch_peers.py``
lists the peers in PyTorch, of which each kind has a file, and ``jax_peers.py`` those in JAX.
``measure.py`` checks and times them, ``report.py`` writes tables.
"""
